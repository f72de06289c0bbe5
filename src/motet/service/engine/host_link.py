"""The HTTP process's end of the engine's process: start it, hand it jobs and questions, hear what becomes of them.

When the process dies it is started again, and the jobs that have not ended are handed to it in the order they came. One that
dies right after its start is started again after a while, which grows, for as long as the service runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from motet.errors import ConfigError, EngineError
from motet.rollout import wire
from motet.types import Chunk

_log = logging.getLogger(__name__)

Hear = Callable[[str, str, Mapping[str, Any]], None]
"""(job, event, data): what happened to a job."""
Score = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""A `score` message of the engine → the fields of its answer."""
_QUICK_SECONDS = 10.0
_LONGEST_WAIT = 60.0
_STOP_SECONDS = 120.0


class HostLink:
    """The engine's process."""

    def __init__(
        self,
        hello: Mapping[str, Any],
        hear: Hear,
        jobs: Callable[[], list[dict[str, Any]]],
        log: Path,
        score: Score,
        rest: Callable[[str, bool], None],
    ) -> None:
        """Nothing is started yet.

        Args:
            hello: base, engine and run directory.
            hear: told what happens to jobs.
            jobs: the `add` messages of all jobs that have not ended, for a process that starts.
            log: where the process writes what it prints.
            score: asked when rollouts are to be scored that no process of their job scores.
            rest: told whether a job is to rest as soon as nobody is there who scores for it.
        """
        self._hello, self._hear, self._jobs, self._log = dict(hello), hear, jobs, log
        self._process: asyncio.subprocess.Process | None = None
        self._begun: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._score, self._rest = score, rest
        self._scoring: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._keys = itertools.count()
        self._stopped = asyncio.Event()
        self._closing = asyncio.Event()
        # of its own: what others wait for in threads, a slow disk or a slow name, does not keep the engine waiting
        self._telling = ThreadPoolExecutor(1, "motet-events")
        self._ready_since = math.inf
        self.ready = asyncio.Event()
        self.failure = ""
        """Why there is no engine, for a person."""
        self.progress: dict[str, dict[str, Any]] = {}
        self.device: dict[str, float] = {}
        self.starts = 0
        self.counted: Callable[[str, int, int], None] | None = None
        """Told of tokens that were read and sampled for a tenant's completions."""

    @property
    def closing(self) -> bool:
        """Whether the engine is being stopped for good."""
        return self._closing.is_set()

    def take(self, process: asyncio.subprocess.Process) -> None:
        """Have a process that was started already (`start_engine`) as the first; before `start`."""
        self._begun = process

    def start(self) -> None:
        """Start the process and keep it running."""
        self._keeping = asyncio.create_task(self._keep())

    def send(self, **message: Any) -> None:
        """Send one message; a process that is not there hears of it when it starts, from `jobs`."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(wire.line(**message))

    def answer(self, **question: Any) -> AsyncIterator[dict[str, Any]]:
        """Messages of one completion, until it is done; raises as `ask` does."""
        return self.ask("answer", **question)

    async def ask(self, do: str, **question: Any) -> AsyncIterator[dict[str, Any]]:
        """Messages that answer a question, until it is done.

        Raises:
            EngineError: it cannot be answered now, and why.
            ConfigError: it can never be answered, and why.
        """
        if not self.ready.is_set():
            raise EngineError(self.failure or "the engine is starting; try again in a moment")
        key, messages = next(self._keys), asyncio.Queue[dict[str, Any]]()
        self._open[key] = messages
        self.send(do=do, key=key, **question)
        done = False
        try:
            while not done:
                message = await messages.get()
                if "refused" in message:
                    done = True
                    raise (ConfigError if message.get("theirs") else EngineError)(message["refused"])
                done = "done" in message
                if not done:
                    self._count(question.get("tenant"), message)
                    yield message
        finally:
            del self._open[key]
            if not done:
                self.send(do="abandon", key=key)

    def _count(self, tenant: str | None, message: Mapping[str, Any]) -> None:
        if self.counted is not None and tenant is not None:
            sampled = len(message["chunk"]["token_ids"]) if "chunk" in message else 0
            self.counted(tenant, int(message.get("prompt_tokens", 0)), sampled)

    def refuse(self, reason: str) -> None:
        """Give up the questions that are open."""
        for messages in self._open.values():
            messages.put_nowait({"refused": reason})

    async def stop(self) -> None:
        """Let every job finish its step and save, then end the process."""
        self._closing.set()
        if self.ready.is_set():
            self.send(do="stop")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._stopped.wait()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._keeping is not None:
            await self._keeping
        self._telling.shutdown(wait=False)

    # --- the process --------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        quick = 0
        while not self._closing.is_set():
            self._ready_since = math.inf
            try:
                await self._run_once()
            except Exception:  # the database was away when it started, or it spoke nonsense
                _log.exception("the engine could not be kept")
            finally:
                await self._bury()
            quick = 0 if time.monotonic() - self._ready_since > _QUICK_SECONDS else quick + 1
            if not self._closing.is_set():
                await self._wait(quick)

    async def _wait(self, quick: int) -> None:
        """Before it is started again: not at all the first time, then longer and longer."""
        seconds = 0.0 if quick <= 1 else min(2.0 ** (quick - 2), _LONGEST_WAIT)
        if quick > 1 and not self.failure:
            self.failure = f"the engine ended {quick} times right after it was started; {self._log.name} says why"
        _log.warning("%s; it is started again in %g s", self.failure or "the engine ended", seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _run_once(self) -> None:
        self.starts += 1
        self._stopped.clear()
        self._process, self._begun = self._begun or await start_engine(self._log), None
        self.send(**self._hello)
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # not one that was cut off when the process was killed
                await self._handle(json.loads(line))

    async def _bury(self) -> None:
        """Nothing of a process is left, and whoever waits for its answers hears of it."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            if self._process.returncode is None:  # it was given up
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
        self.ready.clear()
        self._stopped.set()
        self.progress = {}
        for task in list(self._scoring.values()):  # the next process asks again
            task.cancel()
        self.refuse("the engine ended while it answered; try again in a moment")

    async def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            for note in message["ready"]["notes"]:  # such as why results depend on more than the seed
                _log.warning("%s", note)
            for job in await asyncio.get_running_loop().run_in_executor(self._telling, self._jobs):
                self.send(do="add", **job)
            self.failure, self._ready_since = "", time.monotonic()
            self.ready.set()
        elif "failed" in message:
            self.failure = message["failed"]
        elif "stopped" in message:
            self._stopped.set()
        elif "progress" in message:
            self.progress, self.device = message["progress"], message["device"]
        elif "score" in message:
            key = message["score"]
            task = self._scoring[key] = asyncio.create_task(self._answer_score(message))
            task.add_done_callback(lambda task: self._scored(key, task))
        elif "rest" in message:
            self._rest(message["rest"], message["wanted"])
        elif "unscore" in message:
            if (gone := self._scoring.get(message["unscore"])) is not None:
                gone.cancel()
        elif "event" in message:
            await asyncio.get_running_loop().run_in_executor(self._telling, self._tell, message)
        elif (messages := self._open.get(message.get("key", -1))) is not None:
            messages.put_nowait(message)

    async def _answer_score(self, message: Mapping[str, Any]) -> None:
        self.send(do="scored", key=message["score"], **await self._score(message))

    def _scored(self, key: int, task: asyncio.Task[None]) -> None:
        if self._scoring.get(key) is task:
            del self._scoring[key]

    def _tell(self, message: dict[str, Any]) -> None:
        if self._closing.is_set() and message["event"] == "state" and message["data"]["state"] in ("paused", "queued"):
            return  # it goes on with the next start
        try:
            self._hear(message["job"], message["event"], message["data"])
        except Exception:  # whatever it is, this process has to go on listening
            _log.exception("an event of job %s was not kept", message["job"])


async def start_engine(log: Path) -> asyncio.subprocess.Process:
    """Start the engine's process, which loads what it needs and waits for its first message; what it prints goes to a file."""
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "motet.hosting",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=out,
            start_new_session=True, limit=wire.LONGEST_LINE, env=dict(os.environ),
        )  # fmt: skip


def chunk_of(message: Mapping[str, Any]) -> Chunk | None:
    """Tokens of an answer's message, where it has any."""
    return wire.chunk_in(message["chunk"]) if "chunk" in message else None
