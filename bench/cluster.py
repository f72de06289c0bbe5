"""How long jobs take on a cluster, under a virtual clock: `python -m bench.cluster`; edit `EXAMPLE` for your own.

Motet's own placement, moves, slots and fair shares decide; hosts compute nothing and only take time. The rate of a completion
depends on how many rows its host samples at that moment, and a step then waits for the host's trainer. `--write` fills the
table of large clusters in docs/capacity.md, in ten minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import random
import selectors
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.speed.table import markdown

from motet.hosts.placement import HostLoad, moved, placed
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slot_turns import LOOK_SECONDS, SlotTurns
from motet.runtime.slots import Claim, Rule, admitted, preempted_for_share

Result = TypeVar("Result")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "capacity.md"
BEGIN, END = "<!-- clusters -->\n", "<!-- end of clusters -->"
HOUR = 3600.0
_NEARLY = 1e-6
"""Rounding tolerance in tokens."""
_WATCH_SECONDS = 10.0
"""Interval at which tenants' tokens are compared."""


@dataclass(frozen=True)
class Costs:
    """What one host takes, in seconds; `timings.jsonl` of a run has them."""

    token_seconds: float
    """Between two tokens of a completion that samples alone."""
    train_tokens_per_second: float
    """Training speed, prompts included."""
    row_seconds: float = 0.0
    """That each further completion adds."""
    job_seconds: float = 0.0
    """That each further sampling job adds: another adapter in the batch, and other work."""
    train_seconds: float = 0.0
    """Of training in each step, whatever its tokens."""
    publish_seconds: float = 0.0
    """From a step until its version answers."""
    open_seconds: float = 0.0
    """From getting a slot to the first completions, also after a resume."""
    start_seconds: float = 60.0
    """Until a host that died is back."""
    own_sampler: bool = False
    """Whether sampling has its own devices (servers). Otherwise it stops while the host trains."""
    price_per_hour: float = 0.0
    """Of one host, in any currency."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a cluster, all alike."""

    count: int
    costs: Costs
    slots: int = 16
    """Jobs that train at a time on each host."""
    rows: int = 64
    """Completions that each host samples at a time."""
    hours_between_deaths: float | None = None
    """Mean hours between deaths of a host. By default none dies."""


@dataclass(frozen=True)
class Jobs:
    """Jobs of one tenant. Of two numbers, each job draws a value between them."""

    count: int
    tenant: str = ""
    """Each entry has its own."""
    share: float = 1.0
    """Weight of the tenant."""
    over_hours: float = 0.0
    """They arrive evenly within this time; 0 means all at once."""
    steps: tuple[int, int] = (20, 20)
    groups_per_step: int = 8
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (128, 128)
    completion_tokens: tuple[int, int] = (256, 256)
    evaluation: int = 0
    """Completions of an evaluation, with the first step and after the last."""
    failing: float = 0.0
    """Fraction of jobs that fail before their last step."""


@dataclass(frozen=True)
class Outcome:
    """What a simulation says."""

    hours: float
    utilisation: float
    """Fraction of their time in which hosts sampled or trained."""
    arriving: float
    """`utilisation` between the arrivals of the first and the last job; NaN if all arrived at once."""
    contended: float
    """`utilisation` while every tenant had enough jobs for its share of the slots; NaN if that never happened."""
    wait: tuple[float, float]
    """Seconds from arrival to the first slot: median and 99th percentile."""
    steps_per_hour: float
    tokens_per_hour: float
    """Trained on."""
    fairness: float
    """Largest tokens per share of a tenant divided by the smallest, over the same time as `contended`; 1 is fair."""
    publish: float
    """Seconds from a step to its version, 99th percentile."""
    moves: int
    """Times that a job went on elsewhere."""
    cost: float


