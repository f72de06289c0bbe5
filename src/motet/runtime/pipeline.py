"""All jobs of a run at once: who has a slot, who waits, and what happens when a job ends, fails, is paused or cancelled.

A job's fault is that job's: whatever leaves its loop becomes its state and a reason, and every other job goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Sequence

from motet.errors import DeviceError, MotetError, RunError
from motet.runtime.checkpoint import disk_error
from motet.runtime.job import Job, Services
from motet.runtime.job_loop import JobLoop
from motet.types import JobState

CONTROL = "control"
"""A file in a job's directory with the word `pause`, `resume` or `cancel`; read and removed by the running process."""
_POLL_SECONDS = 0.3
MAX_RESTARTS = 3
"""How often a job is taken up again after a fault of the device."""


class Pipeline:
    """Runs jobs over shared services."""

    def __init__(self, jobs: Sequence[Job], services: Services, slots: int, *, stays: bool = False) -> None:
        """`stays` keeps running without jobs, for more to come, until `stop`."""
        self._stays = stays
        self.jobs = {job.name: job for job in jobs}
        self._services = services
        self._slots = slots
        self._loops: dict[str, JobLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pauses: set[str] = set()
        self._restarts: dict[str, int] = {}
        self._stopping = False
        self._closing = False
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Run until every job has ended, or is paused and nobody will resume it because the run is stopping.

        One that stays goes on until it is stopped.
        """
        poll = asyncio.create_task(self._poll_controls())
        try:
            while True:
                self._changed.clear()
                self._fill_slots()
                if not self._tasks and (self._stopping or not (self._stays or self._waiting())):
                    return
                await self._changed.wait()
        finally:
            self._closing = True
            poll.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(poll, *self._tasks.values(), return_exceptions=True)

    # --- what people ask for -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Finish the steps under way, save, and end the run."""
        self._stopping = True
        for name in self.jobs:
            self.pause(name)
        self._changed.set()

    def add(self, job: Job) -> None:
        """Take another job, beside those that run.

        Raises:
            RunError: there is one of this name.
        """
        if job.name in self.jobs:
            raise RunError(f"there is a job {job.name!r} already")
        self.jobs[job.name] = job
        self._changed.set()

    def forget(self, name: str) -> None:
        """Let go of a job that has no slot; what it saved stays."""
        if name not in self._tasks:
            self.jobs.pop(name, None)

    def pause(self, name: str) -> None:
        """Finish the job's step, save and give its slot away."""
        job = self.jobs[name]
        if name in self._tasks:
            self._pauses.add(name)  # read by the loop that its task is about to make
            if name in self._loops:
                self._loops[name].pause()
        elif job.state is JobState.QUEUED:
            job.move(JobState.PAUSED)
        self._changed.set()

    def resume(self, name: str) -> None:
        """Put a paused or failed job back into the queue; one that was to pause goes on; any other stays where it is."""
        if name in self._pauses:
            self._pauses.discard(name)
            if name in self._loops:
                self._loops[name].go_on()
        elif name not in self._tasks and self.jobs[name].state in (JobState.PAUSED, JobState.FAILED):
            self.jobs[name].move(JobState.QUEUED)
        self._changed.set()

    def cancel(self, name: str) -> None:
        """End a job now; what it committed stays on disk."""
        if name in self._tasks:
            self._tasks[name].cancel()
        elif not self.jobs[name].state.final:
            self.jobs[name].move(JobState.CANCELLED)
        self._changed.set()

    # --- slots -------------------------------------------------------------------------------------------------------

    def _waiting(self) -> bool:
        states = {job.state for job in self.jobs.values()}
        return JobState.QUEUED in states or (JobState.PAUSED in states and not self._stopping)

    def _fill_slots(self) -> None:
        queued = [job for job in self.jobs.values() if job.state is JobState.QUEUED]
        queued.sort(key=lambda job: -job.config.priority)  # stable: the file's order among equals
        for job in queued:
            if self._stopping:
                job.move(JobState.PAUSED)
            elif len(self._tasks) < self._slots:
                job.move(JobState.RUNNING)
                task = self._tasks[job.name] = asyncio.create_task(self._run_job(job))
                task.add_done_callback(lambda task, job=job: self._never_began(job, task))  # type: ignore[misc]

    async def _run_job(self, job: Job) -> None:
        try:
            loop = self._loops[job.name] = JobLoop(job, self._services, job.directory.restore())
            if job.name in self._pauses:
                loop.pause()
            state = await loop.run()
            self._end(job, state, "" if state is JobState.SUCCEEDED else f"paused after step {job.progress.step}")
        except asyncio.CancelledError:
            if not self._closing:  # a run that is torn down leaves its jobs as they are: they go on next time
                self._end(job, JobState.CANCELLED, f"cancelled after step {job.progress.step}")
        except DeviceError as error:
            self._take_up_again(job, error)
        except Exception as error:  # the boundary of a tenant: its fault must not reach the others
            self._end(job, JobState.FAILED, self._reason(job, error))
        finally:
            self._release(job)

    def _never_began(self, job: Job, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first line runs neither that line nor its `finally`."""
        if self._tasks.get(job.name) is task:
            if not self._closing:
                self._end(job, JobState.CANCELLED, "cancelled before it began")
            self._release(job)

    def _release(self, job: Job) -> None:
        self._loops.pop(job.name, None)
        self._tasks.pop(job.name, None)
        self._pauses.discard(job.name)
        self._changed.set()

    def _take_up_again(self, job: Job, error: DeviceError) -> None:
        """A fault of the device that may be another job's: go on from the last commit, which ends with the same bytes."""
        restarts = self._restarts[job.name] = self._restarts.get(job.name, 0) + 1
        if restarts > MAX_RESTARTS:
            self._end(job, JobState.FAILED, f"{error} (after {MAX_RESTARTS} new starts from the last commit)")
        else:
            self._end(job, JobState.QUEUED, f"taken up again from the last commit: {error}")

    def _end(self, job: Job, state: JobState, message: str) -> None:
        try:
            job.move(state, message)
        except (
            RunError
        ) as error:  # a full disk: the state holds in this process, and the next one starts from the last commit
            job.progress.message = f"{message} ({error})" if message else str(error)

    def _reason(self, job: Job, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError):
            error = disk_error(error, job.directory.path)
        if isinstance(error, MotetError):
            return str(error)
        log = job.directory.path / "error.log"
        told = f"the whole story is in {log}"
        try:
            log.write_text("".join(traceback.format_exception(error)))
        except OSError:
            told = f"{log} could not be written"
        return f"{type(error).__name__}: {error} ({told}); this is a fault of Motet, please report it"

    async def _poll_controls(self) -> None:
        """Read control files, so that another process can pause, resume or cancel one job of this run."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for name, job in self.jobs.items():
                path = job.directory.path / CONTROL
                if not path.exists():
                    continue
                word = path.read_text(errors="replace").strip()
                path.unlink()
                action = {"pause": self.pause, "resume": self.resume, "cancel": self.cancel}.get(word)
                if action is not None and (not job.state.final or job.state is JobState.FAILED):
                    with contextlib.suppress(RunError):  # a full disk: the state holds in this process
                        action(name)
