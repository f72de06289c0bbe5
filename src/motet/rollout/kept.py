"""What is kept of episodes between their turns: the KV blocks of sequences that ended, and their states.

A turn whose prompt begins as a kept sequence of its episode does reads what is new alone. Keys, values and states of a token
depend on the tokens before it and on the weights, so its bits are those of a prefill of everything. Whatever else needs a
block or a slot comes first: what was used least recently moves to host memory, and is let go where that has no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from motet.model.host_cache import HostCache, HostCopy
from motet.model.kv_cache import KVCache
from motet.rollout.sequences import Prompt, SampledSequence
from motet.types import AdapterRef, IntArray


@dataclass(eq=False)
class KeptSequence:
    """One sequence as the cache has it, or host memory: all of it but the token that was sampled last."""

    episode: str
    job: str
    adapter: AdapterRef | None
    token_ids: IntArray  # [T]
    blocks: list[int]
    slot: int
    """Of its states after the last token; `no_slot` on a base without any."""
    copy: HostCopy | None = None
    """In the place of blocks and slot, where it gave way to others."""


class KeptSequences:
    """Sequences of episodes that are between two turns, in a part of a cache."""

    def __init__(self, cache: KVCache, host: HostCache, most_blocks: int, *, stateful: bool) -> None:
        """`stateful`: whether the base has states, which can be gone on from at the end of a sequence alone."""
        self._cache, self._host, self._most, self._stateful = cache, host, most_blocks, stateful
        self._kept: dict[KeptSequence, None] = {}
        """The least recently used first."""
        self._held: Counter[int] = Counter()
        """Blocks of the cache, by how many kept sequences have them."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: SampledSequence) -> None:
        """Take over the blocks and the slot of a sequence that ended; what it went on from is not needed any more."""
        if not self._most:
            return
        ids = np.array(sequence.read_ids()[:-1], np.int32)
        request, slot = sequence.prompt.request, sequence.slot
        if not self._stateful:
            self._cache.states.give_back(slot)
            slot = self._cache.states.no_slot
        one = KeptSequence(request.episodes[sequence.index], request.job, request.adapter, ids, sequence.blocks, slot)
        sequence.blocks, sequence.slot = [], self._cache.states.no_slot
        for other in [other for other in self._kept if other.episode == one.episode]:
            if len(other.token_ids) <= _common(other.token_ids, ids):
                self._drop(other)
        self._kept[one] = None
        self._held.update(one.blocks)
        while len(self._held) > self._most:
            self._page_out(next(one for one in self._kept if one.copy is None))

    def find(self, prompt: Prompt) -> tuple[KeptSequence | None, int]:
        """What a prompt goes on from, and how many of its tokens that has; sequences of other versions are let go."""
        request = prompt.request
        best, most, episodes = None, 0, set(request.episodes)
        for one in [one for one in self._kept if one.episode in episodes]:
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

    def make_room(self, n_blocks: int, n_slots: int = 0, *, but: KeptSequence | None = None) -> bool:
        """Whether so many blocks and slots are free, once sequences other than `but` have given way.

        None does where there would be too few blocks all the same.
        """
        if self._free(n_blocks, n_slots):
            return True
        if n_blocks > self.most_free(but=() if but is None else but.blocks):
            return False
        for one in [one for one in self._kept if one is not but and one.copy is None]:
            self._page_out(one)
            if self._free(n_blocks, n_slots):
                return True
        return False

    def most_free(self, giving: Iterable[Iterable[int]] = (), but: Collection[int] = ()) -> int:
        """Blocks that would be free if nothing was kept and these owners had none; `but` stay."""
        held = self._held.copy()
        for blocks in giving:
            held.update(blocks)
        stay = set(but)
        return self._cache.n_free + sum(
            self._cache.references(block) == count for block, count in held.items() if block not in stay
        )

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

    def _page_out(self, one: KeptSequence) -> None:
        """Move a sequence to host memory, or let go of it."""
        one.copy = self._host.put(one.blocks, one.slot, len(one.token_ids), spare=lambda: self._drop(one))
        if one.copy is None:
            self._drop(one)
        else:
            self._give_back(one)

    def _drop(self, one: KeptSequence) -> None:
        del self._kept[one]
        if one.copy is not None:
            self._host.forget(one.copy)
        self._give_back(one)

    def _give_back(self, one: KeptSequence) -> None:
        for block in one.blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        self._cache.give_back(one.blocks)
        self._cache.states.give_back(one.slot)
        one.blocks, one.slot = [], self._cache.states.no_slot


def _common(left: IntArray, right: IntArray) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n
