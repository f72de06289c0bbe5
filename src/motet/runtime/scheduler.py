"""Who may sample next: fair shares of the engine, in tokens consumed.

`next_job` is the whole policy; the class around it only keeps accounts and wakes whoever is next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field


@dataclass
class Account:
    """What one job has used and is waiting for."""

    weight: float
    """Its share relative to others."""
    consumed: float = 0.0
    """Tokens sampled and trained so far."""
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    """Rows asked for, first come first served within the job."""
    running: int = 0
    """Requests that were let in and have not ended."""


def next_job(waiting: Mapping[str, tuple[float, float]]) -> str:
    """The waiting job with the least tokens per weight; ties go by name.

    Args:
        waiting: {job: (consumed, weight)}; at least one.
    """
    return min(waiting, key=lambda job: (waiting[job][0] / waiting[job][1], job))


def weight_of(priority: int) -> float:
    """A job's share: every 10 points of priority double it."""
    return float(2.0 ** (priority / 10))


class FairScheduler:
    """Admits completions to an engine while there is room for them.

    Whoever comes, or comes back after having asked for nothing, starts level with the job that was served last: tokens that
    were not asked for at their time are no credit, or the others would stand still until it is used up (start-time fair
    queueing, Goyal et al. 1996).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self._accounts: dict[str, Account] = {}
        self._level = 0.0
        """The most tokens per weight that a job had consumed when it was let in."""

    def join(self, job: str, weight: float) -> None:
        """Open an account."""
        self._accounts[job] = Account(weight)

    def leave(self, job: str) -> None:
        """Close an account; whoever still waits on it is cancelled."""
        account = self._accounts.pop(job)
        for _, turn in account.waiting:
            turn.cancel()

    def spend(self, job: str, tokens: float) -> None:
        """Charge tokens to a job."""
        if job in self._accounts:
            self._accounts[job].consumed += tokens

    def consumed(self, job: str) -> tuple[float, float]:
        """Tokens consumed and weight."""
        account = self._accounts[job]
        return account.consumed, account.weight

    @contextlib.asynccontextmanager
    async def permit(self, job: str, rows: int) -> AsyncIterator[None]:
        """Wait for this job's turn, then hold `rows` of the engine's capacity."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account = self._accounts[job]
        if not account.waiting and not account.running:
            account.consumed = max(account.consumed, self._level * account.weight)
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

    def _free(self, account: Account, rows: int) -> None:
        account.running -= 1
        self.in_flight -= rows
        self._grant()

    def _grant(self) -> None:
        while True:
            waiting = {
                job: (account.consumed, account.weight) for job, account in self._accounts.items() if account.waiting
            }
            if not waiting:
                return
            account = self._accounts[next_job(waiting)]
            rows, turn = account.waiting[0]
            if self.in_flight and self.in_flight + rows > self.capacity:
                return
            account.waiting.popleft()
            if turn.cancelled():
                continue
            self._level = max(self._level, account.consumed / account.weight)
            account.running += 1
            self.in_flight += rows
            turn.set_result(None)
