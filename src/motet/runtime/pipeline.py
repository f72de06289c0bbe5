"""Runs all jobs of a run: assigns slots and handles the end, failure, pause and cancellation of jobs.

An exception in a job's loop becomes that job's state and reason; other jobs continue.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Iterable, Mapping, Sequence

from motet.core.checksums import disk_error
from motet.core.errors import DeviceError, DeviceLost, MotetError, RunError
from motet.core.types import JobState, Wanted
from motet.process.heartbeat import works_for
from motet.runtime.disk_gate import DiskSpaceGate, innermost, is_full
from motet.runtime.job import Job, Services
from motet.runtime.rundir import read_commands
from motet.runtime.running_job import Running, cut_off, driver_of, outcome
from motet.runtime.scheduler import weight_of
from motet.runtime.shielded import uninterrupted
from motet.runtime.slot_turns import MAX_IDLE, STEP_SECONDS, SlotTimeouts, SlotTurns, StepTurns
from motet.runtime.slots import FREE, Claim, Rule, admitted, preempted_for_share, preempted_if_idle

_POLL_SECONDS = 0.3
MAX_RESTARTS = 3
"""Restarts of a job after device errors."""


class Pipeline:
    """Runs jobs over shared services."""

    def __init__(
        self,
        jobs: Sequence[Job],
        services: Services,
        slots: int,
        *,
        stays: bool = False,
        max_idle: float = MAX_IDLE,
        step_seconds: float = STEP_SECONDS,
        turns: SlotTurns | None = None,
    ) -> None:
        """`stays` keeps running without jobs until `stop`; jobs that only wait then lose their slots."""
        self._turns, self._stays = turns or SlotTurns(), stays
        self._timeouts, self._steps = SlotTimeouts(max_idle), StepTurns(services.device.busy, slots, step_seconds)
        self.jobs = {job.name: job for job in jobs}
        self._services, self._slots = services, slots
        self._running: dict[str, Running] = {}
        self._rules: dict[str, Rule] = {}
        self._disk_gate, self._changed = DiskSpaceGate(), asyncio.Event()
        self._stopping = self._closing = False

    async def run(self) -> None:
        """Run until every job has ended or, after `stop`, is paused. With `stays`, run until stopped."""
        poll = asyncio.create_task(self._poll())
        poll.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                if poll.done():
                    poll.result()  # an internal error must not leave jobs waiting forever
                self._changed.clear()
                self._fill_slots()
                if not self._running and (self._stopping or not (self._stays or self._waiting())):
                    return
                await self._changed.wait()
        finally:
            self._closing = True
            poll.cancel()
            tasks = [run.task for run in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(poll, *tasks, return_exceptions=True)

    # --- requests -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Finish the current steps, save, and end the run."""
        self._stopping = True
        for name in self.jobs:
            self.pause(name)
        self._changed.set()

    def add(self, job: Job) -> None:
        """Add a job to a running pipeline.

        Raises:
            RunError: a job of this name exists.
        """
        if job.name in self.jobs:
            raise RunError(f"there is a job {job.name!r} already")
        self.jobs[job.name] = job
        self._obey(job)
        self._changed.set()

    def forget(self, name: str) -> None:
        """Remove a job without a slot; its files stay."""
        if name not in self._running:
            self.jobs.pop(name, None)
            self._disk_gate.forget(name)
            self._timeouts.forget(name)
            self._steps.forget(name)

    def steer(self, name: str, wanted: Wanted) -> None:
        """Let a job run, pause or end; nothing changes if it does that already."""
        {Wanted.RUN: self.resume, Wanted.PAUSE: self.pause, Wanted.CANCEL: self.cancel}[wanted](name)

    def pause(self, name: str, reason: str = "") -> None:
        """Finish the job's step, save and release its slot."""
        job, running = self.jobs[name], self._running.get(name)
        job.held = False
        if running is not None:
            running.preempted = False
            running.stop_after_step(reason)
        elif job.state is JobState.QUEUED:
            _move(job, JobState.PAUSED, reason)
        self._changed.set()

    def resume(self, name: str) -> None:
        """Queue a paused or failed job; cancel a pending pause; otherwise do nothing."""
        job, running = self.jobs[name], self._running.get(name)
        job.held = False
        if running is not None and running.pause is not None:
            running.pause, running.preempted = None, False
            if running.loop is not None:
                running.loop.go_on()
        elif running is None and job.state in (JobState.PAUSED, JobState.FAILED):
            _move(job, JobState.QUEUED)
        self._obey(job)
        self._changed.set()

    def rule(self, tenant: str, rule: Rule) -> None:
        """Set a tenant's rule. A hold pauses its jobs; they resume when it is lifted."""
        self._rules[tenant] = rule
        self._services.scheduler.share(tenant, rule.share)
        self._services.room.set(tenant, rule.room)
        self._services.steps.given[tenant] = rule.step_tokens
        for job in [job for job in self.jobs.values() if job.tenant == tenant]:
            if rule.hold:
                self._obey(job)
            elif job.held and (self._pauses(job.name) or job.state is JobState.PAUSED):
                self.resume(job.name)
        self._changed.set()

    def _obey(self, job: Job) -> None:
        """Pause a job whose tenant is on hold, unless a person paused it."""
        reason = self._rules.get(job.tenant, FREE).hold
        stays = self._pauses(job.name) and not self._running[job.name].preempted
        if reason and not stays and job.state in (JobState.QUEUED, JobState.RUNNING):
            self.pause(job.name, reason)
            job.held = True

    def _pauses(self, name: str) -> bool:
        """Whether a job will release its slot after the current step."""
        return name in self._running and self._running[name].pause is not None

    def change(self, name: str, **fields: int | None) -> None:
        """Change a job's `budget` or `priority`, from the next step or request on."""
        job = self.jobs[name]
        job.config = job.config.model_copy(update=fields)
        self._services.scheduler.reweigh(name, weight_of(job.config.priority))
        self._changed.set()

    def cancel(self, name: str) -> None:
        """End a job now; its commits stay on disk."""
        if name in self._running:
            self._running[name].task.cancel()
        elif not self.jobs[name].state.final:
            _move(self.jobs[name], JobState.CANCELLED)
        self._changed.set()

    # --- slots -------------------------------------------------------------------------------------------------------

    def _waiting(self) -> bool:
        states = {job.state for job in self.jobs.values() if not job.progress.spent}
        return JobState.QUEUED in states or (JobState.PAUSED in states and not self._stopping)

    def _queued(self) -> list[Claim]:
        queued = (job for job in self.jobs.values() if job.state is JobState.QUEUED and _may_begin(job))
        return [_claim(job) for job in queued if not self._disk_gate.blocks(job.name)]

    def _keeping(self) -> tuple[list[Claim], int]:
        """Jobs that keep their slot, and the number of slots for them and for new jobs."""
        keeping = [_claim(run.job) for run in self._running.values() if not run.preempted]
        return keeping, self._slots - sum(run.job.config.slots for run in self._running.values() if run.preempted)

    def _holding(self) -> list[Claim]:
        return [_claim(run.job) for run in self._running.values()]

    def _fill_slots(self) -> None:
        _fail_chained(self.jobs.values())
        claims = self._queued()
        if self._stopping:
            for claim in claims:
                _move(self.jobs[claim.job], JobState.PAUSED)
            return
        _look(self._running, self._steps)
        running, slots = self._keeping()
        self._turns.update(self._holding(), claims, self._slots, self._rules)
        for name in admitted(claims, running, slots, self._rules, self._turns.had):
            job = self.jobs[name]
            self._disk_gate.forget(name)
            _move(job, JobState.RUNNING)
            task = asyncio.create_task(self._run_job(job))
            self._running[name] = Running(job, task)
            task.add_done_callback(lambda task, job=job: self._never_began(job, task))  # type: ignore[misc]
            running.append(_claim(job))
        claims = [claim for claim in claims if claim.job not in self._running]
        self._turns.hold(self._holding())
        if any(run.preempted for run in self._running.values()):
            return
        preempted = preempted_for_share(claims, running, slots, self._rules, self._turns.had, self._steps.longer)
        if preempted is not None and not self._pauses(preempted):
            self._running[preempted].preempt()

    async def _run_job(self, job: Job) -> None:
        running = self._running[job.name]
        works_for(job.name)
        try:
            committed = await uninterrupted(asyncio.to_thread(job.directory.restore))
            loop = running.loop = driver_of(job)(job, self._services, committed)
            if running.pause is not None:
                loop.pause()
            state = await loop.run()
            if job.progress.spent:
                job.held = False
            _move(job, *outcome(job, state, running.pause, preempted=running.preempted))
        except asyncio.CancelledError:
            if not (self._closing and self._stays):  # a service that shuts down leaves the state of its jobs
                _move(job, *cut_off(self._closing, f"after step {job.progress.step}"))
        except DeviceError as error:
            _restart(job, error)
        except Exception as error:  # one tenant's error must not affect others
            full = self._stays and is_full(error)
            _fail(job, error, self._disk_gate.block(job, error, self._services.room) if full else "")
        finally:
            _keep_pause(running)
            self._running.pop(job.name, None)
            self._changed.set()

    def _never_began(self, job: Job, task: asyncio.Task[None]) -> None:
        """Clean up after a task that was cancelled before its first line; its `finally` does not run."""
        running = self._running.get(job.name)
        if running is not None and running.task is task:
            if not (self._closing and self._stays):
                _move(job, *cut_off(self._closing, "before it began"))
            self._running.pop(job.name, None)
            self._changed.set()

    async def _poll(self) -> None:
        """Check waiting jobs at intervals, and execute commands of other processes."""
        for turn in itertools.count():
            await asyncio.sleep(_POLL_SECONDS)
            if self._stays:
                self._preempt_idle()
            _drop_steps(self._running, self._steps)
            if self._disk_gate.may_open() or self._turns.due:
                self._changed.set()
            for name, wanted in read_commands(list(self.jobs.values()), turn):
                self.steer(name, wanted)

    def _preempt_idle(self) -> None:
        """Take slots from jobs that only wait for scores, if they must stop anyway or another job needs the slot."""
        waiting = {
            name: run.loop
            for name, run in self._running.items()
            if run.loop is not None and self._timeouts.expired(name, run.job.progress.step, waits=run.loop.waits)
        }
        keeping, slots = self._keeping()
        preempted = preempted_if_idle(self._queued(), keeping, set(waiting), slots, self._rules, self._turns.had)
        if preempted is not None:
            self._running[preempted].preempted = True
            self._timeouts.preempted(preempted, self.jobs[preempted].progress.step)
            self.jobs[preempted] = self.jobs.pop(preempted)  # to the end of the queue
        for name, loop in waiting.items():
            if name == preempted or self._pauses(name):
                loop.drop()


