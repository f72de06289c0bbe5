"""One person's jobs on their way to the end: on a `Host` in this process, or on several that `Hosts` drives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from motet.config import RunConfig
from motet.config.service import Largest
from motet.core.errors import RunError
from motet.core.types import HostNow, JobState, Wanted
from motet.hosts import messages as m
from motet.hosts.host import Host
from motet.hosts.host_link import HostHandlers, HostLink, Launch, OfJob
from motet.hosts.hosts import Hosts
from motet.hosts.starts import launcher, starts_of
from motet.kernels.cpu.choice import Choice
from motet.runtime.interrupt import Interrupt
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import FREE

Observe = Callable[[Sequence[JobProgress]], None]
_LOOK_SECONDS = 0.25


class HostedRun:
    """Jobs on several hosts, in other processes."""

    jobs: Sequence[Job] = ()

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        own: Choice | None,
        *,
        accept_changes: bool = False,
        launch: Launch | None = None,
    ) -> None:
        """`accept_changes` resumes jobs that differ from their directories.

        `own` has the kernels that `auto` selects. `launch` starts the hosts, by default as `starts.launcher` says.
        """
        self._configs, self._directory, self.notes = config.jobs, directory, list[str]()
        self._progress = {job.name: JobProgress.of(job) for job in config.jobs}
        start = m.StartHost(
            base=config.base,
            run=str(directory.path.absolute()),  # hosts may run in another directory
            largest=Largest(
                max(job.adapter.rank for job in config.jobs), max(job.algorithm.lag for job in config.jobs)
            ),
            own_jobs=True,
            accept_changes=accept_changes,
            own=own,
            trust_remote_code=config.engine.trust_remote_code,
        )
        slots = min(config.engine.slots, sum(job.slots for job in config.jobs))  # servers need room for all of them
        engine = config.engine.model_copy(update={"slots": slots})
        hosts = starts_of((start, config.model_copy(update={"engine": engine})))
        if launch is None:
            launch = launcher(config.cluster, config)
        self._hosts = Hosts(hosts, directory.path.absolute(), launch)
        self._stopping = asyncio.Event()
        self.stop = self._stopping.set

    def loads(self) -> list[HostNow]:
        """The state of each host; empty after the run."""
        if self._stopping.is_set():
            return []
        return [
            HostNow(
                f"host {host.number}",
                host.ready,
                self._hosts.jobs.on(host),
                sum(job.tokens_per_second for job in host.progress.values()),
                host.failure or ("starting" if host.starts < 2 else "starting again"),
            )
            for host in self._hosts.hosts
        ]

    def progress(self) -> list[JobProgress]:
        """The progress of each job, as its host tells."""
        for name, standing in self._hosts.progress.items():
            self._progress[name].see(standing)
        return list(self._progress.values())

    async def run(self) -> None:
        """Run until all jobs have ended, spent their budgets, or saved. Raises RunError if no host can start."""
        self._hosts.start(HostHandlers(self._open_jobs, self._hear))
        try:
            while not self._stopping.is_set() and any(job.open for job in self._progress.values()):
                if none_can_start(self._hosts.hosts):
                    raise RunError(self._hosts.failure)
                await asyncio.sleep(_LOOK_SECONDS)
            self._stopping.set()
            await self._hosts.stop()
        finally:
            self._stopping.set()
            await self._hosts.kill()
            for job in self._progress.values():
                if job.state in (JobState.QUEUED, JobState.RUNNING):
                    job.state = JobState.PAUSED

    def _hear(self, event: OfJob) -> None:
        job = self._progress[event.job]
        job.hear(event)
        if isinstance(event, m.JobChanged) and event.state is JobState.FAILED:  # its host may be gone
            self._directory.job(event.job).write_status(job.status)

    def _open_jobs(self) -> list[m.AddJob]:
        """The jobs that hosts may train now. Called in the thread of the jobs' events."""
        open_jobs = ((job, now) for job in self._configs if (now := self._progress[job.name]).open)
        return [
            m.AddJob(job.model_dump(mode="json"), Wanted.RUN, now.next_line, "", FREE, job.slots)
            for job, now in open_jobs
        ]


Run = Host | HostedRun
"""Jobs on their way to the end, on one host or on several: what starts, shows and stops them."""


async def follow(run: Run, interrupt: Interrupt, observe: Observe | None) -> None:
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


@contextmanager
def notices_to(notify: Callable[[str], None] | None) -> Iterator[None]:
    """Show warnings about host processes while the block runs, each message once."""
    log, notices, said = logging.getLogger("motet.hosts"), logging.Handler(logging.WARNING), set[str]()

    def show(record: logging.LogRecord) -> bool:
        if notify is not None and (line := record.getMessage()) not in said:
            said.add(line)
            notify(line)
        return False  # nothing is left to emit

    notices.addFilter(show)
    log.addHandler(notices)
    try:
        yield
    finally:
        log.removeHandler(notices)
