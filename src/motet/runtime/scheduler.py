"""Fair shares of the engine, in tokens consumed, first between tenants and then between each tenant's jobs.

The next request comes from the tenant with the least weighted tokens per share, and there from the job with the least
tokens per weight. The number of a tenant's jobs does not count; ties are broken by name. Heaps avoid a scan over all
accounts.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from motet.algorithms.packing import Standing

_MOMENT = 60.0
"""Seconds that a tenant counts as active after a charge."""
_SMALL_PIECE = 16
"""Rows that one request may have whatever the capacity, because each piece reads the prompt again."""


@dataclass
class Account:
    """Tokens used by one job, and its waiting requests."""

    tenant: str
    weight: float
    """Its share relative to its tenant's other jobs."""
    consumed: float = 0.0
    """Tokens sampled and trained so far."""
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    """Rows of each waiting request, first come first served within the job."""
    running: int = 0
    """Admitted requests that have not ended, and steps that are training."""
    active: bool = False
    """Whether it counts in its tenant's `active`."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running

    @property
    def had(self) -> float:
        """Tokens per weight, which orders a tenant's jobs."""
        return self.consumed / self.weight


class Least:
    """Finds the name with the least figure, for figures that mostly grow. A heap with lazy updates.

    A grown figure is corrected when its entry reaches the front; a fallen one is added again.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, str]] = []
        self._current: dict[str, float] = {}
        """The figure of each name's valid entry."""

    def add(self, name: str, figure: float) -> None:
        """Add a name, or report that its figure may have fallen."""
        if figure < self._current.get(name, math.inf):
            self._current[name] = figure
            heapq.heappush(self._entries, (figure, name))

    def first(self, figure_of: Callable[[str], float | None]) -> str | None:
        """The name with the least figure, ties broken by name; None without any. None of `figure_of` removes a name."""
        while self._entries:
            figure, name = self._entries[0]
            now = figure_of(name) if self._current.get(name) == figure else None
            if now == figure:
                return name
            if self._current.get(name) != figure:
                heapq.heappop(self._entries)
            elif now is None:
                heapq.heappop(self._entries)
                del self._current[name]
            else:
                self._current[name] = now
                heapq.heapreplace(self._entries, (now, name))
        return None


@dataclass
class TenantAccount:
    """Tokens used by all jobs of one tenant."""

    share: float
    consumed: float = 0.0
    """Tokens divided by their jobs' weights: a token of a job with weight 2 counts half."""
    level: float = 0.0
    """The most tokens per weight that any of its jobs had consumed when admitted."""
    jobs: int = 0
    active: int = 0
    """Number of its jobs with waiting or running requests."""
    rows: int = 0
    """Rows of the engine's capacity that it holds."""
    spent_at: float = -math.inf
    """Time of its last charge."""
    waiting: Least = field(default_factory=Least)
    """Its jobs that wait for admission."""

    @property
    def had(self) -> float:
        """Weighted tokens per share, which orders tenants."""
        return self.consumed / self.share


def weight_of(priority: int) -> float:
    """A job's weight: every 10 points of priority double it."""
    return float(2.0 ** (priority / 10))


