"""States of running sequences: what a mixer that is no attention remembers of all tokens so far, whatever their number.

A sequence has one slot, for all layers. It is zeroed when it is handed out: that is the state before the first token, and a
stale NaN would reach the next owner otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StateCache:
    """A pool of slots; storage is made when a layer first writes, so a base without such layers has none.

    Slot 0 is never handed out: a sequence that has it has none.
    """

    no_slot = 0

    def __init__(self, n_slots: int, device: torch.device) -> None:
        self.n_slots, self.device = n_slots, device
        self._pools: dict[tuple[int, str], Tensor] = {}
        self._free = list(range(n_slots, 0, -1))

    @property
    def n_free(self) -> int:
        """Slots that can be handed out."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's states, of the layers that have written so far."""
        return sum(pool[0].nbytes for pool in self._pools.values())

    def take(self) -> int:
        """Hand out a zeroed slot.

        Raises:
            ValueError: none is free; there must be one for each running sequence, and one for a prompt.
        """
        if not self._free:
            raise ValueError(f"a slot for states asked for, all {self.n_slots} are taken")
        slot = self._free[-1]
        for pool in self._pools.values():  # first: a fault of the device leaves it free
            pool[slot].zero_()
        return self._free.pop()

    def copy(self, source: int) -> int:
        """A new slot with the states of another."""
        slot = self.take()
        try:
            for pool in self._pools.values():
                pool[slot] = pool[source]
        except Exception:  # a fault of the device: nobody else knows of it yet
            self.give_back(slot)
            raise
        return slot

    def contents(self, slot: int) -> Tensor:
        """A copy of a slot's states in all layers, fp32."""
        parts = [pool[slot].flatten() for pool in self._pools.values()]
        return torch.cat(parts) if parts else torch.empty(0, device=self.device)

    def restore(self, slot: int, contents: Tensor) -> None:
        """Make a slot what another was."""
        pools = list(self._pools.values())
        for pool, part in zip(pools, contents.split([pool[0].numel() for pool in pools]), strict=True):
            pool[slot] = part.view_as(pool[slot])

    def give_back(self, slot: int) -> None:
        """Let a slot be handed out again; `no_slot` is passed over."""
        if slot != self.no_slot:
            self._free.append(slot)

    def read(self, layer: int, kind: str, slots_S: Tensor, shape: Sequence[int]) -> Tensor:
        """States of one kind, of this shape each: fp32 [S, ...]."""
        pool = self._pools.get((layer, kind))
        if pool is None:
            pool = self._pools[(layer, kind)] = torch.zeros(self.n_slots + 1, *shape, device=self.device)
        return pool.index_select(0, slots_S)

    def write(self, layer: int, kind: str, slots_S: Tensor, states: Tensor) -> None:
        """Replace what was read."""
        self._pools[(layer, kind)].index_copy_(0, slots_S, states)
