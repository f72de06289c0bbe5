"""The engine of a service: runs the jobs on its base, and reports their events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from msgspec import structs

from motet.config import EngineConfig, HostConfig, JobConfig, RolloutConfig, budgets
from motet.core.errors import EngineError
from motet.core.types import JobState, Wanted
from motet.data.row_files import OF_A_JOB
from motet.data.shared import ReadData, Sources
from motet.environments import episode_messages as e
from motet.environments.remote_agents import AgentsElsewhere, EpisodesElsewhere
from motet.hosts import messages as m
from motet.hosts.answers import Answers, Send, reason
from motet.hosts.base_speed import measure_steps
from motet.hosts.host import opened_host
from motet.hosts.line import Gone, Outbox, ServiceLine
from motet.hosts.preparing import bytes_of_rows, first_notes
from motet.hosts.reports import EveryStep, UsageReports
from motet.hosts.scores import AskedOfService
from motet.hosts.workshop import Workshop
from motet.process.channel import Parent
from motet.process.heartbeat import Pulse
from motet.process.pace import Pace
from motet.process.thread_turns import ThreadTurns
from motet.protocols import RolloutEngine
from motet.rewards.reward_elsewhere import ELSEWHERE
from motet.rewards.reward_installed import Installed
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls
from motet.runtime.device_usage import Meter
from motet.runtime.directory_checks import Given
from motet.runtime.job import Job
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobChanged, JobEvent
from motet.runtime.rundir import RunDirectory
from motet.runtime.slot_turns import SlotTurns

USUAL = budgets.Need(512, 512)
"""Sizes the KV cache: later jobs have unknown lengths."""
_SPEED_TOKENS = 64
_LOOK_SECONDS = 0.5
_USAGE_SECONDS = 2.0
"""Between two reports of device usage."""
_IDLE_SECONDS = 30.0
"""Between two reports without usage."""
_AWAY_SECONDS = 60.0
_THREADS = 32
"""That write files and wait for disks, begun as they are needed. Beside 31 jobs that commit at once, another's commit of 20 kB
takes 0.16 s in the middle; with 16 threads 0.56 s, with 8 it is 0.97 s. The last 16 take 9 MiB."""
_PREPARING = 16
"""Preparations that have begun; one of them works, the others have given way."""
_OF_PATIENCE = 0.9
"""A host that starts its servers itself ends before its jobs have waited for one in vain."""


class HostProcess:
    """One base, the jobs that train on it, and the versions that people talk to."""

    def __init__(
        self, config: HostConfig, directory: RunDirectory, start: m.StartHost, parent: Parent[m.ToHost] | ServiceLine
    ) -> None:
        """Load the base; `start` has the rewards and bounds of the service."""
        self._config, self._parent, self._start, self.directory = config, parent, start, directory
        self._opened, self._send = contextlib.ExitStack(), Outbox(parent)
        self._scores = AskedOfService(self._send)
        self._episodes = EpisodesElsewhere(self._send, lambda job: self.pipeline.jobs[job].tenant)
        rewards = None if start.own_jobs else _rewards(start, config.engine, self._scores, self._rest, self._charge)
        agents = None if start.own_jobs else lambda job, config: AgentsElsewhere(job, config, self._episodes)
        largest, alone = (start.largest, USUAL), start.host is None
        turns, idle, step = SlotTurns(f"{'' if alone else start.host}"), start.patience_seconds, start.step_seconds
        stays = functools.partial(Pipeline, stays=True, max_idle=idle, step_seconds=step, turns=turns)
        opened = opened_host(
            config, directory, start.own, largest, alone=alone, rewards=rewards, agents=agents, pipeline=stays
        )
        self.host = host = self._opened.enter_context(opened)
        self.base, self.workshop, self._shared, self.pipeline = host.base, host.workshop, host.services, host.pipeline
        room = min(filter(None, (self.base.info.max_positions, self.workshop.kv_tokens)))
        self._answers = Answers(self.base, self._shared, room, self._send)
        self._tasks: set[asyncio.Task[None]] = set()
        meter, names = Meter(self.workshop.device.busy), (self._shared.engine_suffix, start.serves)
        self._usage = UsageReports(meter, self._shared.scheduler.read, self._send, *names)
        self._servers = _Servers(self.workshop, away_seconds(config.rollout))
        self._changes: dict[str, m.ChangeJob] = {}  # of jobs that are being prepared: another budget or priority
        self._leaving: set[str] = set()  # jobs that are to save and go to another host
        self._read = WeakValueDictionary[str, ReadData]()  # of the jobs that are here: those of a sweep share it
        self._preparing = ThreadTurns(_PREPARING, sys.maxsize, "motet-preparing")
        self._held, self._events = dict[str, m.Held](), itertools.count()  # jobs in the pipeline or being prepared
        self._resting = set[str]()  # jobs that stop waiting as soon as no scorer is connected

    def _charge(self, job: str, seconds: float) -> None:
        self._usage.add_cpu(job, seconds)

    def _rest(self, job: str, wanted: bool) -> None:
        (self._resting.add if wanted else self._resting.discard)(job)
        if self._scores.asked or self._episodes.offered:
            self._send(m.Rest(job, wanted))

    async def serve(self, pulse: Pulse) -> None:
        """Handle messages until the input ends; `pulse` says meanwhile that this process answers."""
        messages, turning = self._parent.queue(), asyncio.create_task(pulse.turn())
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "motet-files"))
        async with self.host.open():
            running, watching = asyncio.create_task(self.pipeline.run()), asyncio.create_task(self._watch())
            for task in (running, watching):  # without them this process is of no use: a new one takes over
                task.add_done_callback(lambda task: messages.put_nowait(None) if _fault(task) else None)
            info, threads = self.base.info, self._config.engine.threads
            cores = f", {threads or budgets.cores()} threads" if info.device == "cpu" else ""
            try:
                compared = self._start.host is not None and self.workshop.servers is None
                speed = await _tokens_per_second(self.workshop.engine, info.vocab_size) if compared else 0.0
                self._ready = self._answers.ready(self.workshop.notes, speed, f"{info.processor}{cores}")
                self._attach()
                sampler = "" if self._start.own_jobs else self._config.rollout.engine
                self._measuring = self._begin(measure_steps(self._shared, info, sampler))
                while (message := await messages.get()) is not None:
                    if isinstance(message, m.Stop):
                        self.pipeline.stop()
                        self._begin(self._stopped(running))  # messages continue: a step may wait for scores
                    else:
                        self.handle(message)
            finally:  # also when a rank has died, and before servers are closed that jobs still ask
                for task in (turning, running, watching, *self._tasks):
                    task.cancel()
                faults = [fault for task in (running, watching) if (fault := _fault(task)) is not None]
                await asyncio.gather(running, watching, *self._tasks, return_exceptions=True)
        if faults:
            raise faults[0]

    def close(self) -> None:
        """Release the resources of `serve`."""
        self._preparing.close()
        self._opened.close()
        self._send.close()

    async def _stopped(self, running: asyncio.Task[None]) -> None:
        """Say when every job has saved."""
        await asyncio.wait([running])
        self._usage.send_due(0.0, 0.0)
        self._send(m.Stopped())

    def _attach(self) -> None:
        """Serve a connected service: report the jobs here, and repeat unanswered requests."""
        self._send.resume()
        for name in self._held.keys() & self.pipeline.jobs.keys():
            self._held[name] = structs.replace(self._held[name], state=self.pipeline.jobs[name].state)
        held = [job for job in self._held.values() if not job.state.final]
        self._send(structs.replace(self._ready, jobs=held))
        self._send(*self._scores.pending, *self._episodes.pending)

    def handle(self, message: m.ToHost | Gone) -> None:
        """Start handling one message."""
        match message:
            case Gone():
                self._answers.abandon_all()
                self._episodes.hang_up()
            case m.StartHost():
                self._attach()
            case m.AddJob():
                name = str(message.job["name"])
                if name not in self._held:  # it comes twice while this starts
                    self._held[name] = m.Held(name, message.tenant, message.slots, JobState.QUEUED, message.wanted)
                    self._begin(self._add(name, message))
                    self.pipeline.rule(message.tenant, message.rule)
            case m.SteerJob():
                self._steer(message.job, message.wanted)
            case m.SetRule():
                self.pipeline.rule(message.tenant, message.rule)
            case m.ChangeJob():
                self._change(message)
            case m.Nudge():
                if (job := self.pipeline.jobs.get(message.job)) is not None:
                    job.news.set()
            case m.ReleaseJob() if message.job in self._held:  # else it was released already
                self._leaving.add(message.job)
                self._release()
            case m.ForgetJob():
                self._forget(message.job)
            case m.Complete():
                self._answers.hold(message.key, self._begin(self._answers.answer(message)))
            case m.ExamineAdapter():
                self._answers.hold(message.key, self._begin(self._answers.examine(message)))
            case m.Abandon():
                self._begin(self._answers.abandon(message.key))
            case m.ScoresAnswered():
                self._scores.hear(message)
            case e.BeginEpisode() | e.EpisodeEnded():
                self._episodes.hear(message)
            case e.AskEpisode():
                self._begin(_answer_agent(self._episodes, message, self._send))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _add(self, name: str, message: m.AddJob) -> None:
        try:
            await asyncio.shield(self._measuring)  # chats are answered meanwhile
            cancelled, free = lambda: name not in self._held, message.resumes
            async with self._shared.starts.turn("prepare", message.tenant, cancelled, free=free) as seconds:
                if seconds is None:
                    return
                held = bytes_of_rows(self.pipeline.jobs.values()).get(message.tenant, 0)
                room = self._shared.room.of(message.tenant) - held
                try:
                    work = functools.partial(self._prepared, message, room, seconds.append)
                    job = await self._preparing.run(f"{message.tenant} {free}", work)
                finally:
                    self._usage.add_cpu(name, sum(seconds))
        except Exception as error:  # the boundary of a tenant: a job that cannot be prepared is that job's business
            if name in self._held:
                self._forget(name)
                self._tell(JobChanged(name, JobState.FAILED, reason(error)))
            return
        if (given := self._held.get(name)) is not None:
            job.tenant, job.resumes = message.tenant, message.resumes
            self.pipeline.add(job)
            if (change := self._changes.pop(name, None)) is not None:
                self._change(change)
            self.pipeline.steer(name, Wanted.PAUSE if name in self._leaving else given.wanted)

    def _prepared(self, message: m.AddJob, room: float, charge: Callable[[float], None]) -> Job:
        """A job that has done a step keeps what it began with, whatever it takes. Runs in a thread."""
        start, config = self._start, JobConfig.model_validate(message.job)
        installed = {name: str(reward["target"]) for name, reward in start.rewards.items()}
        given = Given(config, self.directory.job(config.name), None if start.own_jobs else installed)
        endless = start.own_jobs or given.newest is not None
        with (Pace(seconds=math.inf) if endless else Pace(room)).kept(charge):
            sources = Sources(None if start.own_jobs else OF_A_JOB)
            most = self._shared.steps.of(message.tenant)
            accepts = {"accept_changes": start.accept_changes, "accept_damage": start.own_jobs and start.accept_changes}
            job = self.host.add(given, sources, self._read, most, **accepts)
            committed = job.directory.newest()
            job.progress.step, job.notes = (0, first_notes(job)) if committed is None else (committed.step, ())
        job.observer = EveryStep(job.directory, message.first_step, self._tell)
        return job

    def _tell(self, event: JobEvent) -> None:
        """Send an event of a job; one that saves because it leaves goes on elsewhere."""
        if isinstance(event, JobChanged):
            if event.state is JobState.PAUSED and event.job in self._leaving:
                return
            event = structs.replace(event, key=f"{self._shared.engine_suffix}.{next(self._events)}")
        self._send(event)

    def _forget(self, name: str) -> None:
        """Forget a job without a slot, also one that is being prepared."""
        self.pipeline.forget(name)
        if name not in self.pipeline.jobs:
            self._held.pop(name, None)
            self._changes.pop(name, None)

    def _release(self) -> None:
        """Release jobs that must leave and have saved."""
        for name in list(self._leaving):
            job = self.pipeline.jobs.get(name)
            if job is not None and job.state is JobState.PAUSED:
                self._forget(name)
            elif job is not None and not job.state.final:
                self.pipeline.pause(name)  # again: a fault of the device has put it back into the queue
            if name not in self._held:
                self._leaving.discard(name)
                self._send(m.Released(name))

    def _change(self, change: m.ChangeJob) -> None:
        if change.job in self.pipeline.jobs:
            self.pipeline.change(change.job, budget=change.budget, priority=change.priority)
        elif change.job in self._held:
            self._changes[change.job] = change

    def _steer(self, name: str, wanted: Wanted) -> None:
        if name not in self._held:
            return
        self._held[name] = structs.replace(self._held[name], wanted=wanted)
        if name in self.pipeline.jobs:
            self.pipeline.steer(name, wanted)
        elif wanted is Wanted.CANCEL:  # at once: to prepare it may take long
            self._forget(name)
            self._tell(JobChanged(name, JobState.CANCELLED, "cancelled before it began"))

    async def _watch(self) -> None:
        """Send the progress of jobs periodically, and forget ended ones."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for job in [job for job in self.pipeline.jobs.values() if job.state.final]:
                self._forget(job.name)
            self._release()
            away = self._servers.check() if self._start.host is not None else ""  # of several: others go on
            running = [job for job in self.pipeline.jobs.values() if job.state is JobState.RUNNING]
            busy = self.workshop.device.busy
            device = {"decode": busy.decode, "train": busy.train, "turns": busy.turns}
            self._usage.send_due(_USAGE_SECONDS, _IDLE_SECONDS)
            jobs = {job.name: job.progress.standing for job in running}
            self._resting &= {job.name for job in running}
            for name in self._resting:  # again: another service does not know it
                self._rest(name, True)
            rows, usual = bytes_of_rows(self.pipeline.jobs.values()), self._shared.steps.usual
            self._send(m.Progress(jobs, device, away, rows, usual))


