"""Allocates KV cache blocks and state slots, shares blocks within a group, and copies both to host memory.

Sequences kept between turns are evicted first. Sequences that do not fit into host memory are prefilled again.
"""

from __future__ import annotations

from collections.abc import Iterable

from motet.model.host_cache import HostCache, HostCopy
from motet.model.kv_cache import KVCache
from motet.rollout.prefix_cache import KeptSequence, PrefixCache
from motet.rollout.sequences import Prompt, SampledSequence


class BlockAllocator:
    """Allocates the blocks and slots of a cache, and copies of them in host memory."""

    def __init__(self, cache: KVCache, host: HostCache, kept: PrefixCache) -> None:
        self._cache, self._host, self._kept = cache, host, kept

    def begin(self, prompt: Prompt, more: int) -> bool:
        """Allocate a prompt's blocks and slot, and find what of it is computed already; False if it must wait.

        Leaves `more` further blocks free.
        """
        n_blocks = self._blocks_of(prompt.whole)
        if prompt.copy is not None:
            return self._come_back(prompt, n_blocks, more)
        kept, known = self._kept.find(prompt)
        if kept is not None and self._go_on(prompt, kept, known, n_blocks, more):
            prompt.unread = prompt.whole - known
            return True
        if not self._kept.make_room(n_blocks + more, 1):
            return False
        # assigned before the next call can fail, so that they are freed then
        prompt.blocks = self._cache.take(n_blocks)
        prompt.slot = self._cache.states.take()
        return True

    def fork(self, prompt: Prompt, *, alone: bool) -> SampledSequence | None:
        """Start the prompt's next completion; None if it must wait. Full blocks are shared, states are copied.

        A partly filled block is copied. The last completion takes it over, and so does any completion if no block is
        free and the prompt is `alone`; the prompt is then prefilled again later.
        """
        n_full, rest = divmod(len(prompt.request.prompt_ids), self._cache.block_size)
        last = len(prompt.waiting) == 1
        take_over = bool(rest) and (last or (alone and not self._kept.make_room(1)))
        if not self._kept.make_room(1 if rest and not take_over else 0, 1):
            return None
        sequence = prompt.waiting.pop(0)
        self._cache.share(prompt.blocks[:n_full])
        sequence.blocks = list(prompt.blocks[:n_full])
        try:
            sequence.slot = self._cache.states.copy(prompt.slot)
            if rest:
                sequence.blocks.append(prompt.blocks.pop() if take_over else self._cache.copy(prompt.blocks[n_full]))
        except Exception:  # device error: no caller knows the sequence yet
            self.give_back(sequence)
            raise
        if take_over:
            self.give_back(prompt)
        return sequence

    def resume(self, sequence: SampledSequence) -> bool:
        """Allocate a preempted sequence's blocks, including one for its next token, and its slot; False if it must wait."""
        n_blocks = self._blocks_of(sequence.length)
        if sequence.copy is not None:
            return self._come_back(sequence, n_blocks)
        if not self._kept.make_room(n_blocks, 1):
            return False
        sequence.blocks = self._cache.take(n_blocks)  # as in `begin`
        sequence.slot = self._cache.states.take()
        return True

    def needs(self, item: Prompt | SampledSequence) -> int:
        """Number of blocks for all tokens of the item."""
        return self._blocks_of(item.length if isinstance(item, SampledSequence) else len(item.request.prompt_ids))

    def suffices(self, item: Prompt | SampledSequence, more: int, giving: Iterable[Prompt | SampledSequence]) -> bool:
        """Whether freeing the blocks of `giving` would leave enough for this item and `more` further blocks."""
        n_blocks, present, copy, known = self.needs(item), list[int](), item.copy, item.known
        if item.blocks:
            n_blocks = 1
        elif copy is None and isinstance(item, Prompt):
            kept, known = self._kept.find(item)
            if kept is not None:
                copy, present = kept.copy, kept.blocks[: known // self._cache.block_size]
        if copy is not None:
            present = self._host.present(copy, known)
        return n_blocks + more - len(present) <= self._kept.most_free((giver.blocks for giver in giving), present)

    def grow(self, running: Iterable[SampledSequence]) -> bool:
        """Ensure that running sequences have a block for their next step; False, for all, if too few are free."""
        lacking = self.lacking(running)
        if lacking and not self._kept.make_room(len(lacking)):
            return False
        for sequence, block in zip(lacking, self._cache.take(len(lacking)), strict=True):
            sequence.blocks.append(block)
        return True

    def lacking(self, running: Iterable[SampledSequence]) -> list[SampledSequence]:
        """The running sequences that need a block more for their next step."""
        size = self._cache.block_size
        return [row for row in running if row.n_prompt + len(row.tokens) + row.in_flight > size * len(row.blocks)]

    def trim(self, sequence: SampledSequence, n_tokens: int) -> None:
        """Free the blocks beyond the sequence's first tokens."""
        n_blocks = self._blocks_of(n_tokens)
        self._cache.give_back(sequence.blocks[n_blocks:])
        del sequence.blocks[n_blocks:]

    def page_out(self, owner: Prompt | SampledSequence) -> None:
        """Free the owner's blocks and slot, after copying them to host memory if there is room."""
        copy, unread = self._host.put(owner.blocks, owner.slot, owner.known), owner.unread
        self.give_back(owner)
        if copy is not None:
            owner.copy, owner.unread = copy, unread

    def give_back(self, owner: Prompt | SampledSequence) -> None:
        """Free the owner's blocks, slot and host copy."""
        if owner.copy is not None:
            self._host.forget(owner.copy)
            owner.copy = None
        self._cache.give_back(owner.blocks)
        self._cache.states.give_back(owner.slot)
        owner.blocks, owner.slot, owner.unread = [], self._cache.states.no_slot, owner.whole

    def _come_back(self, owner: Prompt | SampledSequence, n_blocks: int, more: int = 0) -> bool:
        if owner.copy is None or not self._copy_back(owner, owner.copy, owner.known, n_blocks, more):
            return False
        self._host.forget(owner.copy)
        owner.copy = None
        return True

    def _go_on(self, prompt: Prompt, kept: KeptSequence, known: int, n_blocks: int, more: int) -> bool:
        """Start a prompt from a kept sequence: share full blocks, copy a partly filled one."""
        if kept.copy is not None:
            return self._copy_back(prompt, kept.copy, known, n_blocks, more)
        n_full, rest = divmod(known, self._cache.block_size)
        if not self._kept.make_room(n_blocks - n_full + more, 1, but=kept):
            return False
        states = self._cache.states
        prompt.slot = states.take() if kept.slot == states.no_slot else states.copy(kept.slot)
        self._cache.share(kept.blocks[:n_full])
        prompt.blocks = kept.blocks[:n_full]
        if rest:
            prompt.blocks.append(self._cache.copy(kept.blocks[n_full]))
        prompt.blocks += self._cache.take(n_blocks - len(prompt.blocks))
        return True

    def _copy_back(
        self, owner: Prompt | SampledSequence, copy: HostCopy, n_tokens: int, n_blocks: int, more: int
    ) -> bool:
        present = self._host.present(copy, n_tokens)
        self._cache.share(present)  # before evictions, which could free these blocks
        if not self._kept.make_room(n_blocks - len(present) + more, 1) or copy.gone:
            self._cache.give_back(present)
            return False
        owner.blocks = list(present)
        owner.blocks += self._cache.take(n_blocks - len(present))
        owner.slot = self._cache.states.take()
        self._host.restore(copy, n_tokens, owner.blocks, owner.slot, len(present))
        return True

    def _blocks_of(self, n_tokens: int) -> int:
        return -(-n_tokens // self._cache.block_size)
