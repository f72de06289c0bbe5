"""One person's jobs on their way to the end: on a host in this process, or on several that `Hosts` drives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from motet.config import JobConfig, RunConfig
from motet.config.service import Largest
from motet.core.errors import RunError
from motet.core.types import HostNow, JobState, Wanted
from motet.hosts import messages as m
from motet.hosts.before_loading import auto_kernels
from motet.hosts.host import Host
from motet.hosts.host_link import HostHandlers, HostLink, Launch, OfJob
from motet.hosts.hosts import Hosts
from motet.hosts.starts import launcher, starts_of
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.interrupt import Interrupt
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import FREE

Observe = Callable[[Sequence[JobProgress]], None]
_LOOK_SECONDS = 0.25
_NEVER = 1e9
"""Seconds before an idle job loses its slot to another tenant's: here all jobs have one tenant."""


class LocalRun:
    """Jobs on a host in this process."""

    def __init__(self, host: Host) -> None:
        self.host, self.jobs, self.notes = host, host.jobs, host.workshop.notes
        self._pipeline = Pipeline(host.jobs, host.services, host.config.engine.slots)
        self.stop = self._pipeline.stop

    def progress(self) -> list[JobProgress]:
        """The progress of each job."""
        return [job.progress for job in self.jobs]

    async def run(self) -> None:
        """Run until all jobs have ended or saved."""
        async with self.host.open():
            await self._pipeline.run()


@dataclass
class HostedJob:
    """A job that hosts run, as their events tell of it."""

    config: JobConfig
    directory: JobDirectory
    progress: JobProgress
    inexact: list[str] = field(default_factory=list)
    """Why its bytes may depend on more than the job."""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.config.name

    @property
    def open(self) -> bool:
        """Whether the job has work left."""
        return not self.progress.state.final and not self.progress.spent

    def hear(self, event: OfJob) -> None:
        """Handle a host's event."""
        self.progress.hear(event)
        if isinstance(event, m.JobChanged):
            self.inexact = self.inexact if event.inexact is None else event.inexact
            if event.state is JobState.FAILED:  # its host may be gone
                status = {"state": event.state.value, "message": event.message, "inexact": self.inexact}
                self.directory.write_status(status)


class HostedRun:
    """Jobs on several hosts, in other processes."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        accept_changes: bool = False,
        launch: Launch | None = None,
    ) -> None:
        """`accept_changes` resumes jobs that differ from their directories.

        `launch` starts the hosts, by default as `cluster.launcher` says.
        """
        jobs = config.jobs
        self.notes: list[str] = []
        self.jobs = [HostedJob(job, directory.job(job.name), JobProgress.of(job)) for job in jobs]
        self._named = {job.name: job for job in self.jobs}
        start = m.StartHost(
            base=config.base,
            run=str(directory.path.absolute()),  # hosts may run in another directory
            engine={},
            rollout=config.rollout.model_dump(mode="json"),
            rewards={},
            unwalled=[],
            patience_seconds=_NEVER,
            largest=Largest(max(job.adapter.rank for job in jobs), max(job.algorithm.lag for job in jobs)),
            own_jobs=True,
            accept_changes=accept_changes,
            own=auto_kernels(config),
            trust_remote_code=config.engine.trust_remote_code,
        )
        slots = min(config.engine.slots, sum(job.slots for job in jobs))  # servers need room for all of them
        engine = config.engine.model_copy(update={"slots": slots})
        hosts = starts_of((start, config.model_copy(update={"engine": engine})))
        self._client = Hosts(hosts, directory.path.absolute(), launch or launcher(config.cluster, config))
        self._stopping = asyncio.Event()
        self.stop = self._stopping.set

    def now(self) -> list[HostNow]:
        """The state of each host; empty after the run."""
        if self._stopping.is_set():
            return []
        return [
            HostNow(
                f"host {host.number}",
                host.ready,
                self._client.jobs.on(host),
                sum(job.tokens_per_second for job in host.progress.values()),
                host.failure or ("starting" if host.starts < 2 else "starting again"),
            )
            for host in self._client.hosts
        ]

    def progress(self) -> list[JobProgress]:
        """The progress of each job, as its host tells."""
        for name, standing in self._client.progress.items():
            self._named[name].progress.see(standing)
        return [job.progress for job in self.jobs]

    async def run(self) -> None:
        """Run until all jobs have ended, spent their budgets, or saved. Raises RunError if no host can start."""
        self._client.start(HostHandlers(self._open_jobs, lambda event: self._named[event.job].hear(event)))
        try:
            while not self._stopping.is_set() and any(job.open for job in self.jobs):
                if none_can_start(self._client.hosts):
                    raise RunError(self._client.failure)
                await asyncio.sleep(_LOOK_SECONDS)
            self._stopping.set()
            await self._client.stop()
        finally:
            self._stopping.set()
            await self._client.kill()
            for job in self.jobs:
                if job.progress.state in (JobState.QUEUED, JobState.RUNNING):
                    job.progress.state = JobState.PAUSED

    def _open_jobs(self) -> list[m.AddJob]:
        """The jobs that hosts may train now. Called in the thread of the jobs' events."""
        return [
            m.AddJob(job.config.model_dump(mode="json"), Wanted.RUN, job.progress.next_line, "", FREE, job.config.slots)
            for job in self.jobs
            if job.open
        ]


async def follow(run: LocalRun | HostedRun, interrupt: Interrupt, observe: Observe | None) -> None:
    """Run jobs to their end, with someone who looks at their progress; what `observe` raises ends the run, with all saved."""
    failures = list[BaseException]()

    async def watch() -> None:
        try:
            while observe is not None:
                observe(run.progress())
                await asyncio.sleep(_LOOK_SECONDS)
        except (Exception, SystemExit) as error:  # rich ends a program whose output nobody reads any more
            failures.append(error)
            run.stop()

    watching = asyncio.create_task(watch())
    try:
        with interrupt.heard(run.stop, run.progress):
            await run.run()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if observe is not None and not failures:
            observe(run.progress())
    if failures:
        raise failures[0]


def none_can_start(hosts: Sequence[HostLink]) -> bool:
    """Whether no host runs or starts. A failed host is tried again while another may start."""
    return all(host.hopeless for host in hosts)


class _Notices(logging.Handler):
    """Shows warnings about host processes, each message once."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify, self._said = notify, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record unless it was shown before."""
        if (line := record.getMessage()) not in self._said:
            self._said.add(line)
            self._notify(line)


@contextmanager
def notices_to(notify: Callable[[str], None] | None) -> Iterator[None]:
    """Show warnings about host processes while the block runs."""
    log, notices = logging.getLogger("motet.hosts"), _Notices(notify or (lambda line: None))
    log.addHandler(notices)
    try:
        yield
    finally:
        log.removeHandler(notices)