async def _answer_agent(episodes: EpisodesElsewhere, question: e.AskEpisode, send: Send) -> None:
    try:
        send(await episodes.answer(question))
        send(m.Answered(question.key))
    except Exception as error:  # reported to the requester
        send(m.QuestionRefused(question.key, reason(error)))


def _rewards(
    start: m.StartHost,
    engine: EngineConfig,
    scores: AskedOfService,
    rest: Callable[[str, bool], None],
    charge: Callable[[str, float], None],
) -> RewardPool:
    """Rewards of other people's jobs."""
    installed = {name: Installed(**one) for name, one in start.rewards.items()}
    walls, elsewhere = Walls(required=True, exempt=frozenset(start.unwalled)), dict.fromkeys(ELSEWHERE, scores)
    return RewardPool(engine.reward_processes, elsewhere, installed, rest, walls, charge)


async def _tokens_per_second(engine: RolloutEngine, vocabulary: int) -> float:
    """Prompt tokens per second, the best of three measurements, to compare hosts."""
    ids = np.arange(_SPEED_TOKENS, dtype=np.int32) % vocabulary
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        await engine.score(ids, None)
        seconds.append(time.perf_counter() - begun)
    return _SPEED_TOKENS / min(seconds)


class _Servers:
    """Tracks whether any of a host's servers is available."""

    def __init__(self, workshop: Workshop, seconds: float) -> None:
        self._workshop, self._seconds, self._seen = workshop, seconds, time.monotonic()

    def check(self) -> str:
        """Why no server can be used; empty if one can. Raises EngineError if none has answered within the limit."""
        loads = self._workshop.loads()
        if not loads or any(load.up for load in loads):
            self._seen = time.monotonic()
            return ""
        said = "; ".join(f"{load.url}: {load.note}" for load in loads)
        if time.monotonic() - self._seen > self._seconds:
            raise EngineError(f"no server of this host answers; its jobs continue on another host ({said})")
        return f"no server answers ({said})"


def away_seconds(rollout: RolloutConfig) -> float:
    """Time limit without any server, for one host of several; long enough to restart servers that it starts itself."""
    longest = rollout.patience_seconds
    return min(_AWAY_SECONDS, longest / 2) if rollout.launch is None else _OF_PATIENCE * longest


def _fault(task: asyncio.Task[None]) -> BaseException | None:
    """The error of a task that should not end."""
    return task.exception() if task.done() and not task.cancelled() else None
