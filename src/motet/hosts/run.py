"""Runs one person's jobs on several hosts: `motet run` with `engine.hosts` above 1."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet.config import JobConfig, RunConfig
from motet.config.service import Largest
from motet.core.errors import ConfigError, RunError
from motet.core.types import HostNow, JobState, Wanted
from motet.hosts import messages as m
from motet.hosts.host_link import HostHandlers, HostLink, Launch, OfJob
from motet.hosts.hosts import Hosts
from motet.hosts.starts import starts_of
from motet.kernels.cpu.choice import Choice
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.interrupt import Interrupt
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import FREE

_LOOK_SECONDS = 0.25
_NEVER = 1e9
"""Seconds before an idle job loses its slot to another tenant's: here all jobs have one tenant."""


@dataclass
class HostedJob:
    """A job, and its progress as reported by hosts."""

    config: JobConfig
    directory: JobDirectory
    progress: JobProgress
    inexact: list[str] = field(default_factory=list)
    """Why its bytes may depend on more than the job."""
    lines: set[int] = field(default_factory=set)
    """Steps with a known metrics line; another host sends some of them again."""

    counted: int = 0
    """Its host's token count at the last report."""

    @property
    def open(self) -> bool:
        """Whether the job has work left."""
        return not self.progress.state.final and not self.progress.spent

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.config.name

    @property
    def state(self) -> JobState:
        """The current state."""
        return self.progress.state

    def move(self, state: JobState, message: str = "") -> None:
        """Change the state and record it. No host may have the job."""
        self.progress.state, self.progress.message, self.progress.phase = state, message, ""
        self.directory.write_status({"state": state.value, "message": message, "inexact": list(self.inexact)})

    def hear(self, event: OfJob) -> None:
        """Handle a host's event."""
        now = self.progress
        if isinstance(event, m.JobStepped):
            step = int(event.line["step"])
            if step not in self.lines:
                self.lines.add(step)
                if "loss" in event.line:
                    now.stepped(event.line)
                    now.step = step + 1
                if "eval" in event.line:
                    now.evaluated(step, event.line["eval"])
                    now.choose(step if event.best else now.best_version, event.best_by)
        elif isinstance(event, m.JobChanged):
            now.state, now.message, now.phase, now.spent = event.state, event.message, "", event.spent
            self.inexact = self.inexact if event.inexact is None else event.inexact
            if now.state is JobState.FAILED:  # its host may be gone
                self.move(now.state, now.message)
            if now.state is JobState.RUNNING and not now.started:
                now.started, now.first_step = time.monotonic(), now.step

    def see(self, standing: m.JobStanding) -> None:
        """Update the progress from its host's report."""
        now, tokens = self.progress, standing.tokens
        # a smaller count comes from another host
        now.tokens += tokens if tokens < self.counted else tokens - self.counted
        self.counted, now.phase = tokens, standing.phase
        now.rollouts_done, now.rollouts_wanted = standing.rollouts_done, standing.rollouts_wanted


class HostedRun:
    """Gives the jobs to hosts and waits until all have ended."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        jobs: Sequence[HostedJob],
        launch: Launch | None = None,
        *,
        accept_changes: bool = False,
        own: Choice | None = None,
    ) -> None:
        """`launch` starts the hosts; `accept_changes` resumes jobs that differ from their directories.

        `own` has the kernels that `auto` selects.

        Raises:
            ConfigError: a job cannot run in another process.
        """
        for job in jobs:
            if any(reward.function is not None for reward in job.config.rewards):
                raise ConfigError(
                    f"job {job.config.name}: its reward is a function of this process, which hosts do not have; name it as "
                    "`file.py:function`, or set engine.hosts to 1"
                )
            if job.config.data.rows is not None:
                raise ConfigError(
                    f"job {job.config.name}: its rows are of this process, which hosts do not have; write them to a file and "
                    "name that as data.source, or set engine.hosts to 1"
                )
        start = m.StartHost(
            base=config.base,
            run=str(directory.path.absolute()),  # hosts may run in another directory
            engine={},
            rollout=config.rollout.model_dump(mode="json"),
            rewards={},
            unwalled=[],
            patience_seconds=_NEVER,
            largest=Largest(
                max(job.config.adapter.rank for job in jobs), max(job.config.algorithm.lag for job in jobs)
            ),
            own_jobs=True,
            accept_changes=accept_changes,
            own=own,
            trust_remote_code=config.engine.trust_remote_code,
        )
        slots = min(config.engine.slots, sum(job.config.slots for job in jobs))  # servers need room for all of them
        engine = config.engine.model_copy(update={"slots": slots})
        hosts = starts_of((start, config.model_copy(update={"engine": engine})))
        self._client = Hosts(hosts, directory.path.absolute(), launch)
        self._stopping = asyncio.Event()
        self._jobs = {job.name: job for job in jobs}

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

    async def run(self, interrupt: Interrupt, observe: Callable[[Sequence[JobProgress]], None] | None) -> None:
        """Run until all jobs have ended, spent their budgets, or saved. Raises RunError if no host can start."""
        stopping, failures = self._stopping, list[BaseException]()

        def progress() -> list[JobProgress]:
            return [job.progress for job in self._jobs.values()]

        def look() -> None:
            for name, standing in self._client.progress.items():
                self._jobs[name].see(standing)
            if observe is not None:
                observe(progress())

        self._client.start(HostHandlers(self._open_jobs, lambda event: self._jobs[event.job].hear(event)))
        try:
            with interrupt.heard(stopping.set, progress):
                while not (stopping.is_set() or failures) and any(job.open for job in self._jobs.values()):
                    try:
                        look()
                    except (Exception, SystemExit) as error:  # rich exits if the output is closed
                        failures.append(error)
                        break
                    if none_can_start(self._client.hosts):
                        raise RunError(self._client.failure)
                    await asyncio.sleep(_LOOK_SECONDS)
                stopping.set()
                await self._client.stop()
        finally:
            await self._client.kill()
            for job in progress():
                job.state = JobState.PAUSED if job.state in (JobState.QUEUED, JobState.RUNNING) else job.state
            if not failures:
                look()
        if failures:
            raise failures[0]

    def _open_jobs(self) -> list[m.AddJob]:
        """The jobs that hosts may train now. Called in the thread of the jobs' events."""
        return [self._message(job) for job in self._jobs.values() if job.open]

    @staticmethod
    def _message(job: HostedJob) -> m.AddJob:
        tree = job.config.model_dump(mode="json")
        return m.AddJob(tree, Wanted.RUN, max(job.lines, default=-1) + 1, "", FREE, job.config.slots)


def none_can_start(hosts: Sequence[HostLink]) -> bool:
    """Whether no host runs or starts. A failed host is tried again while another may start."""
    return all(host.hopeless for host in hosts)


class NoticesTo(logging.Handler):
    """Shows warnings about host processes, each message once."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify, self._said = notify, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record unless it was shown before."""
        if (line := record.getMessage()) not in self._said:
            self._said.add(line)
            self._notify(line)
