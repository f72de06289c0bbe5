"""States of running sequences in layers without attention; their size does not depend on a sequence's length.

A sequence has one slot for all layers. A slot is zeroed when it is allocated: zero is the state before the first token,
and a stale NaN must not reach the next owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StateCache:
    """A pool of slots; a layer's storage is allocated at its first read, so a base without such layers has none.

    Slot 0 is never allocated; it means that a sequence has no slot.
    """

    no_slot = 0

    def __init__(self, n_slots: int, device: torch.device) -> None:
        self.n_slots, self.device = n_slots, device
        self._pools: dict[tuple[int, str], Tensor] = {}
        self._free = list(range(n_slots, 0, -1))

    @property
    def n_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's states, in the layers used so far."""
        return sum(pool[0].nbytes for pool in self._pools.values())

    def take(self) -> int:
        """Allocate a zeroed slot.

        Raises:
            ValueError: no slot is free; each running sequence needs one, and a prompt needs one.
        """
        if not self._free:
            raise ValueError(f"a slot for states asked for, all {self.n_slots} are taken")
        slot = self._free[-1]
        for pool in self._pools.values():  # first, so that a device error leaves the slot free
            pool[slot].zero_()
        return self._free.pop()

    def copy(self, source: int) -> int:
        """Allocate a slot with a copy of another slot's states."""
        slot = self.take()
        try:
            for pool in self._pools.values():
                pool[slot] = pool[source]
        except Exception:  # device error: no caller knows the slot yet
            self.give_back(slot)
            raise
        return slot

    def contents(self, slot: int) -> Tensor:
        """A copy of a slot's states in all layers, fp32."""
        parts = [pool[slot].flatten() for pool in self._pools.values()]
        return torch.cat(parts) if parts else torch.empty(0, device=self.device)

    def restore(self, slot: int, contents: Tensor) -> None:
        """Set a slot's states from the result of `contents`."""
        pools = list(self._pools.values())
        for pool, part in zip(pools, contents.split([pool[0].numel() for pool in pools]), strict=True):
            pool[slot] = part.view_as(pool[slot])

    def give_back(self, slot: int) -> None:
        """Free a slot; `no_slot` is ignored."""
        if slot != self.no_slot:
            self._free.append(slot)

    def read(self, layer: int, kind: str, slots_S: Tensor, shape: Sequence[int]) -> Tensor:
        """States of one kind, each of the given shape: fp32 [S, *shape]."""
        pool = self._pools.get((layer, kind))
        if pool is None:
            pool = self._pools[(layer, kind)] = torch.zeros(self.n_slots + 1, *shape, device=self.device)
        return pool.index_select(0, slots_S)

    def write(self, layer: int, kind: str, slots_S: Tensor, states: Tensor) -> None:
        """Write states of one kind."""
        self._pools[(layer, kind)].index_copy_(0, slots_S, states)
