"""The service's client of its engine process: start it, send it jobs and questions, receive what becomes of them.

When the process dies it is started again, and the jobs that have not ended are sent to it in the order they came. One that
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.errors import ConfigError, EngineError
from motet.rollout import wire

_log = logging.getLogger(__name__)

_QUICK_SECONDS = 10.0
_LONGEST_WAIT = 60.0
_STOP_SECONDS = 120.0


@dataclass(frozen=True)
class EngineHandlers:
    """Who handles what the engine sends."""

    open_jobs: Callable[[], list[dict[str, Any]]]
    """The `add` messages of all jobs that have not ended, for a process that starts."""
    event: Callable[[str, str, Mapping[str, Any]], None]
    """(job, event, data): what happened to a job; in a thread, one after another."""
    score: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
    """A `score` message, for rollouts that no process of their job scores → the fields of its answer."""
    rest: Callable[[str, bool], None]
    """Whether a job is to rest as soon as nobody is there who scores for it."""
    tokens: Callable[[str, int, int], None]
    """(tenant, read, sampled): tokens of a tenant's completions."""


class EngineClient:
    """The engine's process, as the service sees it."""

    def __init__(self, hello: Mapping[str, Any], log: Path) -> None:
        """`hello` is the first message: base, engine and run directory. What the process prints goes to `log`."""
        self._hello, self._log = dict(hello), log
        self._handlers: EngineHandlers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._adopted: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._scoring: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._keys = itertools.count()
        self._stopped = asyncio.Event()
        self._closing = asyncio.Event()
        # of its own: what others wait for in threads, a slow disk or a slow name, does not keep the engine waiting
        self._handling = ThreadPoolExecutor(1, "motet-events")
        self._ready_since = math.inf
        self.ready = asyncio.Event()
        self.failure = ""
        """Why there is no engine, for a person."""
        self.progress: dict[str, dict[str, Any]] = {}
        self.device: dict[str, float] = {}
        self.starts = 0

    def adopt(self, process: asyncio.subprocess.Process) -> None:
        """Have a process that was started already (`start_engine`) as the first; before `start`."""
        self._adopted = process

    def start(self, handlers: EngineHandlers) -> None:
        """Start the process and keep it running."""
        self._handlers, self._loop = handlers, asyncio.get_running_loop()
        self._keeping = asyncio.create_task(self._keep())

    def send(self, **message: Any) -> None:
        """Send one message, from any thread; a process that is not there learns it when it starts, from `open_jobs`."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._write(**message))

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
        self._write(do=do, key=key, **question)
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
                self._write(do="abandon", key=key)

    def _count(self, tenant: str | None, message: Mapping[str, Any]) -> None:
        if self._handlers is not None and tenant is not None:
            sampled = len(message["chunk"]["token_ids"]) if "chunk" in message else 0
            self._handlers.tokens(tenant, int(message.get("prompt_tokens", 0)), sampled)

    def refuse(self, reason: str) -> None:
        """Give up the questions that are open."""
        for messages in self._open.values():
            messages.put_nowait({"refused": reason})

    async def stop(self) -> None:
        """Let every job finish its step and save, then end the process."""
        self._closing.set()
        if self.ready.is_set():
            self._write(do="stop")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._stopped.wait()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._keeping is not None:
            await self._keeping
        self._handling.shutdown(wait=False)

    # --- the process --------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        quick = 0
        while not self._closing.is_set():
            self._ready_since = math.inf
            try:
                await self._run_once()
            except Exception:  # the database was away when it started, or it sent nonsense
                _log.exception("the engine could not be kept")
            finally:
                await self._clean_up()
            quick = 0 if time.monotonic() - self._ready_since > _QUICK_SECONDS else quick + 1
            if not self._closing.is_set():
                await self._back_off(quick)

    async def _back_off(self, quick: int) -> None:
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
        self._process, self._adopted = self._adopted or await start_engine(self._log), None
        self._write(**self._hello)
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # not one that was cut off when the process was killed
                await self._handle(json.loads(line))

    def _write(self, **message: Any) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(wire.line(**message))

    async def _clean_up(self) -> None:
        """Nothing of a process is left, and whoever waits for its answers learns it."""
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
        handlers = self._handlers
        assert handlers is not None
        if "ready" in message:
            for note in message["ready"]["notes"]:  # such as why results depend on more than the seed
                _log.warning("%s", note)
            for job in await asyncio.get_running_loop().run_in_executor(self._handling, handlers.open_jobs):
                self._write(do="add", **job)
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
            task = self._scoring[key] = asyncio.create_task(self._score(message, handlers))
            task.add_done_callback(lambda task: self._scored(key, task))
        elif "rest" in message:
            handlers.rest(message["rest"], message["wanted"])
        elif "unscore" in message:
            if (unwanted := self._scoring.get(message["unscore"])) is not None:
                unwanted.cancel()
        elif "event" in message:
            await asyncio.get_running_loop().run_in_executor(self._handling, self._on_event, message, handlers)
        elif (messages := self._open.get(message.get("key", -1))) is not None:
            messages.put_nowait(message)

    async def _score(self, message: Mapping[str, Any], handlers: EngineHandlers) -> None:
        self._write(do="scored", key=message["score"], **await handlers.score(message))

    def _scored(self, key: int, task: asyncio.Task[None]) -> None:
        if self._scoring.get(key) is task:
            del self._scoring[key]

    def _on_event(self, message: dict[str, Any], handlers: EngineHandlers) -> None:
        if self._closing.is_set() and message["event"] == "state" and message["data"]["state"] in ("paused", "queued"):
            return  # it goes on with the next start
        try:
            handlers.event(message["job"], message["event"], message["data"])
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