class FairScheduler:
    """Admits completions to an engine while it has room.

    A tenant or job that is new, or returns after being idle, starts level with the one served last. Idle time earns no
    credit: otherwise the others would wait until it is used up (start-time fair queueing, Goyal et al. 1996;
    hierarchical SFQ for the two levels).
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self._clock = capacity, clock
        self.in_flight = 0
        self._accounts: dict[str, Account] = {}
        self._tenants: dict[str, TenantAccount] = {}
        self._shares: dict[str, float] = {}
        self.read = Counter[str]()
        """Tokens of prompts by job, and all those of its judges, since whoever counts them last took them."""
        self._waiting = Least()
        """Tenants with a job that waits for admission."""
        self._level = 0.0
        """The most weighted tokens per share that any tenant had consumed when one of its jobs was admitted."""

    def pieces(self, rows: int) -> list[slice]:
        """The parts in which completions of one prompt are requested, each in its turn, so that nobody waits for the whole."""
        most = max(_SMALL_PIECE, self.capacity // 4)
        return [slice(first, min(rows, first + most)) for first in range(0, rows, most)]

    def job_order(self, account: Account) -> float:
        """The figure that orders a tenant's jobs, least first; it must not fall while a job waits. A policy overrides it."""
        return account.had

    def tenant_order(self, account: TenantAccount) -> float:
        """The figure that orders tenants, least first; it must not fall while a tenant waits. A policy overrides it."""
        return account.had

    def join(self, job: str, weight: float, tenant: str = "") -> None:
        """Open an account for a job, and for its tenant if that has none."""
        self._accounts[job] = Account(tenant, weight)
        if tenant not in self._tenants:
            self._tenants[tenant] = TenantAccount(self._shares.get(tenant, 1.0))
        self._tenants[tenant].jobs += 1

    def leave(self, job: str) -> None:
        """Close an account; its waiting requests are cancelled."""
        account = self._accounts.pop(job)
        for _, turn in account.waiting:
            turn.cancel()
        tenant = self._tenants[account.tenant]
        tenant.jobs -= 1
        tenant.active -= account.active
        if not tenant.jobs:
            del self._tenants[account.tenant]

    def share(self, tenant: str, share: float) -> None:
        """Set a tenant's share, now and for later jobs; its consumption per share stays the same."""
        self._shares[tenant] = share
        if (account := self._tenants.get(tenant)) is not None:
            account.consumed *= share / account.share
            account.share = share
            self._waiting.add(tenant, self.tenant_order(account))  # it may have fallen by rounding

    def reweigh(self, job: str, weight: float) -> None:
        """Change a job's weight; its consumption per weight stays the same."""
        if (account := self._accounts.get(job)) is not None:
            account.consumed *= weight / account.weight
            account.weight = weight
            self._tenants[account.tenant].waiting.add(job, self.job_order(account))

    def idle(self, job: str) -> bool:
        """Whether a job has no waiting or running request."""
        account = self._accounts.get(job)
        return account is None or account.idle

    async def few_wait(self, job: str, most: int) -> None:
        """Wait until fewer than `most` requests of a job wait for admission."""
        waiting = self._accounts[job].waiting
        while len(waiting) >= most and not (turn := waiting[-most][1]).done():
            await asyncio.wait([turn])

    def spend(self, job: str, tokens: float) -> None:
        """Charge tokens to a job and its tenant."""
        if (account := self._accounts.get(job)) is not None:
            account.consumed += tokens
            self._tenants[account.tenant].consumed += tokens / account.weight
            self._tenants[account.tenant].spent_at = self._clock()

    def payer(self, job: str) -> tuple[str, float]:
        """The tenant that a job is charged to, and its share; no tenant if the job has no account."""
        account = self._accounts.get(job)
        return ("", 1.0) if account is None else (account.tenant, self._tenants[account.tenant].share)

    def others(self, tenant: str) -> float:
        """Shares of other tenants active in the last minute, divided by this tenant's share."""
        since = self._clock() - _MOMENT
        others = (other for name, other in self._tenants.items() if name != tenant)
        whole = sum(other.share for other in others if other.active or other.spent_at > since)
        return whole / self._shares.get(tenant, 1.0)

    def standing(self, job: str) -> Standing:
        """Consumption and weights of a job and its tenant."""
        account = self._accounts[job]
        tenant = self._tenants[account.tenant]
        return Standing(account.consumed, account.weight, account.tenant, tenant.consumed, tenant.share)

    @contextlib.contextmanager
    def working(self, job: str) -> Iterator[None]:
        """Count the job as active while a step trains, so that its turn is not given away."""
        account = self._accounts[job]
        self._come_back(account)
        account.running += 1
        self._count(job, account)
        try:
            yield
        finally:
            account.running -= 1
            self._count(job, account)

    @contextlib.asynccontextmanager
    async def permit(self, job: str, rows: int, *, at_once: bool = False) -> AsyncIterator[None]:
        """Wait for this job's turn, then hold `rows` of the engine's capacity.

        `at_once` skips other tenants' turns while this tenant stays within its share; the engine then makes room for
        it.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account = self._accounts[job]
        tenant = self._tenants[account.tenant]
        self._come_back(account)
        if at_once and not account.waiting and self._within_share(account.tenant, rows):
            self._let_in(account, rows)
            self._count(job, account)
            try:
                yield
            finally:
                self._free(job, account, tenant, rows)
            return
        account.waiting.append((rows, turn))
        self._count(job, account)
        tenant.waiting.add(job, self.job_order(account))
        self._waiting.add(account.tenant, self.tenant_order(tenant))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if (rows, turn) in account.waiting:
                account.waiting.remove((rows, turn))
                self._count(job, account)
                self._grant()  # it may have blocked smaller requests behind it
            elif turn.done() and not turn.cancelled():
                self._free(job, account, tenant, rows)
            raise
        try:
            yield
        finally:
            self._free(job, account, tenant, rows)

    def _come_back(self, account: Account) -> None:
        """Raise an idle account to the level of the others."""
        tenant = self._tenants[account.tenant]
        if account.idle:
            account.consumed = max(account.consumed, tenant.level * account.weight)
        if not tenant.active:
            tenant.consumed = max(tenant.consumed, self._level * tenant.share)

    def _count(self, job: str, account: Account) -> None:
        """Update a tenant's number of active jobs after one changed."""
        if self._accounts.get(job) is account and account.active == account.idle:
            account.active = not account.idle
            self._tenants[account.tenant].active += 1 if account.active else -1

    def _within_share(self, tenant: str, rows: int) -> bool:
        """Whether a tenant stays within its share of the capacity with `rows` more."""
        return self._tenants[tenant].rows + rows <= self.capacity / (1 + self.others(tenant))

    def _let_in(self, account: Account, rows: int) -> None:
        tenant = self._tenants[account.tenant]
        tenant.level = max(tenant.level, account.had)
        tenant.rows += rows
        self._level = max(self._level, tenant.had)
        account.running += 1
        self.in_flight += rows

    def _free(self, job: str, account: Account, tenant: TenantAccount, rows: int) -> None:
        account.running -= 1
        self.in_flight -= rows
        tenant.rows -= rows
        self._count(job, account)
        self._grant()

    def _first_of(self, tenant: str) -> str | None:
        """The next job of a tenant; None if none waits."""
        account = self._tenants.get(tenant)
        return None if account is None else account.waiting.first(self._figure_of_job)

    def _figure_of_job(self, job: str) -> float | None:
        account = self._accounts.get(job)
        return self.job_order(account) if account is not None and account.waiting else None

    def _figure_of_tenant(self, tenant: str) -> float | None:
        return None if self._first_of(tenant) is None else self.tenant_order(self._tenants[tenant])

    def _grant(self) -> None:
        """Admit waiting requests, least consumption first, while there is room."""
        while (name := self._waiting.first(self._figure_of_tenant)) is not None:
            job = self._first_of(name)
            assert job is not None
            account = self._accounts[job]
            rows, turn = account.waiting[0]
            if self.in_flight and self.in_flight + rows > self.capacity:
                return
            account.waiting.popleft()
            if turn.cancelled():
                self._count(job, account)
                continue
            self._let_in(account, rows)
            turn.set_result(None)
