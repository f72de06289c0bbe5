"""Assigns the rows of a decode batch to tenants by share, and preempts sequences when demand exceeds the rows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from motet.model.kv_cache import KVCache
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.sequences import Prompt, SampledSequence, tenant_of

Taken = TypeVar("Taken")


class BatchRows:
    """Prompts and sequences of a decoder, and each tenant's share of the rows and the KV cache."""

    def __init__(
        self, cache: KVCache, blocks: BlockAllocator, most: int, land: Callable[[], bool] = lambda: False
    ) -> None:
        """`most` is the largest number of running sequences; see `self.land`."""
        self.land = land
        """Waits for the steps in flight, which may end sequences; returns whether there were any. None is in flight when
        sequences are preempted or start."""
        self.most = most
        self.waiting: deque[Prompt] = deque()
        self.preempted: deque[SampledSequence] = deque()
        self.running: list[SampledSequence] = []
        """Oldest first."""
        self.reading: Mapping[Prompt | SampledSequence, object] = {}
        """What the next pass reads parts of; its blocks stay until then."""
        self.preemptions = 0
        self._cache, self._blocks = cache, blocks
        self._limits: Mapping[str, int] = {}
        self._shares: Mapping[str, float] = {}
        self._had: Counter[str] = Counter()
        self._preemptible: list[SampledSequence] = []
        self._large: Prompt | SampledSequence | None = None
        """Item that needs more than its tenant's share of the cache. Nothing starts before it; it is preempted last."""

    @property
    def free(self) -> int:
        """Unused rows."""
        return self.most - len(self.running)

    def share_out(self) -> None:
        """Set each tenant's row limit from current demand; sequences above it are preempted, youngest first."""
        sequences = (*self.running, *self.preempted)
        had, wanted = Counter(map(tenant_of, self.running)), Counter(map(tenant_of, sequences))
        shares = {item.tenant: item.prompt.request.share for item in sequences}
        for prompt in self.waiting:
            wanted[tenant_of(prompt)] += len(prompt.waiting)
            shares[tenant_of(prompt)] = prompt.request.share
        whole = sum(shares.values())
        self._had, self._shares = had, {tenant: share / whole for tenant, share in shares.items()}
        begun = {tenant_of(prompt): 1 for prompt in self.waiting if prompt.blocks}  # as good as a row, till it has one
        self._limits = row_limits(wanted, begun | had, self._shares, self.most)
        if any(n > self._limits[tenant] for tenant, n in had.items()):
            if self.land():
                self.share_out()
                return
            youngest = self.running[::-1]
            for sequence in sorted(youngest, key=lambda item: item is self._large):
                if self.left(sequence) < 0:
                    self._preempt_running(sequence)
        large, there = self._large, (*self.running, *self.preempted, *self.waiting)
        if large is not None and (large not in there or (self._large_waits and self.left(large) <= 0)):
            self._large = None
        self._preemptible = list(self.running)  # sequences that start in this tick are still being prefilled

    def left(self, item: Prompt | SampledSequence) -> int:
        """Number of rows that the item's tenant may still take."""
        return self._limits[tenant_of(item)] - self._had[tenant_of(item)]

    @property
    def _large_waits(self) -> bool:
        return self._large is not None and self._large not in self.running

    def start(self, sequence: SampledSequence) -> None:
        """Give a sequence a row."""
        if sequence.prompt is self._large:
            self._large = sequence
        self.running.append(sequence)
        self._had[tenant_of(sequence)] += 1

    def drop_finished(self) -> None:
        """Free the rows of finished sequences."""
        if isinstance(self._large, SampledSequence) and self._large.finish is not None:
            self._large = None
        self.running = [item for item in self.running if item.finish is None]
        self._preemptible = [item for item in self._preemptible if item.finish is None]
        self._had = Counter(map(tenant_of, self.running))

    def clear(self) -> None:
        """Forget all prompts and sequences."""
        self.waiting.clear()
        self.preempted.clear()
        self.running.clear()
        self._preemptible.clear()
        self._large, self.reading = None, {}
        self._had.clear()

    def startable(self) -> list[Prompt]:
        """Prompts that may start or go on; preempted sequences precede all but tenants below their cache share.

        A prompt that has blocks goes on even if it fills the share: else it would give way to what it made give way.
        """
        waiting = [item for item in self.waiting if self.left(item) > 0]
        if self._large is not None and self._large_waits:
            tenant = tenant_of(self._large) if isinstance(self._large, Prompt) else None
            return [item for item in waiting if tenant_of(item) == tenant]
        stuck = {tenant_of(item) for item in self.preempted if self.left(item) > 0}
        if not stuck:
            return waiting
        below, fills = self._below_share(), self._below_share(filled=True)
        return [
            item
            for item in waiting
            if tenant_of(item) not in stuck and tenant_of(item) in (fills if item.blocks else below)
        ]

    def may_resume(self, sequence: SampledSequence) -> bool:
        """Whether a preempted sequence may take a row and blocks."""
        return self.left(sequence) > 0 and (sequence is self._large or not self._large_waits)

    def with_room(self, item: Prompt | SampledSequence, take: Callable[[], Taken], more: int = 0) -> Taken:
        """Call `take`, which allocates the item's blocks and leaves `more` further blocks free; returns its result.

        Preempts other items until `take` succeeds, or none if preempting all candidates would not be enough. Nothing may
        be in flight.
        """
        taken = take()
        if taken is not None and taken is not False:
            return taken
        candidates = self._candidates(item, more)
        if not self._blocks.suffices(item, more, candidates):
            return taken
        for candidate in candidates:
            if isinstance(candidate, Prompt):
                self._reclaim(candidate)
            else:
                self._preemptible.remove(candidate)
                self._preempt_running(candidate)
            taken = take()
            if taken is not None and taken is not False:
                break
        return taken

    def _candidates(self, item: Prompt | SampledSequence, more: int) -> list[Prompt | SampledSequence]:
        """Candidates for preemption: prompts that may not go on now, then other tenants' youngest rows, then prompts.

        Other tenants' rows and prompts qualify only if their tenant exceeds its share of the cache, and if the item's
        tenant stays within its own; otherwise the item would be preempted next. An item that needs more than its
        tenant's share becomes the large one, if there is none.
        """
        startable, held = set(self.startable()), self._held()
        prompts = [other for other in self.waiting if other is not item and other.blocks and other not in self.reading]
        candidates: list[Prompt | SampledSequence] = [other for other in prompts if other not in startable]
        for candidate in candidates:
            _drop(held[tenant_of(candidate)], candidate.blocks)
        tenant, needs = tenant_of(item), 1 if item.blocks else self._blocks.needs(item)
        fair_blocks = self._fair_blocks(tenant)
        if len(self._limits) > 1 and self._large is None and needs + 1 > fair_blocks > len(held[tenant]):
            self._large = item
        if len(self._limits) > 1 and (item is self._large or len(held[tenant]) + needs + more <= fair_blocks):
            rest: list[Prompt | SampledSequence] = [prompt for prompt in prompts if prompt in startable]
            for candidate in [*(row for row in reversed(self._preemptible) if row not in self.reading), *rest]:
                name = tenant_of(candidate)
                if name != tenant and candidate is not self._large and len(held[name]) > self._fair_blocks(name):
                    _drop(held[name], candidate.blocks)
                    candidates.append(candidate)
        return candidates

    def grow(self, chosen: set[SampledSequence]) -> list[SampledSequence]:
        """Give the chosen sequences blocks for their next tokens, oldest first; preempts the youngest if none is free.

        If blocks are short, the large item comes first, and tenants below their cache share come before others. A prompt
        that is partly read is younger than its tenant's sequences.
        """
        n_free = self._cache.n_free
        if n_free < len(chosen) and n_free < len(self._blocks.lacking(chosen)) and self.land():
            chosen = {item for item in chosen if item.finish is None}
        if self._cache.n_free >= len(chosen):  # each finds a block
            running = [item for item in self.running if item in chosen]
            self._blocks.grow(running)
            return running
        kept: set[SampledSequence] = set()
        parts = [prompt for prompt in self.waiting if prompt.blocks and prompt.unread]
        queue = deque[Prompt | SampledSequence]((*self.running, *parts))
        if len(self._limits) > 1:
            below = self._below_share()
            queue = deque(sorted(queue, key=lambda item: (item is not self._large, tenant_of(item) not in below)))
        while queue:
            sequence = queue.popleft()
            if isinstance(sequence, Prompt):
                continue
            if sequence not in chosen:
                kept.add(sequence)
                continue
            while not (grown := self._blocks.grow((sequence,))) and queue:
                youngest = queue.pop()
                if isinstance(youngest, Prompt):
                    self._reclaim(youngest)
                else:
                    self._preempt(youngest)
            if not grown:
                for prompt in self.waiting:
                    self._reclaim(prompt)
                grown = self._blocks.grow((sequence,))
            if grown:
                kept.add(sequence)
            else:
                self._preempt(sequence)
        self.running = [item for item in self.running if item in kept]
        return [item for item in self.running if item in chosen]

    def _below_share(self, *, filled: bool = False) -> set[str]:
        """Tenants that hold less than their share of the cache, and those that hold just this if it may be `filled`."""
        held = {name: len(blocks) for name, blocks in self._held().items()}
        return {name for name, n in held.items() if n < (fair := self._fair_blocks(name)) or (filled and n == fair)}

    def _held(self) -> dict[str, Counter[int]]:
        """For each tenant, the blocks that it holds, and how many of its sequences and prompts hold each."""
        held = {tenant: Counter[int]() for tenant in self._shares}
        everything: list[Prompt | SampledSequence] = [*self.running, *self.waiting]
        for item in everything:
            held[tenant_of(item)].update(item.blocks)
        return held

    def _fair_blocks(self, tenant: str) -> float:
        return self._shares[tenant] * self._cache.n_blocks

    def _reclaim(self, prompt: Prompt) -> None:
        """Free the blocks of a prompt that waits for a row; without a host copy it is prefilled again later."""
        if prompt.blocks:
            self._blocks.page_out(prompt)
        if prompt.copy is None:
            prompt.logits = None

    def _preempt_running(self, sequence: SampledSequence) -> None:
        self.running.remove(sequence)
        self._preempt(sequence)

    def _preempt(self, sequence: SampledSequence) -> None:
        self._had[tenant_of(sequence)] -= 1
        self._blocks.page_out(sequence)
        self.preempted.appendleft(sequence)
        self.preemptions += 1


def _drop(held: Counter[int], blocks: Iterable[int]) -> None:
    for block in blocks:
        held[block] -= 1
        if not held[block]:
            del held[block]


def row_limits(
    wanted: Mapping[str, int], had: Mapping[str, int], shares: Mapping[str, float], rows: int
) -> dict[str, int]:
    """The row limit of each tenant: max-min fair by share, with a sum of at most `rows`.

    Each tenant gets one row before any gets two. Between equal tenants, those that already have rows keep them.
    """
    if len(wanted) <= 1 or sum(wanted.values()) <= rows:
        return dict.fromkeys(wanted, rows)
    served = sorted(wanted, key=lambda name: (not had.get(name), wanted[name]))[:rows]
    served.sort(key=lambda name: (min(wanted[name], rows) / shares[name], had.get(name, 0), name))
    limits, left, weight = dict.fromkeys(wanted, 0), rows, sum(shares[name] for name in served)
    for later, tenant in zip(reversed(range(len(served))), served, strict=True):
        fair = int(left * shares[tenant] / weight + 1e-9)
        limits[tenant] = min(wanted[tenant], max(1, fair), left - later)
        left -= limits[tenant]
        weight -= shares[tenant]
    return limits