EXAMPLE = (
    Hosts(
        count=4,
        slots=16,
        rows=256,
        costs=Costs(0.012, 14_000, row_seconds=0.00008, publish_seconds=0.4, price_per_hour=2.5),
        hours_between_deaths=200,
    ),
    [
        Jobs(40, "research", over_hours=1, steps=(10, 30), completion_tokens=(100, 600)),
        Jobs(80, "product", share=2, over_hours=1, steps=(10, 30), completion_tokens=(100, 600), failing=0.02),
    ],
)
"""Hosts and jobs that are simulated without `--write`."""
H100 = {
    "8B": Costs(0.012, 14_000, row_seconds=0.00008, publish_seconds=0.4, open_seconds=2.0),
    "30B-A3B": Costs(0.009, 24_000, row_seconds=0.00012, publish_seconds=0.4, open_seconds=2.0),
}
"""Costs of an H100 by arithmetic, not measured."""
LARGE = (
    ("8B", 2_000, 200, 0.0),
    ("8B", 10_000, 1_000, 0.0),
    ("8B", 10_000, 1_000, 0.075),
    ("30B-A3B", 10_000, 1_000, 0.075),
    ("30B-A3B", 30_000, 1_000, 0.3),
)
"""Base, jobs, hosts, and hours within which the jobs arrive."""


def simulate(hosts: Hosts, jobs: Sequence[Jobs], seed: int = 0) -> Outcome:
    """Simulate jobs on hosts.

    Raises:
        ValueError: no job does a step.
    """

    async def run() -> tuple[Simulation, float]:
        simulation = Simulation(hosts, jobs, seed)
        return simulation, await simulation.run()

    ended, seconds = under_virtual_clock(run())
    (first, last), count = (ended.arriving[0], ended.arriving[-1]), hosts.count
    arriving = (last[0] - first[0]) * count
    had = [ended.contended_used[job.tenant] / job.share for job in {job.tenant: job for job in jobs}.values()]
    waits = [job.first - job.arrives for job in ended.jobs if job.first is not None]
    steps = sum(job.done for job in ended.jobs)
    if not steps:
        raise ValueError("every job fails before it has done a step: set `failing` lower, or more steps or jobs")
    contended = ended.contended_seconds
    return Outcome(
        hours=seconds / HOUR,
        utilisation=sum(host.busy for host in ended.hosts) / (seconds * count),
        arriving=(last[1] - first[1]) / arriving if arriving else math.nan,
        contended=ended.contended_busy / (contended * count) if contended else math.nan,
        wait=(_part(waits, 0.5), _part(waits, 0.99)),
        steps_per_hour=HOUR * steps / seconds,
        tokens_per_hour=HOUR * sum(job.done * job.tokens_of_step for job in ended.jobs) / seconds,
        fairness=math.nan if not contended else max(had) / min(had) if min(had) else math.inf,
        publish=_part([taken for job in ended.jobs for taken in job.published], 0.99),
        moves=sum(max(0, job.starts - 1) for job in ended.jobs),
        cost=hosts.costs.price_per_hour * count * seconds / HOUR,
    )


def _part(figures: Sequence[float], part: float) -> float:
    """The quantile of some figures; 0 if there are none."""
    return sorted(figures)[min(len(figures) - 1, int(part * len(figures)))] if figures else 0.0


# --- an event loop whose sleeps take no time --------------------------------------------------------------------------------


class _Instant(selectors.DefaultSelector):
    """A selector that returns at once and moves the virtual clock by the time that it should have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.now += timeout
            return []
        return [] if timeout == 0 else super().select(timeout)


def under_virtual_clock(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work whose sleeps take no time; `loop.time()` begins at 0. It ends with the first error of a callback, too."""
    selector, failures = _Instant(), list[BaseException]()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]

    async def watched() -> Result:
        working = asyncio.ensure_future(work)

        def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            failures.append(context.get("exception") or RuntimeError(context["message"]))
            working.cancel()

        loop.set_exception_handler(fail)
        await asyncio.wait([working])
        if failures:
            raise failures[0]
        return working.result()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(watched())


def now() -> float:
    """Virtual seconds since the loop was made."""
    return asyncio.get_running_loop().time()


