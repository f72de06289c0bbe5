"""Simulated hosts and their jobs."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from motet.cluster.placement import HostLoad
from motet.cluster.simulation.clock import now
from motet.config.simulation import HostCosts, HostsConfig, JobsConfig
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slot_turns import SlotTurns
from motet.runtime.slots import Claim

_NEARLY = 1e-6
"""Rounding tolerance in tokens."""


@dataclass(eq=False)
class SimulatedJob:
    """A job and its progress."""

    of: JobsConfig
    """The entry that it was drawn from."""
    claim: Claim
    arrives: float
    steps: int
    fails_at: int | None
    prompt: int
    completion: int
    done: int = 0
    first: float | None = None
    """When it got its first slot."""
    ended: float | None = None
    starts: int = 0
    published: list[float] = field(default_factory=list)
    """Seconds from each step to its version."""

    @property
    def evaluates(self) -> bool:
        """Whether the version that it has now is evaluated."""
        every = self.of.evaluate_every
        return self.of.evaluation > 0 and (self.done in (0, self.steps) or (every > 0 and self.done % every == 0))

    @property
    def tokens_of_step(self) -> int:
        """Tokens that a step trains on."""
        return self.of.groups_per_step * self.of.group_size * (self.prompt + self.completion)


class SimulatedDevice:
    """Samples all completions at one rate, by the rows there are at each moment, and trains one step at a time.

    Sampling stands still while it trains, unless it has devices of its own. All that sample share one timer.
    """

    def __init__(self, costs: HostCosts) -> None:
        self._costs = costs
        self._rows, self._training = Counter[str](), False
        """Completions of each job."""
        self._tokens, self._at = 0.0, now()
        """Tokens of a completion that has been there from the beginning, and when it had them."""
        self._sampling: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def sample(self, job: str, tokens: int, rows: int) -> None:
        """Sample `tokens` tokens of each of `rows` completions."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._go_on(job, rows)
        heapq.heappush(self._sampling, (self._tokens + tokens, next(self._order), done))
        self._set_timer()
        try:
            await done
        finally:
            self._go_on(job, -rows)
            self._set_timer()

    async def train(self, tokens: int) -> None:
        """Train on so many tokens."""
        self._go_on()
        self._training = True
        self._set_timer()
        try:
            await asyncio.sleep(self._costs.train_seconds + tokens / self._costs.train_tokens_per_second)
        finally:
            self._go_on()
            self._training = False
            self._set_timer()

    @property
    def _token_seconds(self) -> float:
        """Between two tokens; infinite while it trains."""
        if self._training and not self._costs.own_sampler:
            return math.inf
        costs, others = self._costs, max(0, len(self._rows) - 1)
        return costs.token_seconds + costs.row_seconds * max(0, self._rows.total() - 1) + costs.job_seconds * others

    def _go_on(self, job: str = "", rows: int = 0) -> None:
        """Account for the tokens sampled until now, then change the number of rows."""
        self._tokens += (now() - self._at) / self._token_seconds
        self._at = now()
        if rows:
            self._rows[job] += rows
            if not self._rows[job]:
                del self._rows[job]

    def _set_timer(self) -> None:
        while self._sampling and self._sampling[0][2].done():  # whoever waited was cancelled
            heapq.heappop(self._sampling)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = self._token_seconds
        if self._sampling and seconds < math.inf:
            until = now() + max(0.0, self._sampling[0][0] - self._tokens) * seconds
            self._timer = asyncio.get_running_loop().call_at(until, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._go_on()
        while self._sampling and self._sampling[0][0] <= self._tokens + _NEARLY:
            done = heapq.heappop(self._sampling)[2]
            if not done.done():
                done.set_result(None)
        self._set_timer()


@dataclass(eq=False)
class SimulatedHost:
    """A host with its jobs, fair shares and trainer."""

    number: int
    settings: HostsConfig
    jobs: dict[str, SimulatedJob] = field(default_factory=dict)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    leaving: dict[str, SimulatedHost] = field(default_factory=dict)
    """Target host of each job that moves after its step."""
    coming: dict[str, Claim] = field(default_factory=dict)
    """Jobs on their way from another host."""
    preempted: set[str] = field(default_factory=set)
    """Jobs that release their slots to other tenants after their step."""
    up: bool = True
    busy: float = 0.0
    """Seconds in which it sampled or trained."""

    def __post_init__(self) -> None:
        self.scheduler = FairScheduler(self.settings.rows)
        self.turns = SlotTurns(f"{self.number}", now)
        self._device = SimulatedDevice(self.settings.costs)
        self._trainer, self._publisher, self._opener = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._active, self._since = 0, 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which it sampled or trained so far."""
        return self.busy + (now() - self._since if self._active else 0.0)

    @property
    def holding(self) -> list[Claim]:
        """Of the jobs that have a slot."""
        return [self.jobs[name].claim for name in self.running]

    @property
    def load(self) -> HostLoad:
        """The host as placement sees it."""
        stay = [job.claim for name, job in self.jobs.items() if name not in self.leaving]
        running = tuple(claim for claim in stay if claim.job in self.running)
        waiting = tuple(claim for claim in stay if claim.job not in self.running)
        return HostLoad(self.number, self.settings.slots, running, waiting, tuple(self.coming.values()))

    async def open(self) -> None:
        """Prepare a job for sampling; a host prepares one job at a time."""
        async with self._opener:
            await asyncio.sleep(self.settings.costs.open_seconds)

    async def sample(self, job: SimulatedJob) -> None:
        """What the next step trains on, and the evaluation of the version that it begins from."""
        groups = [job.of.group_size] * job.of.groups_per_step if job.done < job.steps else []
        held_out = [1] * job.of.evaluation if job.evaluates else []
        async with asyncio.TaskGroup() as tasks:
            for rows in (*held_out, *groups):
                tasks.create_task(self._complete(job, rows))

    async def _complete(self, job: SimulatedJob, rows: int) -> None:
        """Completions of one problem."""
        async with self.scheduler.permit(job.claim.job, rows):
            self._work(+1)
            try:
                await self._device.sample(job.claim.job, job.completion, rows)
                self.scheduler.spend(job.claim.job, rows * (job.prompt + job.completion))
            finally:
                self._work(-1)

    async def train(self, job: SimulatedJob) -> None:
        """Train one step once the trainer is free."""
        with self.scheduler.working(job.claim.job):
            async with self._trainer:
                self._work(+1)
                try:
                    await self._device.train(job.tokens_of_step)
                    self.scheduler.spend(job.claim.job, job.tokens_of_step)
                finally:
                    self._work(-1)

    async def publish(self, job: SimulatedJob) -> None:
        """Commit and publish a step; a host does this for one job at a time."""
        stepped = now()
        async with self._publisher:
            await asyncio.sleep(self.settings.costs.publish_seconds)
        job.published.append(now() - stepped)

    def _work(self, change: int) -> None:
        """Count the time in which the host samples or trains."""
        if self._active:
            self.busy += now() - self._since
        self._active, self._since = self._active + change, now()
