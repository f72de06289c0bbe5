"""The engine of a service, in a process of its own: it trains and answers while the other process talks to people.

Messages are lines of JSON, in on the standard input and out on the standard output. It ends when its input does; jobs then
stay as they were last committed, and the next process takes them up.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from motet import seeds
from motet.budgets import Need
from motet.config import DataConfig, JobConfig, RunConfig
from motet.errors import MotetError, RunError
from motet.jobfile import validate
from motet.launch import Workshop, assemble, identity, load, prepare, services
from motet.rollout import wire
from motet.runtime.job import Job
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.tasks.chat import Chat, stop_token_ids
from motet.tasks.plain_json import as_json
from motet.types import AdapterRef, GenerateRequest, JobState, Message, Problem, SamplingParams

SHELF = 8
"""Stored versions that stay loaded for people to talk to."""
USUAL = Need(512, 512)
"""What the KV cache is sized for: jobs come later, and nobody knows their lengths yet."""
_LOOK_SECONDS = 0.5
_LOCK_SECONDS = 60.0


class Host:
    """One base, the jobs that train on it, and the versions that people talk to."""

    def __init__(self, config: RunConfig, out: BinaryIO) -> None:
        self._config, self._out = config, out
        self._lock = threading.Lock()
        self.directory = _run_directory(Path(config.run))
        self.base = load(config.base, config.engine)
        self.workshop: Workshop = assemble(self.base, config, [USUAL], self.directory)
        self._shared = services(self.workshop, self.directory)
        self.pipeline = Pipeline([], self._shared, config.engine.slots, stays=True)
        self._chat = Chat.of(
            self.base.tokenizer, DataConfig(source="chat", chat_template=bool(self.base.tokenizer.chat_template))
        )
        self._stops = stop_token_ids(self.base.tokenizer, getattr(self.base.model, "generation_config", None))
        self._shelf: OrderedDict[str, AdapterRef] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._wanted: dict[str, str] = {}  # of jobs that are being prepared: what was asked for last
        self._preparing = asyncio.Lock()  # one after another, so that jobs queue in the order they came
        self._numbers = 0

    def say(self, **message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._out.write(json.dumps(as_json(message), separators=(",", ":"), allow_nan=False).encode() + b"\n")
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
            self.say(ready={"base": self.base.name, "parameters": self.base.n_parameters, "notes": self.workshop.notes})
            while (message := await messages.get()) is not None:
                if message["do"] == "stop":
                    self.pipeline.stop()
                    await running
                    self.say(stopped=True)
                else:
                    self.handle(message)
            for task in (running, watching, *self._tasks):
                task.cancel()
            await asyncio.gather(running, watching, *self._tasks, return_exceptions=True)
            await self._shared.rewards.close()

    def handle(self, message: Mapping[str, Any]) -> None:
        """Begin what one message asks."""
        match message["do"]:
            case "add":
                name = str(message["job"]["name"])
                if name not in self.pipeline.jobs and name not in self._wanted:  # it comes twice while this starts
                    self._wanted[name] = message["wanted"]
                    self._begin(self._add(name, message["job"]))
            case "pause" | "resume" | "cancel":
                self._steer(message["job"], message["do"])
            case "forget":
                self.pipeline.forget(message["job"])
            case "answer":
                self._answers[message["key"]] = self._begin(self._answer(message))
            case "abandon":
                if task := self._answers.pop(message["key"], None):
                    task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- jobs -------------------------------------------------------------------------------------------------------------

    async def _add(self, name: str, tree: Mapping[str, Any]) -> None:
        try:
            async with self._preparing:
                job = await asyncio.to_thread(self._prepared, tree)
        except Exception as error:  # the boundary of a tenant: a job that cannot be prepared is that job's business
            self._wanted.pop(name)
            self.say(job=name, event="state", data={"state": JobState.FAILED.value, "message": _reason(error)})
        else:
            self.pipeline.add(job)
            self._steer(name, self._wanted.pop(name))

    def _prepared(self, tree: Mapping[str, Any]) -> Job:
        job, _ = prepare(JobConfig.model_validate(tree), self.base, self.directory)
        job.directory.open(identity(job, self.base, self._config), accept_changes=True)
        for reason in self.workshop.inexact:
            job.note_inexact(reason)
        job.tell = lambda kind, data: self.say(job=job.name, event=kind, data=data)
        if (committed := job.directory.newest()) is not None:
            job.progress.step = committed.step
            for record in job.directory.read_metrics(committed):  # one may have got lost with the last process
                job.tell("step", record)
        return job

    def _steer(self, name: str, word: str) -> None:
        if name in self._wanted:
            self._wanted[name] = word
        elif name in self.pipeline.jobs and word in ("pause", "resume", "cancel"):
            getattr(self.pipeline, word)(name)

    async def _watch(self) -> None:
        """Tell now and then how jobs stand, and let go of those that have ended."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for job in [job for job in self.pipeline.jobs.values() if job.state.final]:
                self.pipeline.forget(job.name)
            running = [job for job in self.pipeline.jobs.values() if job.state is JobState.RUNNING]
            busy = self.workshop.device.busy
            self.say(
                progress={job.name: _progress(job.progress) for job in running},
                device={"decode": busy.decode, "train": busy.train, "started": busy.started},
            )

    # --- answers ----------------------------------------------------------------------------------------------------------

    async def _answer(self, message: Mapping[str, Any]) -> None:
        """Complete a prompt or a conversation, from the base or from a stored version."""
        key = message["key"]
        try:
            prompt_ids = self._chat.prompt_ids(_problem(message))
            ref = None if message["adapter"] is None else await self._shelved(Path(message["adapter"]))
            given = message["sampling"]
            sampling = SamplingParams(**{**given, "stop": tuple(given.get("stop", ())), "stop_token_ids": self._stops})
            self._numbers += 1
            keys = tuple(seeds.key(message["seed"], "chat", index) for index in range(message["n"]))
            request = GenerateRequest(
                f"answer/{self._numbers}", "answers", prompt_ids, ref, sampling, keys, stream=message["stream"]
            )
            self.say(key=key, prompt_tokens=len(prompt_ids))
            async for chunk in self.workshop.engine.generate(request):
                texts = (
                    [self._chat.completion_text([token]) for token in chunk.token_ids.tolist()]
                    if message["logprobs"]
                    else []
                )
                self.say(key=key, chunk=wire.chunk_out(chunk), texts=texts)
            self.say(key=key, done=True)
        except Exception as error:  # whoever asked has to hear of it
            self.say(key=key, refused=_reason(error))
        finally:
            self._answers.pop(key, None)

    async def _shelved(self, directory: Path) -> AdapterRef:
        """Load a stored version, or find it loaded; the one that was asked for longest ago goes."""
        name = str(directory)
        if name not in self._shelf:
            self._numbers += 1
            ref = AdapterRef(f"shelf.{self._shared.engine_suffix}", self._numbers)
            await self.workshop.engine.load_adapter(ref, directory)
            self._shelf[name] = ref
            if len(self._shelf) > SHELF:
                _, gone = self._shelf.popitem(last=False)
                await self.workshop.engine.unload_adapter(gone)
        self._shelf.move_to_end(name)
        return self._shelf[name]


