"""Rows of a decode batch: who has one, who waits for one, and who gives way when several tenants want more than there are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from motet.model.kv_cache import KVCache
from motet.rollout.block_allocator import BlockAllocator
from motet.rollout.sequences import Prompt, SampledSequence, tenant_of

Taken = TypeVar("Taken")


class BatchRows:
    """Prompts and sequences of a decoder, and each tenant's part of its rows and of its cache."""

    def __init__(self, cache: KVCache, blocks: BlockAllocator, most: int) -> None:
        """`most` is how many sequences run at a time."""
        self.most = most
        self.waiting: deque[Prompt] = deque()
        self.preempted: deque[SampledSequence] = deque()
        self.running: list[SampledSequence] = []
        """Oldest first."""
        self.preemptions = 0
        self._cache, self._blocks = cache, blocks
        self._limits: Mapping[str, int] = {}
        self._shares: Mapping[str, float] = {}
        self._had: Counter[str] = Counter()
        self._can_give: list[SampledSequence] = []

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return self.most - len(self.running)

    def share_out(self) -> None:
        """Set each tenant's most rows by who is there; its youngest beyond that give way."""
        had, wanted, shares = Counter[str](), Counter[str](), dict[str, float]()
        for item in (*self.running, *self.preempted):
            wanted[tenant_of(item)] += 1
            shares[tenant_of(item)] = item.prompt.request.share
        for prompt in self.waiting:
            wanted[tenant_of(prompt)] += len(prompt.waiting)
            shares[tenant_of(prompt)] = prompt.request.share
        had.update(map(tenant_of, self.running))
        whole = sum(shares.values())
        self._had, self._shares = had, {tenant: share / whole for tenant, share in shares.items()}
        self._limits = row_limits(wanted, had, self._shares, self.most)
        for sequence in reversed(self.running) if any(n > self._limits[tenant] for tenant, n in had.items()) else ():
            if self.left(sequence) < 0:
                self._give_way(sequence)
        self._can_give = list(self.running)  # what starts in this tick is part of a prefill

    def left(self, item: Prompt | SampledSequence) -> int:
        """Rows that the tenant of this may still take."""
        return self._limits[tenant_of(item)] - self._had[tenant_of(item)]

    def start(self, sequence: SampledSequence) -> None:
        """Give a sequence a row."""
        self.running.append(sequence)
        self._had[tenant_of(sequence)] += 1

    def drop_finished(self) -> None:
        """Take back the rows of sequences that have ended."""
        self.running = [item for item in self.running if item.finish is None]
        self._had = Counter(map(tenant_of, self.running))

    def may_begin(self) -> set[str]:
        """Tenants whose prompts may begin. What gave way comes first, except before a tenant with little of the cache."""
        names = {tenant_of(item) for item in self.waiting if self.left(item) > 0}
        stuck = {tenant_of(item) for item in self.preempted if self.left(item) > 0}
        return (names - stuck) & self._with_little() if stuck else names

    def with_room(self, item: Prompt | SampledSequence, take: Callable[[], Taken]) -> Taken:
        """Take blocks for a prompt or sequence; where there are too few, again after each thing that gives way to it."""
        while (taken := take()) is None or taken is False:
            if not self._gives_way_to(item):
                break
        return taken

    def _gives_way_to(self, item: Prompt | SampledSequence) -> bool:
        """Whether anything did: a prompt that cannot begin now, or the youngest row of a tenant with much of the cache."""
        may_begin = self.may_begin()
        for prompt in self.waiting:
            if (
                prompt is not item
                and prompt.logits is not None
                and prompt.blocks
                and tenant_of(prompt) not in may_begin
            ):
                self._reclaim(prompt)
                return True
        if len(self._limits) > 1 and tenant_of(item) in (little := self._with_little()):
            for sequence in reversed(self._can_give):
                if tenant_of(sequence) not in little:
                    self._can_give.remove(sequence)
                    self._give_way(sequence)
                    return True
        return False

    def grow(self, chosen: set[SampledSequence]) -> list[SampledSequence]:
        """Give some running sequences a block for their next tokens, oldest first; the youngest give way.

        Those of tenants with little of the cache come before others.
        """
        kept: set[SampledSequence] = set()
        queue = deque(self.running)
        if len(self._limits) > 1 and self._cache.n_free < len(chosen):
            little = self._with_little()
            queue = deque(sorted(self.running, key=lambda item: tenant_of(item) not in little))
        while queue:
            sequence = queue.popleft()
            if sequence not in chosen:
                kept.add(sequence)
                continue
            while not (grown := self._blocks.grow(sequence)) and queue:
                self._preempt(queue.pop())
            if not grown:
                for prompt in self.waiting:
                    self._reclaim(prompt)
                grown = self._blocks.grow(sequence)
            if grown:
                kept.add(sequence)
            else:
                self._preempt(sequence)
        self.running = [item for item in self.running if item in kept]
        return [item for item in self.running if item in chosen]

    def _with_little(self) -> set[str]:
        """Tenants that have less than their part of the cache."""
        blocks: dict[str, set[int]] = {tenant: set() for tenant in self._shares}
        for sequence in self.running:
            blocks[tenant_of(sequence)].update(sequence.blocks)
        for prompt in self.waiting:
            blocks[tenant_of(prompt)].update(prompt.blocks)
        return {name for name, held in blocks.items() if len(held) < self._shares[name] * self._cache.n_blocks}

    def _reclaim(self, prompt: Prompt) -> None:
        """Take back the blocks of a prompt that waits for a row; without a copy it is prefilled again later."""
        if prompt.blocks:
            self._blocks.page_out(prompt)
        if prompt.copy is None:
            prompt.logits = None

    def _give_way(self, sequence: SampledSequence) -> None:
        self.running.remove(sequence)
        self._had[tenant_of(sequence)] -= 1
        self._preempt(sequence)

    def _preempt(self, sequence: SampledSequence) -> None:
        self._blocks.page_out(sequence)
        self.preempted.appendleft(sequence)
        self.preemptions += 1


def row_limits(
    wanted: Mapping[str, int], had: Mapping[str, int], shares: Mapping[str, float], rows: int
) -> dict[str, int]:
    """The most rows of each tenant: max-min fair by share, and no more than `rows` together if they want more.

    Each has one row before anybody has two. Where tenants are equal, the ones that have rows keep them.
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
