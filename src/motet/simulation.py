"""A cluster under a virtual clock: Motet's own placement, slots and fair shares, over hosts that only take time.

A host's completion takes as long as its tokens under the rows in flight when it begins; a step then waits for the host's
trainer. Nothing is computed, so thousands of jobs on hundreds of hosts take minutes.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from motet.cluster.placement import HostLoad, moved, placed
from motet.config.simulation import HostsConfig, JobsConfig, SimulationConfig
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slots import Claim, Rule, admitted, preempted_for_share

Result = TypeVar("Result")
HOUR = 3600.0


class _Instant(selectors.DefaultSelector):
    """Waits for nothing: the time that it is asked to wait has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


def under_virtual_clock(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work whose sleeps take no time; `loop.time()` begins at 0."""
    selector = _Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


@dataclass(eq=False)
class SimulatedJob:
    """A job, and how far it is."""

    claim: Claim
    share: float
    arrives: float
    steps: int
    fails_at: int | None
    groups: int
    rows: int
    """Of a group."""
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
    def tokens_of_step(self) -> int:
        """Trained on."""
        return self.groups * self.rows * (self.prompt + self.completion)


@dataclass(eq=False)
class SimulatedHost:
    """A host: its jobs, its shares, its trainer."""

    number: int
    settings: HostsConfig
    jobs: list[SimulatedJob] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    """Jobs that go elsewhere after their step."""
    preempted: set[str] = field(default_factory=set)
    """Jobs that give their slots to another tenant's after their step."""
    up: bool = True
    busy: float = 0.0
    """Seconds in which it sampled or trained."""

    def __post_init__(self) -> None:
        self.scheduler = FairScheduler(self.settings.rows)
        self._trainer, self._publisher = asyncio.Lock(), asyncio.Lock()
        self._rows = 0
        self._active, self._since = 0, 0.0
        self._trained = 0.0
        self._training_since: float | None = None

    @property
    def load(self) -> HostLoad:
        """As placement sees it."""
        running = tuple(job.claim for job in self.jobs if job.claim.job in self.running)
        waiting = tuple(job.claim for job in self.jobs if job.claim.job not in self.running)
        return HostLoad(self.number, self.settings.slots, running, waiting)

    async def sample(self, job: SimulatedJob) -> None:
        """One group."""
        costs = self.settings.costs
        async with self.scheduler.permit(job.claim.job, job.rows):
            self._rows += job.rows
            self._work(+1)
            try:
                await self._sampled(job.completion * (costs.token_seconds + costs.row_seconds * (self._rows - 1)))
                self.scheduler.spend(job.claim.job, job.rows * (job.prompt + job.completion))
            finally:
                self._rows -= job.rows
                self._work(-1)

    async def train(self, job: SimulatedJob) -> None:
        """One step, when the trainer is free."""
        costs = self.settings.costs
        with self.scheduler.working(job.claim.job):
            async with self._trainer:
                self._work(+1)
                self._training_since = _now()
                try:
                    await asyncio.sleep(job.tokens_of_step / costs.train_tokens_per_second)
                    self.scheduler.spend(job.claim.job, job.tokens_of_step)
                finally:
                    self._trained, self._training_since = self._train_seconds(), None
                    self._work(-1)

    async def publish(self, job: SimulatedJob) -> None:
        """Commit a step and make its version answer; a host does that for one job at a time."""
        stepped = _now()
        async with self._publisher:
            await asyncio.sleep(self.settings.costs.publish_seconds)
        job.published.append(_now() - stepped)

    async def _sampled(self, seconds: float) -> None:
        """Wait for so long, and for what was trained meanwhile where that is on the same device."""
        before = self._train_seconds()
        while seconds > 0:
            await asyncio.sleep(seconds)
            seconds = 0.0 if self.settings.costs.own_sampler else self._train_seconds() - before
            before += seconds

    def _train_seconds(self) -> float:
        return self._trained + (0.0 if self._training_since is None else _now() - self._training_since)

    def _work(self, change: int) -> None:
        """Count the time in which anything goes on."""
        if self._active:
            self.busy += _now() - self._since
        self._active, self._since = self._active + change, _now()


class Simulation:
    """Jobs that come, and hosts that take them."""

    def __init__(self, config: SimulationConfig) -> None:
        self._dice = random.Random(config.seed)
        self._settings = config.hosts
        self.hosts = [SimulatedHost(number, config.hosts) for number in range(config.hosts.count)]
        self.jobs = [job for jobs in config.jobs for job in _drawn(jobs, self._dice)]
        self._loads = {host.number: host.load for host in self.hosts}
        self._open = len(self.jobs)
        self._done = asyncio.Event()
        self.used: Counter[str] = Counter()
        """Tokens by tenant, until one of them has nothing more to do."""
        self._left = Counter(job.claim.tenant for job in self.jobs)
        self._contended = True
        self.curve: list[tuple[float, int, int]] = []
        """Hours, jobs that have a slot, jobs that wait for one."""

    async def run(self) -> float:
        """Seconds until every job has ended."""
        arriving = [asyncio.create_task(self._arrive(job)) for job in self.jobs]
        living = [asyncio.create_task(self._live(host)) for host in self.hosts if self._settings.hours_between_deaths]
        watching = asyncio.create_task(self._watch())
        await self._done.wait()
        others = [*living, watching]
        for task in others:
            task.cancel()
        await asyncio.gather(*arriving, *others, return_exceptions=True)
        return _now()

    async def _arrive(self, job: SimulatedJob) -> None:
        await asyncio.sleep(job.arrives)
        self._place(job)

    def _place(self, job: SimulatedJob) -> None:
        number = placed(job.claim, list(self._loads.values()), {})
        if number is None:  # no host is up: as a service, look again
            asyncio.get_running_loop().call_later(1.0, self._place, job)
            return
        self.hosts[number].jobs.append(job)
        self._fill(self.hosts[number])

    def _fill(self, host: SimulatedHost) -> None:
        """Give free slots away, as `Pipeline` does."""
        load = host.load
        rules = {job.claim.tenant: Rule(share=job.share) for job in host.jobs}
        running = [claim for claim in load.running if claim.job not in host.preempted]
        slots = host.settings.slots - len(host.preempted) if host.up else 0
        names = set(admitted(load.waiting, running, slots, rules))
        for job in [job for job in host.jobs if job.claim.job in names]:
            host.scheduler.share(job.claim.tenant, job.share)
            host.running[job.claim.job] = asyncio.create_task(self._train(host, job))
            running.append(job.claim)
        waiting = [claim for claim in load.waiting if claim.job not in names]
        if not host.preempted and (name := preempted_for_share(waiting, running, slots, rules)) is not None:
            host.preempted.add(name)
        self._look(host)

    def _look(self, host: SimulatedHost) -> None:
        """Placement sees the hosts that are up."""
        if host.up:
            self._loads[host.number] = host.load
        else:
            self._loads.pop(host.number, None)

    async def _train(self, host: SimulatedHost, job: SimulatedJob) -> None:
        """A job on a host: its steps, until it ends, moves or the host dies."""
        name = job.claim.job
        job.starts += 1
        job.first = _now() if job.first is None else job.first
        host.scheduler.join(name, 1.0, job.claim.tenant)
        try:
            while job.done < job.steps and job.done != job.fails_at and name not in host.leaving | host.preempted:
                await asyncio.gather(*(host.sample(job) for _ in range(job.groups)))
                await host.train(job)
                await host.publish(job)
                job.done += 1
                if self._contended:
                    self.used[job.claim.tenant] += job.tokens_of_step
        except asyncio.CancelledError:  # the host died: what was committed stays
            host.scheduler.leave(name)
            return
        host.scheduler.leave(name)
        del host.running[name]
        leaves, waits = name in host.leaving, name in host.preempted
        host.leaving.discard(name)
        host.preempted.discard(name)
        over = job.done in (job.steps, job.fails_at)
        if over or leaves:
            host.jobs.remove(job)
        self._look(host)
        if over:
            self._ended(job)
        elif leaves:
            self._place(job)
        else:
            assert waits
        self._fill(host)
        self._even_out()

    def _ended(self, job: SimulatedJob) -> None:
        job.ended = _now()
        self._left[job.claim.tenant] -= 1
        self._contended = self._contended and self._left[job.claim.tenant] > 0
        self._open -= 1
        if not self._open:
            self._done.set()

    def _even_out(self) -> None:
        """Move a job as `EngineClient` does, when one host has more than another."""
        name = moved(list(self._loads.values()))
        if name is None:
            return
        host, job = next((host, job) for host in self.hosts for job in host.jobs if job.claim.job == name)
        if name in host.running:
            host.leaving.add(name)
        else:
            host.jobs.remove(job)
            self._look(host)
            self._place(job)

    async def _live(self, host: SimulatedHost) -> None:
        """Die now and then, and come back; the jobs go on from their last commits elsewhere."""
        assert self._settings.hours_between_deaths is not None
        while True:
            await asyncio.sleep(self._dice.expovariate(1 / (self._settings.hours_between_deaths * HOUR)))
            host.up, jobs = False, list(host.jobs)
            ending = list(host.running.values())
            host.jobs.clear()
            host.running.clear()
            host.leaving.clear()
            host.preempted.clear()
            self._look(host)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            for job in jobs:
                self._place(job)
            await asyncio.sleep(self._settings.costs.start_seconds)
            host.up = True
            self._fill(host)
            self._even_out()

    async def _watch(self) -> None:
        """A point of the curve now and then, and twice as seldom when there are many."""
        seconds = 10.0
        while True:
            running = sum(len(host.running) for host in self.hosts)
            come = sum(job.arrives <= _now() and job.ended is None for job in self.jobs)
            self.curve.append((_now() / HOUR, running, come - running))
            if len(self.curve) > 400:
                self.curve, seconds = self.curve[::2], 2 * seconds
            await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Outcome:
    """What a simulation showed."""

    hours: float
    utilisation: float
    """The part of their time in which hosts sampled or trained."""
    wait: tuple[float, float]
    """Seconds from coming to the first slot: median and 99 %."""
    steps_per_hour: float
    tokens_per_hour: float
    """Trained on."""
    fairness: float
    """The most tokens per share of a tenant by the least, as long as all of them had jobs; 1 is fair."""
    publish: float
    """Seconds from a step to its version, 99 %."""
    moves: int
    """How often a job went on elsewhere."""
    cost: float
    curve: Sequence[tuple[float, int, int]]
    """Hours, jobs that have a slot, jobs that wait for one."""


def simulate(config: SimulationConfig) -> Outcome:
    """Let the jobs of a configuration run, and look at how it went."""

    async def run() -> tuple[Simulation, float]:
        simulation = Simulation(config)
        return simulation, await simulation.run()

    ended, seconds = under_virtual_clock(run())
    shares = {jobs.tenant: jobs.share for jobs in config.jobs}
    had = [ended.used[tenant] / share for tenant, share in shares.items()]
    waits = [job.first - job.arrives for job in ended.jobs if job.first is not None]
    steps = sum(job.done for job in ended.jobs)
    return Outcome(
        hours=seconds / HOUR,
        utilisation=sum(host.busy for host in ended.hosts) / (seconds * len(ended.hosts)),
        wait=(_part(waits, 0.5), _part(waits, 0.99)),
        steps_per_hour=HOUR * steps / seconds,
        tokens_per_hour=HOUR * sum(job.done * job.tokens_of_step for job in ended.jobs) / seconds,
        fairness=max(had) / min(had) if min(had) else float("inf"),
        publish=_part([taken for job in ended.jobs for taken in job.published], 0.99),
        moves=sum(max(0, job.starts - 1) for job in ended.jobs),
        cost=config.hosts.costs.price_per_hour * len(ended.hosts) * seconds / HOUR,
        curve=ended.curve,
    )


def _drawn(jobs: JobsConfig, dice: random.Random) -> list[SimulatedJob]:
    """The jobs of one entry."""
    drawn = []
    for number in range(jobs.count):
        steps = dice.randint(*jobs.steps)
        drawn.append(
            SimulatedJob(
                claim=Claim(f"{jobs.tenant}/{number}", jobs.tenant),
                share=jobs.share,
                arrives=dice.uniform(0, jobs.over_hours * HOUR),
                steps=steps,
                fails_at=dice.randrange(steps) if dice.random() < jobs.failing else None,
                groups=jobs.groups_per_step,
                rows=jobs.group_size,
                prompt=dice.randint(*jobs.prompt_tokens),
                completion=dice.randint(*jobs.completion_tokens),
            )
        )
    return drawn


def _part(figures: Sequence[float], part: float) -> float:
    """The figure that so large a part is not above; 0 where there is none."""
    return sorted(figures)[min(len(figures) - 1, int(part * len(figures)))] if figures else 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()