def _run_directory(path: Path) -> RunDirectory:
    """Locked; the engine of a service that was killed may still be in its last turn."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return RunDirectory(path)
        except RunError:
            if not os.access(path, os.W_OK) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _reason(error: Exception) -> str:
    if isinstance(error, MotetError | OSError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}; this is a fault of Motet, please report it"


def _problem(message: Mapping[str, Any]) -> Problem:
    messages = tuple(Message(str(one["role"]), str(one["content"])) for one in message["messages"])
    return Problem(0, messages, "")


def _progress(progress: JobProgress) -> dict[str, Any]:
    return {
        "phase": progress.phase,
        "step": progress.step,
        "rollouts_done": progress.rollouts_done,
        "rollouts_wanted": progress.rollouts_wanted,
        "tokens_per_second": round(progress.tokens_per_second, 1),
        "seconds_left": progress.seconds_left,
    }


def main() -> None:
    """Entry point of the process."""
    lines, out = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that a library prints may pass for a message
    hello = json.loads(lines.readline())
    try:
        config = validate({**hello, "jobs": [{"name": "none", "data": "toy:add", "reward": "exact"}]}, "motet serve")
        host = Host(config, out)
        asyncio.run(host.serve(lines))
        host.workshop.close()
    except MotetError as error:
        sys.stderr.write(f"{error}\n")
        out.write(json.dumps({"failed": str(error)}).encode() + b"\n")
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
