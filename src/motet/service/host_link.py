"""The HTTP process's end of the engine's process: start it, hand it jobs and questions, hear what becomes of them.

When the process dies it is started again, and the jobs that have not ended are handed to it in the order they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from motet.errors import EngineError
from motet.rollout import wire
from motet.types import Chunk

_log = logging.getLogger(__name__)

Hear = Callable[[str, str, Mapping[str, Any]], None]
"""(job, event, data): what happened to a job."""
_QUICK_SECONDS = 10.0
_QUICK_DEATHS = 3
_LONGEST_LINE = 2**26
_STOP_SECONDS = 120.0


class HostLink:
    """The engine's process."""

    def __init__(
        self, hello: Mapping[str, Any], hear: Hear, jobs: Callable[[], list[dict[str, Any]]], log: Path
    ) -> None:
        """Nothing is started yet.

        Args:
            hello: base, engine and run directory.
            hear: told what happens to jobs.
            jobs: the `add` messages of all jobs that have not ended, for a process that starts.
            log: where the process writes what it prints.
        """
        self._hello, self._hear, self._jobs, self._log = dict(hello), hear, jobs, log
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._keys = itertools.count()
        self._stopped = asyncio.Event()
        self._closing = False
        self.ready = asyncio.Event()
        self.failure = ""
        """Why there is no engine, for a person."""
        self.facts: dict[str, Any] = {}
        self.progress: dict[str, dict[str, Any]] = {}
        self.device: dict[str, float] = {}
        self.starts = 0

    def start(self) -> None:
        """Start the process and keep it running."""
        self._keeping = asyncio.create_task(self._keep())

    def send(self, **message: Any) -> None:
        """Send one message; a process that is not there hears of it when it starts, from `jobs`."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(wire.line(**message))

    async def answer(self, **question: Any) -> AsyncIterator[dict[str, Any]]:
        """Messages of one answer, until it is done.

        Raises:
            EngineError: it cannot be answered, and why.
        """
        if not self.ready.is_set():
            raise EngineError(self.failure or "the engine is starting; try again in a moment")
        key, messages = next(self._keys), asyncio.Queue[dict[str, Any]]()
        self._open[key] = messages
        self.send(do="answer", key=key, **question)
        done = False
        try:
            while not done:
                message = await messages.get()
                if "refused" in message:
                    done = True
                    raise EngineError(message["refused"])
                done = "done" in message
                if not done:
                    yield message
        finally:
            del self._open[key]
            if not done:
                self.send(do="abandon", key=key)

    async def stop(self) -> None:
        """Let every job finish its step and save, then end the process."""
        self._closing = True
        if self.ready.is_set():
            self.send(do="stop")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._stopped.wait()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._keeping is not None:
            await self._keeping

    # --- the process --------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        quick = 0
        while not self._closing:
            started = time.monotonic()
            await self._run_once()
            quick = quick + 1 if time.monotonic() - started < _QUICK_SECONDS else 0
            if quick >= _QUICK_DEATHS or self.failure:
                self.failure = (
                    self.failure or f"the engine ended {quick} times right after it was started; see {self._log}"
                )
                _log.error("%s", self.failure)
                return
            if not self._closing:
                _log.warning("the engine ended; it is started again")

    async def _run_once(self) -> None:
        self.starts += 1
        self._stopped.clear()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "motet.hosting",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                start_new_session=True, limit=_LONGEST_LINE, env=dict(os.environ),
            )  # fmt: skip
        self.send(**self._hello)
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # not one that was cut off when the process was killed
                await self._handle(json.loads(line))
        await self._process.wait()
        self.ready.clear()
        self._stopped.set()
        self.progress = {}
        for messages in self._open.values():
            messages.put_nowait({"refused": "the engine ended while it answered; try again in a moment"})

    async def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.facts = message["ready"]
            for job in await asyncio.to_thread(self._jobs):
                self.send(do="add", **job)
            self.ready.set()
        elif "failed" in message:
            self.failure = message["failed"]
        elif "stopped" in message:
            self._stopped.set()
        elif "progress" in message:
            self.progress, self.device = message["progress"], message["device"]
        elif "event" in message:
            await asyncio.to_thread(self._tell, message)
        elif (messages := self._open.get(message.get("key", -1))) is not None:
            messages.put_nowait(message)

    def _tell(self, message: dict[str, Any]) -> None:
        if self._closing and message["event"] == "state" and message["data"]["state"] in ("paused", "queued"):
            return  # it goes on with the next start
        try:
            self._hear(message["job"], message["event"], message["data"])
        except Exception:  # whatever it is, this process has to go on listening
            _log.exception("an event of job %s was not kept", message["job"])


def chunk_of(message: Mapping[str, Any]) -> Chunk | None:
    """Tokens of an answer's message, where it has any."""
    return wire.chunk_in(message["chunk"]) if "chunk" in message else None
