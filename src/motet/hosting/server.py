"""The engine of a service: the jobs that train on its base, and what it sends of them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from motet.budgets import Need
from motet.config import JobConfig, RunConfig
from motet.config.service import ANY_SIZE, Largest
from motet.errors import EngineError
from motet.hosting.answers import Answers, reason
from motet.launch import Workshop, assemble, load, services
from motet.preparing import identity, prepare
from motet.rollout import wire
from motet.runtime.job import Job
from motet.runtime.meter import Meter
from motet.runtime.opening import open_job
from motet.runtime.patience import USUAL_WAIT
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import Rule
from motet.tasks.plain_json import as_json
from motet.tasks.reward_asking import AskedOfService
from motet.tasks.reward_elsewhere import ELSEWHERE
from motet.tasks.reward_installed import Installed
from motet.tasks.reward_pool import RewardPool
from motet.tasks.reward_walls import Walls
from motet.tasks.row_files import OF_A_JOB
from motet.types import JobState

USUAL = Need(512, 512)
"""What the KV cache is sized for: jobs come later, and nobody knows their lengths yet."""
_LOOK_SECONDS = 0.5
_USAGE_SECONDS = 2.0
"""Between two messages about who used the device."""
_IDLE_SECONDS = 30.0
"""Between two that nobody used it."""


class EngineServer:
    """One base, the jobs that train on it, and the versions that people talk to."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        out: BinaryIO,
        installed: Mapping[str, Mapping[str, Any]] | None = None,
        unwalled: Collection[str] = (),
        patience: float = USUAL_WAIT,
        largest: Largest | None = None,
    ) -> None:
        """Load the base.

        Args:
            config: of base, engine and rollout.
            directory: of the run.
            out: where messages go.
            installed: the operator's rewards, fields of `Installed` by name.
            unwalled: rewards of ours that may run without a wall.
            patience: seconds that a job keeps a slot which another could use, while it waits for scores.
            largest: what servers have to have room for.
        """
        self._config, self._out = config, out
        self._lock = threading.Lock()
        self.directory = directory
        self.base = load(config.base, config.engine)
        self.workshop: Workshop = assemble(self.base, config, [USUAL], self.directory, largest or ANY_SIZE)
        self._scores = AskedOfService(self.send)
        self._shared = services(
            self.workshop,
            self.directory,
            RewardPool(
                config.engine.reward_processes,
                dict.fromkeys(ELSEWHERE, self._scores),
                {name: Installed(**one) for name, one in (installed or {}).items()},
                self._scores.rest,
                Walls(required=True, exempt=frozenset(unwalled)),
            ),
        )
        self.pipeline = Pipeline([], self._shared, config.engine.slots, stays=True, patience=patience)
        self._answers = Answers(self.base, self._shared, self.send)
        self._tasks: set[asyncio.Task[None]] = set()
        self._meter, self._used = Meter(self.workshop.device.busy), Counter[str]()
        self._measured, self._windows = time.monotonic(), 0
        self._changes: dict[str, dict[str, int | None]] = {}
        """Of jobs that are being prepared: another budget or priority."""
        self._wanted: dict[str, str] = {}  # of jobs that are being prepared: what was asked for last
        self._preparing = asyncio.Lock()  # one after another, so that jobs queue in the order they came

    def send(self, **message: Any) -> None:
        """Send one message.

        Raises:
            EngineError: it is too long for whoever reads it; nothing was sent.
        """
        line = line_of(message)
        with self._lock:
            self._out.write(line)
            self._out.flush()

    async def serve(self, lines: BinaryIO) -> None:
        """Handle messages until the input ends."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()

        def read() -> None:
            for line in lines:
                loop.call_soon_threadsafe(messages.put_nowait, json.loads(line))
            loop.call_soon_threadsafe(messages.put_nowait, None)

        threading.Thread(target=read, name="motet-messages", daemon=True).start()
        async with self.workshop.open():
            running, watching = asyncio.create_task(self.pipeline.run()), asyncio.create_task(self._watch())
            for task in (running, watching):  # without them this process is of no use: a new one takes over
                task.add_done_callback(lambda task: messages.put_nowait(None) if _fault(task) else None)
            self.send(ready={"notes": self.workshop.notes})
            while (message := await messages.get()) is not None:
                if message["do"] == "stop":
                    self.pipeline.stop()
                    self._begin(self._stopped(running))  # messages go on: a step may wait for scores
                else:
                    self.handle(message)
            for task in (running, watching, *self._tasks):
                task.cancel()
            faults = [fault for task in (running, watching) if (fault := _fault(task)) is not None]
            await asyncio.gather(running, watching, *self._tasks, return_exceptions=True)
            await self._shared.rewards.close()
        if faults:
            raise faults[0]

    async def _stopped(self, running: asyncio.Task[None]) -> None:
        """Say when every job has saved."""
        await asyncio.wait([running])
        self._measure(0.0)
        self.send(stopped=True)

    def handle(self, message: Mapping[str, Any]) -> None:
        """Begin what one message asks."""
        match message["do"]:
            case "add":
                name = str(message["job"]["name"])
                if name not in self.pipeline.jobs and name not in self._wanted:  # it comes twice while this starts
                    self._wanted[name] = message["wanted"]
                    self._begin(self._add(name, message["job"], str(message["tenant"]), int(message["first_step"])))
                    self._rule(message)
            case "pause" | "resume" | "cancel":
                self._steer(message["job"], message["do"])
            case "rule":
                self._rule(message)
            case "change":
                self._change(message["job"], message["fields"])
            case "forget":
                self.pipeline.forget(message["job"])
            case "answer":
                self._answers.hold(message["key"], self._begin(self._answers.answer(message)))
            case "scored":
                self._scores.hear(message)
            case "examine":
                self._begin(self._answers.examine(message["key"], Path(message["directory"])))
            case "abandon":
                self._answers.abandon(message["key"])

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- jobs -------------------------------------------------------------------------------------------------------------

    async def _add(self, name: str, tree: Mapping[str, Any], tenant: str, first_step: int) -> None:
        try:
            async with self._preparing:
                job = await asyncio.to_thread(self._prepared, tree, first_step)
        except Exception as error:  # the boundary of a tenant: a job that cannot be prepared is that job's business
            self._wanted.pop(name)
            self._changes.pop(name, None)
            self.send(job=name, event="state", data={"state": JobState.FAILED.value, "message": reason(error)})
        else:
            job.tenant = tenant
            self.pipeline.add(job)
            self._change(name, self._changes.pop(name, {}))
            self._steer(name, self._wanted.pop(name))

    def _prepared(self, tree: Mapping[str, Any], first_step: int) -> Job:
        job, _ = prepare(JobConfig.model_validate(tree), self.base, self.directory, OF_A_JOB)
        open_job(job.directory, identity(job, self.base, self._config), accept_changes=True)
        for why in self.workshop.inexact:
            job.note_inexact(why)
        job.tell = lambda kind, data: self.send(job=job.name, event=kind, data=data)
        if (committed := job.directory.newest()) is not None:
            job.progress.step = committed.step
            tokens = job.directory.read_tokens(committed)
            for record in job.directory.read_metrics(committed):  # one may have got lost with the last process
                if int(record["step"]) >= first_step:
                    job.tell("step", {**record, **tokens.get(int(record["step"]), {})})
        return job

    def _rule(self, message: Mapping[str, Any]) -> None:
        self.pipeline.rule(message["tenant"], Rule(**message["rule"]))

    def _change(self, name: str, fields: Mapping[str, int | None]) -> None:
        if name in self.pipeline.jobs:
            self.pipeline.change(name, **fields)
        elif name in self._wanted:
            self._changes[name] = dict(fields)

    def _steer(self, name: str, action: str) -> None:
        if name in self._wanted:
            self._wanted[name] = action
        elif name in self.pipeline.jobs and action in ("pause", "resume", "cancel"):
            getattr(self.pipeline, action)(name)

    async def _watch(self) -> None:
        """Send how jobs stand now and then, and forget those that have ended."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for job in [job for job in self.pipeline.jobs.values() if job.state.final]:
                self.pipeline.forget(job.name)
            running = [job for job in self.pipeline.jobs.values() if job.state is JobState.RUNNING]
            busy = self.workshop.device.busy
            self._measure(_USAGE_SECONDS if any(self._used) else _IDLE_SECONDS)
            self.send(
                progress={job.name: _progress(job.progress) for job in running},
                device={"decode": busy.decode, "train": busy.train},
            )

    def _measure(self, every: float) -> None:
        """Read the meter, and send what was used where the last time is so long ago, in seconds."""
        self._used.update(self._meter.window())
        if time.monotonic() - self._measured < every or not self._used:
            return
        self._measured = time.monotonic()
        self._windows += 1
        used = {"engine": self._shared.engine_suffix, "window": self._windows, "microseconds": dict(self._used)}
        self._used.clear()
        self.send(job="", event="usage", data=used)


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent.

    Raises:
        EngineError: it is too long.
    """
    line = json.dumps(as_json(message), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(line) > wire.LONGEST_LINE:
        raise EngineError(f"{-(-len(line) // 2**20)} MB, where {wire.LONGEST_LINE >> 20} MB are the most")
    return line


def _fault(task: asyncio.Task[None]) -> BaseException | None:
    """What ended a task that was not to end."""
    return task.exception() if task.done() and not task.cancelled() else None


def _progress(progress: JobProgress) -> dict[str, Any]:
    return {
        "phase": progress.phase,
        "step": progress.step,
        "rollouts_done": progress.rollouts_done,
        "rollouts_wanted": progress.rollouts_wanted,
        "tokens_per_second": round(progress.tokens_per_second, 1),
        "seconds_left": progress.seconds_left,
    }
