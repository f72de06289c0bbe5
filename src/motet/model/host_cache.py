"""Copies of evicted KV cache blocks and states in host memory, so that they need not be recomputed.

Full blocks do not change, so a block that several sequences share is copied and restored once: its copy refers to the
cache block with the same contents while that block is held. Copies between a GPU and pinned memory are queued on the
compute stream, so a block is read before its next owner writes to it, and written before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.model.kv_cache import KVCache


@dataclass(eq=False)
class HostBlock:
    """One block of keys and values."""

    contents: Tensor
    holders: int = 0
    """Number of sequence copies that contain it."""
    twin: int = KVCache.zero_block
    """The cache block with the same contents, unless that block was reallocated since."""
    turn: int = 0
    """Allocation count of that block at the time of copying."""


@dataclass(eq=False)
class HostCopy:
    """Copy of one sequence's blocks and states."""

    blocks: list[HostBlock]
    states: Tensor | None
    """None if the sequence has no slot."""
    gone: bool = False
    """Whether the copy was dropped."""


class HostCache:
    """Host memory behind a `KVCache`, up to a limit."""

    def __init__(self, cache: KVCache, most_bytes: int) -> None:
        """With a limit of 0, nothing is copied."""
        self._cache, self._most = cache, most_bytes
        self.used = 0
        """Bytes of all copies."""
        self.tokens_out = 0
        """Tokens whose keys and values were copied to host memory; shared copies count once."""
        self.tokens_in = 0
        """Tokens copied back."""
        self.prefills_saved = 0
        """Sequences and prompts that were restored."""
        self._by_block: dict[int, HostBlock] = {}
        self._spare: dict[HostCopy, Callable[[], None]] = {}
        """Copies that may be dropped, least recently used first, each with its callback."""

    def put(
        self, blocks: Sequence[int], slot: int, n_tokens: int, *, spare: Callable[[], None] | None = None
    ) -> HostCopy | None:
        """Copy the first `n_tokens` of a sequence; None if memory is short. Its blocks and slot stay allocated.

        `spare` is called if other copies need the memory; it must drop this copy.
        """
        n_full, rest = divmod(n_tokens, self._cache.block_size)
        blocks = blocks[: n_full + bool(rest)]
        state_bytes = 0 if slot == self._cache.states.no_slot else self._size(self._cache.states.bytes_per_slot)
        while True:
            present = [self._copy_of(block) if place < n_full else None for place, block in enumerate(blocks)]
            needed = present.count(None) * self._size(self._cache.bytes_per_block) + state_bytes
            if self.used + needed <= self._most:
                break
            if needed > self._most or not self._spare:
                return None
            next(iter(self._spare.values()))()
        try:
            fresh = {
                place: HostBlock(self._to_host(self._cache.contents(blocks[place])))
                for place, host_block in enumerate(present)
                if host_block is None
            }
            states = self._to_host(self._cache.states.contents(slot)) if state_bytes else None
        except RuntimeError:  # torch is out of memory: evicted sequences are recomputed
            self._most = self.used
            return None
        copy = HostCopy([host_block or fresh[place] for place, host_block in enumerate(present)], states)
        for place, host_block in enumerate(copy.blocks):
            host_block.holders += 1
            if place in fresh:
                self.tokens_out += min(self._cache.block_size, n_tokens - place * self._cache.block_size)
                if place < n_full:
                    self._pair(host_block, blocks[place])
        self.used += needed
        if spare is not None:
            self._spare[copy] = spare
        return copy

    def present(self, copy: HostCopy, n_tokens: int) -> list[int]:
        """Cache blocks that still hold the start of a copy's first `n_tokens`; callers may share them."""
        blocks = []
        for host_block in copy.blocks[: n_tokens // self._cache.block_size]:
            if not self._is_current(host_block):
                break
            blocks.append(host_block.twin)
        return blocks

    def restore(self, copy: HostCopy, n_tokens: int, blocks: Sequence[int], slot: int, n_present: int) -> None:
        """Restore a copy's first `n_tokens`, except the first `n_present` blocks, and its states. The copy stays."""
        n_full, rest = divmod(n_tokens, self._cache.block_size)
        for place in range(n_present, n_full + bool(rest)):
            self._cache.restore(blocks[place], self._to_device(copy.blocks[place].contents))
            if place < n_full:
                self._pair(copy.blocks[place], blocks[place])
        if copy.states is not None:
            self._cache.states.restore(slot, self._to_device(copy.states))
        if copy in self._spare:
            self._spare[copy] = self._spare.pop(copy)
        self.tokens_in += n_tokens - n_present * self._cache.block_size
        self.prefills_saved += 1

    def forget(self, copy: HostCopy) -> None:
        """Drop a copy; blocks shared with other copies stay."""
        copy.gone = True
        self._spare.pop(copy, None)
        for host_block in copy.blocks:
            host_block.holders -= 1
            if host_block.holders == 0:
                self.used -= self._size(host_block.contents.nbytes)
                self._unpair(host_block)
        self.used -= 0 if copy.states is None else self._size(copy.states.nbytes)
        copy.blocks, copy.states = [], None

    def _copy_of(self, block: int) -> HostBlock | None:
        host_block = self._by_block.get(block)
        return host_block if host_block is not None and self._is_current(host_block) else None

    def _is_current(self, host_block: HostBlock) -> bool:
        """Whether its twin still holds the same contents."""
        return self._cache.references(host_block.twin) > 0 and self._cache.turn(host_block.twin) == host_block.turn

    def _pair(self, host_block: HostBlock, block: int) -> None:
        self._unpair(host_block)
        host_block.twin, host_block.turn = block, self._cache.turn(block)
        self._by_block[block] = host_block

    def _unpair(self, host_block: HostBlock) -> None:
        if self._by_block.get(host_block.twin) is host_block:
            del self._by_block[host_block.twin]

    @property
    def _pinned(self) -> bool:
        return self._cache.device.type == "cuda"

    def _size(self, n_bytes: int) -> int:
        """Bytes of a copy; torch rounds pinned memory up to a power of two."""
        return 1 << (n_bytes - 1).bit_length() if self._pinned and n_bytes else n_bytes

    def _to_host(self, contents: Tensor) -> Tensor:
        if not self._pinned:
            return contents
        host = torch.empty(contents.shape, dtype=contents.dtype, pin_memory=True)
        return host.copy_(contents, non_blocking=True)

    def _to_device(self, contents: Tensor) -> Tensor:
        return contents.to(self._cache.device, non_blocking=True)
