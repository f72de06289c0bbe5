"""Sequences of episodes kept between turns: their KV blocks and states.

If a turn's prompt begins with a kept sequence of its episode, only the rest is computed. Keys, values and states of a
token depend only on earlier tokens and the weights, so the result equals a full prefill bit for bit. Any other
allocation evicts kept sequences, least recently used first, to host memory, or drops them if that is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from motet.core.types import AdapterRef, IntArray
from motet.model.host_cache import HostCache, HostCopy
from motet.model.kv_cache import KVCache
from motet.rollout.sequences import Prompt, SampledSequence


@dataclass(eq=False)
class KeptSequence:
    """One sequence in the cache or in host memory, without the token that was sampled last."""

    episode: str
    job: str
    adapter: AdapterRef | None
    token_ids: IntArray  # [T]
    blocks: list[int]
    slot: int
    """Slot of its states after the last token; `no_slot` on a base without states."""
    copy: HostCopy | None = None
    """Host copy that replaces blocks and slot after eviction."""


class PrefixCache:
    """Kept sequences of episodes between two turns, in a part of a cache."""

    def __init__(self, cache: KVCache, host: HostCache, most_blocks: int, *, stateful: bool) -> None:
        """`stateful`: the base has states, so a sequence can only be continued from its end."""
        self._cache, self._host, self._most, self._stateful = cache, host, most_blocks, stateful
        self._kept: dict[KeptSequence, None] = {}
        """Least recently used first."""
        self._held: Counter[int] = Counter()
        """Number of kept sequences that hold each block."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: SampledSequence) -> None:
        """Take ownership of the blocks and slot of a finished sequence, and drop the one that it continued."""
        if not self._most:
            return
        ids = np.array(sequence.token_ids(0, sequence.whole), np.int32)
        request, slot = sequence.prompt.request, sequence.slot
        if not self._stateful:
            self._cache.states.give_back(slot)
            slot = self._cache.states.no_slot
        entry = KeptSequence(request.episodes[sequence.index], request.job, request.adapter, ids, sequence.blocks, slot)
        sequence.blocks, sequence.slot = [], self._cache.states.no_slot
        for other in [other for other in self._kept if other.episode == entry.episode]:
            if len(other.token_ids) <= _common(other.token_ids, ids):
                self._drop(other)
        self._kept[entry] = None
        self._held.update(entry.blocks)
        while len(self._held) > self._most:
            self._page_out(next(entry for entry in self._kept if entry.copy is None))

    def find(self, prompt: Prompt) -> tuple[KeptSequence | None, int]:
        """The kept sequence that a prompt continues, and the number of shared tokens; drops sequences of other versions."""
        request = prompt.request
        best, most, episodes = None, 0, set(request.episodes)
        for entry in [entry for entry in self._kept if entry.episode in episodes]:
            if entry.adapter != request.adapter:
                self._drop(entry)
                continue
            known = min(_common(entry.token_ids, request.prompt_ids), len(request.prompt_ids) - 1)
            if self._stateful and known < len(entry.token_ids):
                continue
            if known > most:
                best, most = entry, known
        if best is not None:
            self._kept[best] = self._kept.pop(best)
        return best, most

    def make_room(self, n_blocks: int, n_slots: int = 0, *, but: KeptSequence | None = None) -> bool:
        """Evict sequences other than `but` until the blocks and slots are free; returns whether they are.

        Evicts nothing if that would not be enough.
        """
        if self._free(n_blocks, n_slots):
            return True
        if n_blocks > self.most_free(but=() if but is None else but.blocks):
            return False
        for entry in [entry for entry in self._kept if entry is not but and entry.copy is None]:
            self._page_out(entry)
            if self._free(n_blocks, n_slots):
                return True
        return False

    def most_free(self, giving: Iterable[Iterable[int]] = (), but: Collection[int] = ()) -> int:
        """Blocks that would be free without kept sequences and the blocks of `giving`; those in `but` stay taken."""
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
        """Drop the sequences of these episodes or jobs."""
        for entry in [entry for entry in self._kept if entry.episode in names or entry.job in names]:
            self._drop(entry)

    def forget_version(self, adapter: AdapterRef) -> None:
        """Drop the sequences of a version."""
        for entry in [entry for entry in self._kept if entry.adapter == adapter]:
            self._drop(entry)

    def clear(self) -> None:
        """Drop all sequences."""
        for entry in list(self._kept):
            self._drop(entry)

    def _page_out(self, entry: KeptSequence) -> None:
        """Move a sequence to host memory, or drop it."""
        entry.copy = self._host.put(entry.blocks, entry.slot, len(entry.token_ids), spare=lambda: self._drop(entry))
        if entry.copy is None:
            self._drop(entry)
        else:
            self._give_back(entry)

    def _drop(self, entry: KeptSequence) -> None:
        del self._kept[entry]
        if entry.copy is not None:
            self._host.forget(entry.copy)
        self._give_back(entry)

    def _give_back(self, entry: KeptSequence) -> None:
        for block in entry.blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        self._cache.give_back(entry.blocks)
        self._cache.states.give_back(entry.slot)
        entry.blocks, entry.slot = [], self._cache.states.no_slot


def _common(left: IntArray, right: IntArray) -> int:
    """Length of the common prefix, in tokens."""
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n
