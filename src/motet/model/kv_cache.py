"""Keys and values of running sequences, in blocks of fixed size that are zeroed when allocated.

Blocks are reference-counted: the rollouts of a group share full prompt blocks. Zeroing matters: a stale NaN in a block
would reach its next owner as 0 · NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.model.state_cache import StateCache
from motet.process.allocator import memory_apart


@dataclass(frozen=True)
class Writes:
    """Positions for the keys and values of a pass's first rows, both int64; later rows are padding and are not written."""

    blocks_T: Tensor
    offsets_T: Tensor
    """Offset in the block."""


class KVCache:
    """A pool of KV blocks for all layers; a layer's storage is allocated at its first write.

    Block 0 is never allocated and stays zero: it pads short block tables.
    """

    zero_block = 0

    def __init__(
        self, n_blocks: int, block_size: int, device: torch.device, *, clean: bool = True, slots: int | None = None
    ) -> None:
        """`clean` zeroes blocks; not needed if readers never read past a sequence's end.

        `slots` is the largest number of sequences with states; by default one per block.
        """
        self.n_blocks = n_blocks
        self.scrap_block = n_blocks + 1
        """Never allocated; padding rows may write to it."""
        self.block_size = block_size
        self.device = device
        self.states = StateCache(n_blocks if slots is None else slots, device)
        """States of layers without attention."""
        self._clean = clean
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._free = list(range(n_blocks, 0, -1))
        self._references = [0] * (n_blocks + 1)
        self._turns = [0] * (n_blocks + 1)

    @property
    def n_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def references(self, block: int) -> int:
        """Reference count of a block."""
        return self._references[block]

    def turn(self, block: int) -> int:
        """Number of allocations of a block; a held block's full rows do not change while this number is the same."""
        return self._turns[block]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's keys and values, in the layers that have written so far."""
        return sum(pool[0].nbytes for pool in self._pools())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.bytes_per_block // self.block_size

    def _pools(self) -> list[Tensor]:
        return [pool for pools in self._layers.values() for pool in pools]

    def layer(self, index: int, key_TKE: Tensor, value_TKE: Tensor) -> tuple[Tensor, Tensor]:
        """Storage of one layer: keys and values, [blocks, K, block_size, E] each."""
        storage = self._layers.get(index)
        if storage is None:
            storage = (self._storage(key_TKE), self._storage(value_TKE))
            self._layers[index] = storage
        return storage

    def write(self, layer: int, writes: Writes, key_TKE: Tensor, value_TKE: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values into a layer's storage, and return it."""
        pools = self.layer(layer, key_TKE, value_TKE)
        for pool, states in zip(pools, (key_TKE, value_TKE), strict=True):
            pool[writes.blocks_T, :, writes.offsets_T] = states[: len(writes.blocks_T)]
        return pools

    def _storage(self, states_TKE: Tensor) -> Tensor:
        _, heads, width = states_TKE.shape
        shape = (self.n_blocks + 2, heads, self.block_size, width)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=states_TKE.dtype, device=self.device)
        # zero pages of the system: blocks that were never allocated take no memory and no time
        memory = memory_apart(math.prod(shape) * states_TKE.element_size())
        return torch.frombuffer(memory, dtype=states_TKE.dtype).view(shape)

    def take(self, n: int) -> list[int]:
        """Allocate n zeroed blocks with one reference each.

        Raises:
            ValueError: too few are free; check `n_free` first.
        """
        if n > len(self._free):
            raise ValueError(f"{n} KV blocks requested, {len(self._free)} free")
        n_left = len(self._free) - n
        blocks = self._free[n_left:][::-1]
        if n and self._clean:  # first, so that a device error leaves them free
            index = torch.tensor(blocks, device=self.device)
            for pool in self._pools():
                pool.index_fill_(0, index, 0)
        del self._free[n_left:]
        for block in blocks:
            self._references[block] = 1
            self._turns[block] += 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._references[block] += 1

    def copy(self, source: int) -> int:
        """Allocate a block with the contents of another."""
        (block,) = self.take(1)
        try:
            for pool in self._pools():
                pool[block] = pool[source]
        except Exception:  # device error: no caller knows the block yet
            self.give_back([block])
            raise
        return block

    def contents(self, block: int) -> Tensor:
        """A copy of a block's keys and values in all layers, as bytes."""
        parts = [pool[block].flatten().view(torch.uint8) for pool in self._pools()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self.device)

    def restore(self, block: int, contents: Tensor) -> None:
        """Set a block's contents."""
        pools = self._pools()
        parts = contents.split([pool[0].nbytes for pool in pools])
        for pool, part in zip(pools, parts, strict=True):
            pool[block] = part.view(pool.dtype).view_as(pool[block])

    def give_back(self, blocks: list[int]) -> None:
        """Drop a reference to each block; blocks without references become free."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
