"""The assignment of jobs to hosts: calls `placement` for the available hosts, and records the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from motet.core.types import JobState, Wanted
from motet.hosts import messages as m
from motet.hosts.host_link import HostLink
from motet.hosts.placement import HostLoad, moved, placed, speeds
from motet.process.heartbeat import NO_MEMORY, SILENT
from motet.runtime.slots import FREE, Claim, Rule, taken

_MOST_LOSSES, _MOST_STILL = 3, 2
"""How often a device may be lost in a row while a job runs, or an engine be ended in its turn, before the job fails."""
_OPEN = (JobState.QUEUED, JobState.RUNNING)


@dataclass
class Assigned:
    """A job on a host."""

    claim: Claim
    host: HostLink
    state: JobState = JobState.QUEUED
    to: HostLink | None = None
    """The host for which this one was asked to release it."""
    had_slot: bool = False
    """Whether it has run on this host."""


class Assignments:
    """The jobs that hosts have, and the rules of their tenants."""

    def __init__(self, hosts: Sequence[HostLink]) -> None:
        self._hosts = hosts
        self.ahead: int | None = None
        """Most jobs of a tenant that wait on a host (`placed`); the others wait in the database."""
        self._jobs: dict[str, Assigned] = {}
        self.rules: dict[str, Rule] = {}
        self.held: dict[str, m.Held] = {}
        """Jobs that hosts already had under an earlier service, and that have received no message since."""
        self._losses: dict[str, tuple[int, int]] = {}
        """The step at which a running job last lost its device, and how often in a row it was this one."""
        self._still = Counter[str]()
        """How often an engine was ended in a turn of a job."""
        self.refused: set[tuple[Claim, bool]] = set()
        """Claims of jobs that no host could take, without their names, and whether the jobs were running."""

    @property
    def _limits(self) -> Mapping[str, Rule]:
        """A single host gets all jobs, and enforces the limits itself."""
        return self.rules if len(self._hosts) > 1 else {}

    def get(self, job: str) -> Assigned | None:
        """The assignment of a job."""
        return self._jobs.get(job)

    def on(self, host: HostLink) -> int:
        """The number of jobs on a host."""
        return sum(job.host is host for job in list(self._jobs.values()))

    def all(self) -> list[str]:
        """The jobs on hosts."""
        return list(self._jobs)

    @property
    def most(self) -> int | None:
        """An upper limit on one tenant's jobs that hosts take; None if nothing limits them, or no host is ready."""
        bounded = self.ahead is not None and any(host.ready for host in self._hosts)
        return sum(host.slots + (self.ahead or 0) for host in self._hosts) + 1 if bounded else None

    def room(self, tenant: str, base: str) -> int | None:
        """How many more of a tenant's jobs the hosts of a base take now; None as for `most`."""
        if self.most is None or self.ahead is None:
            return None
        same = [host for host in self.loads().values() if host.base == base]
        waiting = sum(claim.tenant == tenant for host in same for claim in host.fresh)
        free = sum(max(0, host.slots - taken(host.jobs)) for host in same)
        return max(0, free + self.ahead * len(same) - waiting)

    def place(self, message: m.AddJob, loads: dict[int, HostLoad]) -> HostLink | None:
        """Choose the host of a job and count it in the loads; None if none can take it, or if one has it already."""
        name = str(message.job["name"])
        self.rules[message.tenant] = message.rule
        if name in self._jobs:
            return None
        claim = Claim(name, message.tenant, int(message.job.get("priority", 0)), message.slots, message.base)
        runs = message.wanted is Wanted.RUN
        number = placed(claim, list(loads.values()), self._limits if runs else {}, self.ahead)
        if number is None:
            self.refused.add((replace(claim, job=""), runs))
            return None
        host = self._hosts[number]
        if runs:
            load = loads[number]
            loads[number] = replace(load, waiting=(*load.waiting, claim), fresh=(*load.fresh, claim))
        self._jobs[name] = Assigned(claim, host, JobState.QUEUED if runs else JobState.PAUSED)
        return host

    def adopt(self, host: HostLink, jobs: Sequence[m.Held]) -> None:
        """Add a ready host with the jobs from an earlier service, and send it the tenants' rules."""
        for held in jobs:
            claim = Claim(held.job, held.tenant, slots=held.slots, base=host.base)
            self._jobs.setdefault(held.job, Assigned(claim, host, held.state, had_slot=True))
            self.held[held.job] = held
        host.send(*(m.SetRule(tenant, rule) for tenant, rule in self.rules.items()))

    def can_place_more(self) -> bool:
        """Whether a host could now take a waiting job."""
        hosts = list(self.loads().values()) if self.refused else []
        return any(
            placed(claim, hosts, self._limits if runs else {}, self.ahead) is not None for claim, runs in self.refused
        )

    def forget(self, job: str) -> None:
        """Remove a job that no host has any more."""
        self._jobs.pop(job, None)

    def forget_all_on(self, host: HostLink) -> None:
        """Remove all jobs of a host."""
        for name in [name for name, job in self._jobs.items() if job.host is host]:
            del self._jobs[name]

    def lost_device(self, host: HostLink, reason: str) -> list[m.JobChanged]:
        """Record that a host has lost its device; returns the ends of jobs that ran there and may be the cause."""
        failed = []
        for name in [name for name, job in self._jobs.items() if job.host is host and job.state is JobState.RUNNING]:
            (before, times), standing = self._losses.get(name, (0, 0)), host.progress.get(name)
            step = standing.step if standing else before
            self._losses[name] = step, times + 1 if step == before else 1
            if self._losses[name][1] >= _MOST_LOSSES:
                del self._losses[name]
                why = f"the device was lost {_MOST_LOSSES} times in a row while the job ran and made no step ({reason})"
                why += "; resume it if another job was the cause"
                failed.append(m.JobChanged(name, JobState.FAILED, why))
        return failed

    def ended_engine(self, job: str, reason: str) -> list[m.JobChanged]:
        """Record that an engine was ended in a turn of this job; returns the job's end at the second time."""
        if job not in self._jobs:
            return []
        self._still[job] += 1
        if self._still[job] < _MOST_STILL:
            return []
        del self._still[job]
        still = f"the engine did not turn its event loop for {SILENT} s"
        why = f"{NO_MEMORY if reason == NO_MEMORY else still} in a turn of this job, {_MOST_STILL} times"
        return [m.JobChanged(job, JobState.FAILED, f"{why}; make its rows or its steps smaller")]

    def moved_on(self, host: HostLink, event: m.JobChanged) -> None:
        """Record a job's new state on its host."""
        job = self._jobs.get(event.job)
        if job is not None and job.host is host:
            job.state, job.had_slot = event.state, job.had_slot or event.state is JobState.RUNNING
            if event.state.final:
                del self._jobs[event.job]
                self._losses.pop(event.job, None)
                self._still.pop(event.job, None)

    def released(self, host: HostLink, job: str) -> bool:
        """Record that a host has released a job; False if it did not have it."""
        assigned = self._jobs.get(job)
        if assigned is None or assigned.host is not host:
            return False
        del self._jobs[job]
        return True

    def set_rule(self, message: m.SetRule) -> bool:
        """Set a tenant's rule; returns whether more jobs may be placed. Storage room does not count."""
        before, rule = self.rules.get(message.tenant), message.rule
        self.rules[message.tenant] = rule
        return before is None or replace(before, room=None) != replace(rule, room=None)

    def has_to_wait(self, job: Assigned) -> bool:
        """Whether a paused job cannot resume, because its tenant has as many jobs as may run."""
        return job.state is JobState.PAUSED and placed(job.claim, list(self.loads().values()), self._limits) is None

    def moves(self) -> Iterator[tuple[HostLink, str]]:
        """Jobs that hosts must release so that the load becomes even."""
        while (move := moved(list(self.loads().values()))) is not None:
            self._jobs[move.job].to = self._hosts[move.to]
            yield self._jobs[move.job].host, move.job

    def loads(self) -> dict[int, HostLoad]:
        """Loads of the available hosts; paused jobs need no slot, except those paused by a rule."""
        hosts = [host for host in self._hosts if host.ready]
        running, waiting, coming, fresh = ({host.number: list[Claim]() for host in hosts} for _ in range(4))
        for job in list(self._jobs.values()):
            held = job.state is JobState.PAUSED and self.rules.get(job.claim.tenant, FREE).hold
            if job.to is not None:
                whose, there = coming, job.to if job.to.ready else job.host
            else:
                whose, there = running if job.state is JobState.RUNNING else waiting, job.host
            if there.ready and (job.to is not None or held or job.state in _OPEN):
                whose[there.number].append(job.claim)
                if whose is waiting and not job.had_slot:
                    fresh[there.number].append(job.claim)
        fast: dict[int, float] = {}
        for base in {host.base for host in hosts}:
            fast |= speeds({host.number: host.speed for host in hosts if host.base == base})
        return {
            host.number: HostLoad(
                host.number, host.slots, tuple(running[host.number]), tuple(waiting[host.number]),
                tuple(coming[host.number]), fast[host.number], host.base, tuple(fresh[host.number]),
            )
            for host in hosts
        }  # fmt: skip
