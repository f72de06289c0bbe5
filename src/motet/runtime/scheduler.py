"""Who may sample next: fair shares of the engine, in tokens consumed, between tenants and then between the jobs of one.

`next_job` is the whole policy; the class around it only keeps accounts and wakes whoever is next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field

from motet.algorithms.packing import Standing


@dataclass
class Account:
    """What one job has used and is waiting for."""

    tenant: str
    weight: float
    """Its share relative to others of its tenant."""
    consumed: float = 0.0
    """Tokens sampled and trained so far."""
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    """Rows asked for, first come first served within the job."""
    running: int = 0
    """Requests that were let in and have not ended, and steps that are being trained."""

    @property
    def idle(self) -> bool:
        """Whether it asks for nothing."""
        return not self.waiting and not self.running


@dataclass
class TenantAccount:
    """What the jobs of one tenant have used together."""

    share: float
    consumed: float = 0.0
    """Tokens divided by the weights of their jobs, so that a token of a job with twice the weight counts for half."""
    level: float = 0.0
    """The most tokens per weight that one of its jobs had consumed when it was let in."""


def next_job(waiting: Mapping[str, Standing]) -> str:
    """The tenant with the least weighted tokens per share, and of its waiting jobs the one with the least tokens per weight.

    How many jobs a tenant has does not enter. Ties go by name.

    Args:
        waiting: the standing of each job that waits; at least one.
    """

    def order(job: str) -> tuple[float, str, float, str]:
        standing = waiting[job]
        return (
            standing.tenant_consumed / standing.share,
            standing.tenant,
            standing.consumed / standing.weight,
            job,
        )

    return min(waiting, key=order)


def weight_of(priority: int) -> float:
    """A job's share: every 10 points of priority double it."""
    return float(2.0 ** (priority / 10))


class FairScheduler:
    """Admits completions to an engine while there is room for them.

    Whoever comes, or comes back after having asked for nothing, starts level with the one that was served last: tokens that
    were not asked for at their time are no credit, or the others would stand still until it is used up (start-time fair
    queueing, Goyal et al. 1996; in two levels, as hierarchical SFQ there). That goes for tenants among each other, and for
    the jobs of one tenant.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self._accounts: dict[str, Account] = {}
        self._tenants: dict[str, TenantAccount] = {}
        self._shares: dict[str, float] = {}
        self._level = 0.0
        """The most weighted tokens per share that a tenant had consumed when a job of it was let in."""

    def join(self, job: str, weight: float, tenant: str = "") -> None:
        """Open an account for a job; of its tenant too, where that has none."""
        self._accounts[job] = Account(tenant, weight)
        if tenant not in self._tenants:
            self._tenants[tenant] = TenantAccount(self._shares.get(tenant, 1.0))

    def leave(self, job: str) -> None:
        """Close an account; whoever still waits on it is cancelled."""
        account = self._accounts.pop(job)
        for _, turn in account.waiting:
            turn.cancel()
        if all(other.tenant != account.tenant for other in self._accounts.values()):
            del self._tenants[account.tenant]

    def share(self, tenant: str, share: float) -> None:
        """Set a tenant's share, now and for jobs to come; what it has had stays as much per share."""
        self._shares[tenant] = share
        if (account := self._tenants.get(tenant)) is not None:
            account.consumed *= share / account.share
            account.share = share

    def reweigh(self, job: str, weight: float) -> None:
        """Change a job's weight; what it has had stays as much per weight."""
        if (account := self._accounts.get(job)) is not None:
            account.consumed *= weight / account.weight
            account.weight = weight

    def idle(self, job: str) -> bool:
        """Whether a job asks for nothing."""
        account = self._accounts.get(job)
        return account is None or account.idle

    def spend(self, job: str, tokens: float) -> None:
        """Charge tokens to a job and its tenant."""
        if (account := self._accounts.get(job)) is not None:
            account.consumed += tokens
            self._tenants[account.tenant].consumed += tokens / account.weight

    def standing(self, job: str) -> Standing:
        """What a job and its tenant have had."""
        account = self._accounts[job]
        tenant = self._tenants[account.tenant]
        return Standing(account.consumed, account.weight, account.tenant, tenant.consumed, tenant.share)

    @contextlib.contextmanager
    def working(self, job: str) -> Iterator[None]:
        """While a step is trained: the job waits for the device, so what it does not sample meanwhile is not given away."""
        account = self._accounts[job]
        self._come_back(account)
        account.running += 1
        try:
            yield
        finally:
            account.running -= 1

    @contextlib.asynccontextmanager
    async def permit(self, job: str, rows: int) -> AsyncIterator[None]:
        """Wait for this job's turn, then hold `rows` of the engine's capacity."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account = self._accounts[job]
        self._come_back(account)
        account.waiting.append((rows, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if (rows, turn) in account.waiting:
                account.waiting.remove((rows, turn))
                self._grant()  # it may have kept smaller requests behind it from going
            elif turn.done() and not turn.cancelled():
                self._free(account, rows)
            raise
        try:
            yield
        finally:
            self._free(account, rows)

    def _come_back(self, account: Account) -> None:
        """Bring one that asked for nothing level with the others."""
        tenant = self._tenants[account.tenant]
        if account.idle:
            account.consumed = max(account.consumed, tenant.level * account.weight)
        if all(other.idle for other in self._accounts.values() if other.tenant == account.tenant):
            tenant.consumed = max(tenant.consumed, self._level * tenant.share)

    def _free(self, account: Account, rows: int) -> None:
        account.running -= 1
        self.in_flight -= rows
        self._grant()

    def _grant(self) -> None:
        while True:
            waiting = {job: self.standing(job) for job, account in self._accounts.items() if account.waiting}
            if not waiting:
                return
            job = next_job(waiting)
            account, standing = self._accounts[job], waiting[job]
            rows, turn = account.waiting[0]
            if self.in_flight and self.in_flight + rows > self.capacity:
                return
            account.waiting.popleft()
            if turn.cancelled():
                continue
            tenant = self._tenants[account.tenant]
            tenant.level = max(tenant.level, account.consumed / account.weight)
            self._level = max(self._level, standing.tenant_consumed / standing.share)
            account.running += 1
            self.in_flight += rows
            turn.set_result(None)