def _look(running: Mapping[str, Running], turns: StepTurns) -> None:
    """Take in where the steps of running jobs are."""
    gives = {name for name, run in running.items() if run.preempted}
    turns.look({name: run.job.progress.step for name, run in running.items()}, gives)


def _drop_steps(running: Mapping[str, Running], turns: StepTurns) -> None:
    """Take slots in the middle of steps that last, from jobs that must give them away."""
    _look(running, turns)
    for name, run in running.items():
        if turns.over(name, must_go=run.must_go) and run.leave():
            turns.dropped(name)


def _move(job: Job, state: JobState, message: str = "") -> None:
    """Change a job's state, even if its directory cannot be written."""
    try:
        job.move(state, message)
    except (RunError, OSError) as error:  # the state holds here; the next process starts from the last commit
        job.progress.message = f"{message} ({error})" if message else str(error)


def _may_begin(job: Job) -> bool:
    """Whether the adapter that it starts from exists; a job with commits no longer needs it."""
    return job.before is None or job.before.state is JobState.SUCCEEDED or bool(job.directory.steps())


def _fail_chained(jobs: Iterable[Job]) -> None:
    """Fail jobs that wait for one that ended without success."""
    for job in jobs:
        before = job.before
        if before is None or job.state is not JobState.QUEUED or _may_begin(job):
            continue
        spent = before.progress.spent
        if spent or before.state in (JobState.FAILED, JobState.CANCELLED):
            state = "has spent its budget" if spent else f"is {before.state}"
            _move(job, JobState.FAILED, f"starts from job {before.name}, which {state}; resume both")