# --- hosts and jobs ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SimulatedJob:
    """A job and its progress."""

    of: Jobs
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
        return self.of.evaluation > 0 and self.done in (0, self.steps)

    @property
    def tokens_of_step(self) -> int:
        """Tokens that a step trains on."""
        return self.of.groups_per_step * self.of.group_size * (self.prompt + self.completion)


class SimulatedDevice:
    """Samples all completions at one rate, by the rows there are at each moment, and trains one step at a time.

    Sampling stands still while it trains, unless it has devices of its own. All that sample share one timer.
    """

    def __init__(self, costs: Costs) -> None:
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
    settings: Hosts
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


class Simulation:
    """A simulated cluster and its jobs."""

    def __init__(self, hosts: Hosts, jobs: Sequence[Jobs], seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._settings = hosts
        self.hosts = [SimulatedHost(number, hosts) for number in range(hosts.count)]
        self.jobs = [job for template in jobs for job in _drawn(template, self._dice)]
        self._loads = {host.number: host.load for host in self.hosts}
        self._changed: set[SimulatedHost] = set()
        """Hosts that are about to look at their slots."""
        self._open = self._to_come = len(self.jobs)
        self._done = asyncio.Event()
        self.used: Counter[str] = Counter()
        """Tokens trained by tenant."""
        self.contended_seconds = self.contended_busy = 0.0
        """The time in which every tenant had enough jobs for its share of the slots, and that in which hosts were busy then."""
        self.contended_used: Counter[str] = Counter()
        """Tokens trained meanwhile, by tenant."""
        self.arriving: list[tuple[float, float]] = []
        """The clock, and the seconds in which hosts had been busy, when the first job and the last one came."""
        self._rules = {job.tenant: Rule(share=job.share) for job in jobs}

    async def run(self) -> float:
        """Seconds until every job has ended."""
        async with asyncio.TaskGroup() as self._tasks:
            for job in self.jobs:
                self._tasks.create_task(self._arrive(job))
            endless = [*map(self._live, self.hosts), self._watch()]
            others = [self._tasks.create_task(task) for task in endless]
            await self._done.wait()
            for task in others:
                task.cancel()
        return now()

    async def _arrive(self, job: SimulatedJob) -> None:
        await asyncio.sleep(job.arrives)
        self._to_come -= 1
        if not self.arriving or not self._to_come:
            self.arriving.append((now(), self._busy))
        self._place(job)

    @property
    def _busy(self) -> float:
        """Seconds in which hosts sampled or trained so far, summed over hosts."""
        return sum(host.busy_seconds for host in self.hosts)

    def _place(self, job: SimulatedJob) -> None:
        number = placed(job.claim, list(self._loads.values()), {})
        if number is None:  # no host is up: as a service, look again
            asyncio.get_running_loop().call_later(1.0, self._place, job)
            return
        host = self.hosts[number]
        host.jobs[job.claim.job] = job
        self._look(host)
        if host not in self._changed:  # after all that come at this moment
            self._changed.add(host)
            asyncio.get_running_loop().call_soon(self._fill, host)

    def _fill(self, host: SimulatedHost) -> None:
        """Assign free slots to waiting jobs, as `Pipeline` does."""
        self._changed.discard(host)
        rules = self._rules
        running = [host.jobs[name].claim for name in host.running if name not in host.preempted]
        waiting = [job.claim for name, job in host.jobs.items() if name not in host.running]
        slots = host.settings.slots - len(host.preempted) if host.up else 0
        host.turns.update(host.holding, waiting, host.settings.slots, rules)
        for name in admitted(waiting, running, slots, rules, host.turns.had):
            job = host.jobs[name]
            host.scheduler.share(job.claim.tenant, job.of.share)
            host.running[name] = self._tasks.create_task(self._train(host, job))
            running.append(job.claim)
        host.turns.hold(host.holding)
        waiting = [claim for claim in waiting if claim.job not in host.running]
        if not host.preempted:
            preempted = preempted_for_share(waiting, running, slots, rules, host.turns.had)
            if preempted is not None and preempted not in host.leaving:
                host.preempted.add(preempted)
        self._look(host)

    def _look(self, host: SimulatedHost) -> None:
        """The hosts that are up, as placement sees them."""
        if host.up:
            self._loads[host.number] = host.load
        else:
            self._loads.pop(host.number, None)

    async def _train(self, host: SimulatedHost, job: SimulatedJob) -> None:
        """Run the steps of a job on a host until it ends, moves, or the host dies."""
        name = job.claim.job
        job.starts += 1
        job.first = now() if job.first is None else job.first
        host.scheduler.join(name, 1.0, job.claim.tenant)
        try:
            await host.open()
            while job.done not in (job.steps, job.fails_at) and name not in {*host.leaving, *host.preempted}:
                await host.sample(job)
                await host.train(job)
                await host.publish(job)
                job.done += 1
                self.used[job.claim.tenant] += job.tokens_of_step
            if job.done == job.steps:  # its last version is evaluated
                await host.sample(job)
        except asyncio.CancelledError:  # the host died: what was committed stays
            host.scheduler.leave(name)
            return
        host.scheduler.leave(name)
        del host.running[name]
        to = self._stays(host, name)
        host.preempted.discard(name)
        over = job.done in (job.steps, job.fails_at)
        if over or to is not None:
            del host.jobs[name]
        if over:
            job.ended = now()
            self._open -= 1
            if not self._open:
                self._done.set()
        elif to is not None:
            self._place(job)
        self._fill(host)
        self._even_out()

    @staticmethod
    def _stays(host: SimulatedHost, name: str) -> SimulatedHost | None:
        """The host to which the job should move after this step; the request is cleared."""
        to = host.leaving.pop(name, None)
        if to is not None:
            to.coming.pop(name, None)
        return to

    def _even_out(self) -> None:
        """Move jobs as `Hosts` does, while one host has more than another."""
        while (move := moved(list(self._loads.values()))) is not None:
            source, to = self.hosts[move.source], self.hosts[move.to]
            job = source.jobs[move.job]
            if move.job in source.running:
                source.leaving[move.job] = to
                to.coming[move.job] = job.claim
                self._look(source)
                self._look(to)
            else:
                del source.jobs[move.job]
                self._look(source)
                self._place(job)

    async def _live(self, host: SimulatedHost) -> None:
        """Check at intervals whether slots rotate; fail at the configured time and come back."""
        hours, dies = self._settings.hours_between_deaths, float("inf")
        while True:
            if hours is not None:
                dies = now() + self._dice.expovariate(1 / (hours * HOUR))
            while now() < dies:
                await asyncio.sleep(min(LOOK_SECONDS, dies - now()))
                if host.turns.due:
                    self._fill(host)
            await self._die(host)
            await asyncio.sleep(self._settings.costs.start_seconds)
            host.up = True
            self._fill(host)
            self._even_out()

    async def _die(self, host: SimulatedHost) -> None:
        """Requeue the jobs of a failed host from their last commits."""
        host.up, jobs = False, list(host.jobs.values())
        ending = list(host.running.values())
        for name in list(host.leaving):
            self._stays(host, name)
        host.coming.clear()
        host.jobs.clear()
        host.running.clear()
        host.preempted.clear()
        self._look(host)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for job in jobs:
            self._place(job)

    def _come(self) -> Counter[str]:
        """Jobs that have come and not ended, by tenant."""
        return Counter(job.claim.tenant for job in self.jobs if job.arrives <= now() and job.ended is None)

    async def _watch(self) -> None:
        """Sum what happens while every tenant has enough jobs."""
        enough, before = False, (0.0, 0.0, Counter[str]())
        while True:
            after = now(), self._busy, self.used.copy()
            if enough:
                self.contended_seconds += after[0] - before[0]
                self.contended_busy += after[1] - before[1]
                self.contended_used += after[2] - before[2]
            enough, before = self._enough(self._come()), after
            await asyncio.sleep(_WATCH_SECONDS)

    def _enough(self, jobs: Counter[str]) -> bool:
        """Whether every tenant has enough jobs for its share of the slots."""
        per_share = self._settings.count * self._settings.slots / sum(rule.share for rule in self._rules.values())
        return all(jobs[tenant] >= per_share * rule.share for tenant, rule in self._rules.items())


def _drawn(jobs: Jobs, dice: random.Random) -> list[SimulatedJob]:
    """The jobs of one entry."""
    drawn = []
    for number in range(jobs.count):
        steps = dice.randint(*jobs.steps)
        drawn.append(
            SimulatedJob(
                of=jobs,
                claim=Claim(f"{jobs.tenant}/{number}", jobs.tenant),
                arrives=dice.uniform(0, jobs.over_hours * HOUR),
                steps=steps,
                fails_at=dice.randrange(steps) if dice.random() < jobs.failing else None,
                prompt=dice.randint(*jobs.prompt_tokens),
                completion=dice.randint(*jobs.completion_tokens),
            )
        )
    return drawn


# --- the page ---------------------------------------------------------------------------------------------------------------


def large(base: str, jobs: int, hosts: int, over_hours: float) -> Outcome:
    """Jobs of ten tenants on hosts with four slots."""
    tenant = Jobs(
        jobs // 10,
        over_hours=over_hours,
        steps=(8, 24),
        groups_per_step=2,
        group_size=16,
        completion_tokens=(100, 600),
    )
    tenants = [replace(tenant, tenant=f"{number}") for number in range(10)]
    return simulate(Hosts(hosts, H100[base], slots=4, rows=256), tenants)


def written() -> str:
    """The table of large clusters."""
    head = (
        "base", "jobs", "hosts", "they arrive in", "utilisation overall", "while jobs arrive",
        "while every tenant has enough jobs", "most / fewest tokens of a tenant", "publish, 99 %",
    )  # fmt: skip
    rows = []
    for base, jobs, hosts, over_hours in LARGE:
        found = large(base, jobs, hosts, over_hours)
        parts = [_known(f"{100 * part:.0f} %", part) for part in (found.utilisation, found.arriving, found.contended)]
        row = [base, f"{jobs:,}", f"{hosts:,}", f"{over_hours * 60:.1f} minutes" if over_hours else "no time"]
        rows.append((*row, *parts, _known(f"{found.fairness:.2f}", found.fairness), f"{found.publish:.2f} s"))
        print(rows[-1], flush=True)
    return markdown(head, rows)


def shown(hosts: Hosts, jobs: Sequence[Jobs]) -> str:
    """The table of one cluster."""
    found = simulate(hosts, jobs)
    return markdown(
        (f"{hosts.count} hosts, {sum(job.count for job in jobs)} jobs", ""),
        [
            ("until the last job has ended", f"{found.hours:,.2f} h"),
            ("utilisation of hosts", f"{found.utilisation:.1%}"),
            ("the same from the first job to the last that came", _known(f"{found.arriving:.1%}", found.arriving)),
            ("the same while every tenant had jobs enough", _known(f"{found.contended:.1%}", found.contended)),
            ("wait for a first slot, median and 99 %", f"{found.wait[0]:,.0f} s, {found.wait[1]:,.0f} s"),
            ("steps an hour", f"{found.steps_per_hour:,.0f}"),
            ("tokens trained an hour", f"{found.tokens_per_hour:,.0f}"),
            ("most by least tokens per share meanwhile", _known(f"{found.fairness:.2f}", found.fairness)),
            ("from a step to its version, 99 %", f"{found.publish:.2f} s"),
            ("times that a job went on elsewhere", f"{found.moves:,}"),
            ("cost", f"{found.cost:,.2f}"),
        ],
    )


def _known(text: str, figure: float) -> str:
    """A figure for a time that there may not have been."""
    return "–" if math.isnan(figure) else text


def main() -> None:
    """Print the example, or write the table of large clusters into the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster")
    parser.add_argument("--hosts", type=int, help="another number of hosts")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.name}")
    given, (hosts, jobs) = parser.parse_args(), EXAMPLE
    if not given.write:
        print(shown(replace(hosts, count=given.hosts or hosts.count), jobs))
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{written()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
