"""The simulated cluster: arrival of jobs, placement, moves, deaths of hosts, and the figures that are recorded."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from motet.cluster.placement import moved, placed
from motet.cluster.shares import EVEN_SECONDS, ClusterShares
from motet.cluster.simulation.clock import now
from motet.cluster.simulation.host import SimulatedHost, SimulatedJob
from motet.config.simulation import JobsConfig, SimulationConfig
from motet.runtime.slot_turns import LOOK_SECONDS
from motet.runtime.slots import Claim, Rule, admitted, preempted_for_share

HOUR = 3600.0


class Simulation:
    """A simulated cluster and its jobs."""

    def __init__(self, config: SimulationConfig) -> None:
        self._dice = random.Random(config.seed)
        self._settings = config.hosts
        self.hosts = [SimulatedHost(number, config.hosts) for number in range(config.hosts.count)]
        self.jobs = [job for jobs in config.jobs for job in _drawn(jobs, self._dice)]
        self._loads = {host.number: host.load for host in self.hosts}
        self._changed: set[SimulatedHost] = set()
        """Hosts that are about to look at their slots."""
        self._open = self._to_come = len(self.jobs)
        self._done = asyncio.Event()
        self.used: Counter[str] = Counter()
        """Tokens trained by tenant."""
        self.contended = Contended()
        self.arriving: list[tuple[float, float]] = []
        """The clock, and the seconds in which hosts had been busy, when the first job and the last one came."""
        self.curve: list[tuple[float, int, int]] = []
        """Hours, jobs that have a slot, jobs that wait for one."""
        self._rules = {jobs.tenant: Rule(share=jobs.share) for jobs in config.jobs}

    async def run(self) -> float:
        """Seconds until every job has ended."""
        async with asyncio.TaskGroup() as self._tasks:
            for job in self.jobs:
                self._tasks.create_task(self._arrive(job))
            endless = [*map(self._live, self.hosts), self._watch(), self._share()]
            others = [self._tasks.create_task(one) for one in endless]
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

    async def _share(self) -> None:
        """Let tenants have their shares over all hosts, as `Hosts` does."""
        account, shares = ClusterShares(), {tenant: rule.share for tenant, rule in self._rules.items()}
        while len(self.hosts) > 1 and len(shares) > 1:
            await asyncio.sleep(EVEN_SECONDS)
            used = {host.number: host.scheduler.used for host in self.hosts}
            factors = account.update(used, self._come().keys(), shares)
            for host in self.hosts:
                host.scheduler.even_out(factors)

    def _come(self) -> Counter[str]:
        """Jobs that have come and not ended, by tenant."""
        return Counter(job.claim.tenant for job in self.jobs if job.arrives <= now() and job.ended is None)

    async def _watch(self) -> None:
        """Record points of the curve; halve their rate when there are many."""
        seconds, enough, before = 10.0, False, (0.0, 0.0, Counter[str]())
        while True:
            running = sum(len(host.running) for host in self.hosts)
            come = self._come()
            self.curve.append((now() / HOUR, running, come.total() - running))
            if len(self.curve) > 400:
                self.curve, seconds = self.curve[::2], 2 * seconds
            after = now(), self._busy, self.used.copy()
            if enough:
                self.contended.add(before, after)
            enough, before = self._enough(come), after
            await asyncio.sleep(seconds)

    def _enough(self, jobs: Counter[str]) -> bool:
        """Whether every tenant has enough jobs for its share of the slots."""
        per_share = self._settings.count * self._settings.slots / sum(rule.share for rule in self._rules.values())
        return all(jobs[tenant] >= per_share * rule.share for tenant, rule in self._rules.items())


@dataclass
class Contended:
    """Sums over the time in which every tenant had enough jobs for its share of the slots."""

    seconds: float = 0.0
    busy: float = 0.0
    """Seconds in which hosts sampled or trained, summed over hosts."""
    used: Counter[str] = field(default_factory=Counter)
    """Tokens trained by tenant."""

    def add(self, before: tuple[float, float, Counter[str]], after: tuple[float, float, Counter[str]]) -> None:
        """Add the interval between two observations (clock, busy seconds, tokens by tenant)."""
        self.seconds += after[0] - before[0]
        self.busy += after[1] - before[1]
        self.used += after[2] - before[2]


def _drawn(jobs: JobsConfig, dice: random.Random) -> list[SimulatedJob]:
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