def _restart(job: Job, error: DeviceError) -> None:
    """Requeue a job after a device error that another job may have caused. It ends with the same bytes."""
    job.restarts += 1
    job.finished.forget()
    again = (JobState.QUEUED, f"taken up again from the last commit: {error}")
    failed = (JobState.FAILED, f"{error} (after {MAX_RESTARTS} new starts from the last commit)")
    _move(job, *(failed if job.restarts > MAX_RESTARTS else again))


def _keep_pause(running: Running) -> None:
    """Pause a job that would continue by itself though somebody has asked it to pause."""
    if running.job.state is JobState.QUEUED and running.pause is not None and not running.preempted:
        _move(running.job, JobState.PAUSED, running.pause)


def _claim(job: Job) -> Claim:
    return Claim(job.name, job.tenant, job.config.priority, job.config.slots)


def _fail(job: Job, error: BaseException, waits: str) -> None:
    """Set the state of a job whose loop failed; `waits` is the message if it resumes automatically."""
    if isinstance(innermost(error), DeviceLost):
        return  # the run ends and leaves its jobs unchanged
    job.finished.forget()  # the cause may be among them
    _move(job, JobState.QUEUED if waits else JobState.FAILED, waits or _reason(job, error))


def _reason(job: Job, error: BaseException) -> str:
    error = innermost(error)
    if isinstance(error, OSError):
        error = disk_error(error, job.directory.path)
    if isinstance(error, MotetError):
        return str(error)
    log = job.directory.path / "error.log"
    pointer = f"traceback in {log}"
    try:
        log.write_text("".join(traceback.format_exception(error)), "utf-8")
    except OSError:
        pointer = f"{log} could not be written"
    return f"{type(error).__name__}: {error} ({pointer}); this is an internal error of Motet, please report it"
