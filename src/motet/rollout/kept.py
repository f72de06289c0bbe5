"""What is kept of episodes between their turns: the KV blocks of sequences that ended, and their states.

A turn whose prompt begins as a kept sequence of its episode does reads what is new alone. Keys, values and states of a token
depend on the tokens before it and on the weights, so its bits are those of a prefill of everything. Whatever else needs a
block or a slot comes first: what was used least recently is let go.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from motet.model.kv_cache import KVCache
from motet.rollout.sequences import Prompt, Sequence
from motet.types import AdapterRef, IntArray


@dataclass(frozen=True, eq=False)
class Kept:
    """One sequence as the cache has it: all of it but the token that was sampled last."""

    episode: str
    job: str
    adapter: AdapterRef | None
    token_ids: IntArray  # [T]
    blocks: list[int]
    slot: int
    """Of its states after the last token; `no_slot` on a base without any."""


class KeptSequences:
    """Sequences of episodes that are between two turns, in a part of a cache."""

    def __init__(self, cache: KVCache, most_blocks: int, *, stateful: bool) -> None:
        """`stateful`: whether the base has states, which can be gone on from at the end of a sequence alone."""
        self._cache, self._most, self._stateful = cache, most_blocks, stateful
        self._kept: dict[Kept, None] = {}
        """The least recently used first."""
        self._held: Counter[int] = Counter()
        """Blocks, by how many kept sequences have them."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: Sequence) -> None:
        """Take over the blocks and the slot of a sequence that ended; what it went on from is not needed any more."""
        ids = np.array(sequence.read_ids()[:-1], np.int32)
        request, slot = sequence.prompt.request, sequence.slot
        if not self._stateful:
            self._cache.states.give_back(slot)
            slot = self._cache.states.no_slot
        one = Kept(request.episodes[sequence.index], request.job, request.adapter, ids, sequence.blocks, slot)
        sequence.blocks, sequence.slot = [], self._cache.states.no_slot
        for other in [other for other in self._kept if other.episode == one.episode]:
            if len(other.token_ids) <= _common(other.token_ids, ids):
                self._drop(other)
        self._kept[one] = None
        self._held.update(one.blocks)
        while len(self._held) > self._most:
            self._drop(next(iter(self._kept)))

    def begin(self, prompt: Prompt, more: int, budget: int | None) -> int | None:
        """Give a prompt its blocks and a slot; so many of its tokens are there already. None where it has to wait.

        Beside its own blocks so many `more` are left free; `budget` is the most tokens to compute.
        """
        kept, known = self._find(prompt)
        n_tokens = len(prompt.request.prompt_ids)
        n_blocks = -(-n_tokens // self._cache.block_size)
        n_new = n_blocks - known // self._cache.block_size
        if kept is not None and not self.make_room(n_new + more, 1, but=kept):
            kept, known, n_new = None, 0, n_blocks
        if budget is not None and n_tokens - known > budget:
            return None
        if not self.make_room(n_new + more, 1, but=kept):
            return None
        prompt.blocks = [] if kept is None else self._beginning(kept, known)
        prompt.blocks += self._cache.take(n_blocks - len(prompt.blocks))
        states = self._cache.states
        prompt.slot = states.copy(kept.slot) if kept is not None and self._stateful else states.take()
        return known

    def _find(self, prompt: Prompt) -> tuple[Kept | None, int]:
        """What a prompt goes on from, and how many of its tokens that has; sequences of other versions are let go."""
        request = prompt.request
        best, most = None, 0
        for one in [one for one in self._kept if one.episode in request.episodes]:
            if one.adapter != request.adapter:
                self._drop(one)
                continue
            known = min(_common(one.token_ids, request.prompt_ids), len(request.prompt_ids) - 1)
            if self._stateful and known < len(one.token_ids):
                continue
            if known > most:
                best, most = one, known
        if best is not None:
            self._kept[best] = self._kept.pop(best)
        return best, most

    def _beginning(self, one: Kept, known: int) -> list[int]:
        """Blocks with the first `known` tokens of a sequence: full ones are shared, one that is filled in part is copied."""
        n_full, rest = divmod(known, self._cache.block_size)
        self._cache.share(one.blocks[:n_full])
        return one.blocks[:n_full] + ([self._cache.copy(one.blocks[n_full])] if rest else [])

    def make_room(self, n_blocks: int, n_slots: int = 0, *, but: Kept | None = None) -> bool:
        """Whether so many blocks and slots are free, once sequences other than `but` have given way.

        None does where there would be too few blocks all the same.
        """
        if self._free(n_blocks, n_slots):
            return True
        if n_blocks > self._cache.n_free + self._only_here(but):
            return False
        for one in [one for one in self._kept if one is not but]:
            self._drop(one)
            if self._free(n_blocks, n_slots):
                return True
        return False

    def _free(self, n_blocks: int, n_slots: int) -> bool:
        return n_blocks <= self._cache.n_free and n_slots <= self._cache.states.n_free

    def forget(self, names: set[str]) -> None:
        """Let go of these episodes, or of all of these jobs."""
        for one in [one for one in self._kept if one.episode in names or one.job in names]:
            self._drop(one)

    def forget_version(self, adapter: AdapterRef) -> None:
        """Let go of what a version made."""
        for one in [one for one in self._kept if one.adapter == adapter]:
            self._drop(one)

    def clear(self) -> None:
        """Let go of everything."""
        for one in list(self._kept):
            self._drop(one)

    def _only_here(self, but: Kept | None) -> int:
        """Blocks that would be free without any kept sequence but this one."""
        needed = set() if but is None else set(but.blocks)
        return sum(self._cache.references(block) == count for block, count in self._held.items() if block not in needed)

    def _drop(self, one: Kept) -> None:
        del self._kept[one]
        for block in one.blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        self._cache.give_back(one.blocks)
        self._cache.states.give_back(one.slot)


def _common(left: IntArray, right: IntArray) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n
