"""The parent's end of a reward process: start it, ask it, know how it ended, and leave no zombie."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from motet import wall
from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks.reasoning import HASH_SEED, ScorerSpec

LOAD_SECONDS = 120.0
"""Wall-clock time that importing a reward may take."""
_LONGEST_REPLY = 1 << 26


@dataclass(frozen=True)
class Reply:
    """What a process answers a request about n completions."""

    values: list[FiniteFloat | None]
    """One for each completion; None where there is no score: it failed, or does not apply."""
    errors: list[str]
    """Why it failed; empty otherwise."""
    failed: bool
    """Whether the call went wrong as a whole."""
    replace: Literal["", "cpu", "memory"]
    """Which limit it hit; the process should not be trusted with another call then."""


@dataclass(frozen=True)
class _Loaded:
    error: str = ""
    together: tuple[bool, ...] = ()


_REPLY, _LOADED = TypeAdapter(Reply), TypeAdapter(_Loaded)
_NO_REPLY = "wrote what is no reply (a reward must leave the process's pipes alone)"
_T = TypeVar("_T")


class ProcessDiedError(Exception):
    """The process ended in the middle of a call; the text says how."""


class ClockLimitError(Exception):
    """The wall clock ran out; the text says after how long."""


def hello(rewards: Sequence[RewardConfig], scorer: ScorerSpec | None, walled: bool) -> bytes:
    """The first line to a process: what to load, found along the same import path as here.

    Raises:
        RewardError: a function or its arguments cannot be sent.
    """
    items = []
    for reward in rewards:
        function = None
        if reward.function is not None:
            import cloudpickle

            try:
                function = base64.b64encode(cloudpickle.dumps(reward.function)).decode()
            except Exception as error:  # whatever the function holds says in its own way that it cannot be pickled
                raise RewardError(
                    f"the function of reward {reward.name!r} cannot be sent to its process: {error}. Open files, locks "
                    "and clients inside the function, or put it in a file and name it `file.py:function`"
                ) from error
        items.append({"name": reward.name, "args": reward.args, "function": function})
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]
    try:
        line = {"sys_path": path, "rewards": items, "scorer": scorer.to_json() if scorer else None, "wall": walled}
        line["memory_mb"] = max(reward.memory_mb for reward in rewards)
        return json.dumps(line).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise RewardError(f"args of a reward must be JSON values (text, numbers, lists, mappings): {error}") from error


class RewardLink:
    """One reward process. Calls go one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.calls = 0
        """Calls that were answered."""
        self.together: tuple[bool, ...] = ()
        """Per reward: whether it takes all completions of a problem in one call."""

    @classmethod
    async def start(cls, first_line: bytes, log: Path | None, *, walled: bool = False) -> RewardLink:
        """Start a process and load its rewards; one that goes behind a wall gets nothing of this one's environment.

        Raises:
            RewardError: the rewards do not load; the text is for the person.
            ProcessDiedError, ClockLimitError: loading ended the process or took too long.
        """
        # One arena and one thread keep address space, which is what is limited, near to memory in use.
        environment = wall.environment(PYTHONHASHSEED=HASH_SEED, MALLOC_ARENA_MAX="2")
        if not walled:
            environment = {**os.environ, **environment, "PATH": os.environ.get("PATH", "")}
        with contextlib.ExitStack() as stack:
            stderr = None if log is None else stack.enter_context(log.open("ab"))
            process = await asyncio.create_subprocess_exec(
                *wall.command("motet.tasks.reward_process", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env=environment, limit=_LONGEST_REPLY, start_new_session=True,
            )  # fmt: skip
        link = cls(process)
        try:
            reply = _valid(_LOADED, await link._exchange(first_line, LOAD_SECONDS, 0))
        except BaseException:
            await link.kill()
            raise
        if reply.error:
            await link.kill()
            raise RewardError(reply.error)
        link.together = reply.together
        return link

    async def ask(self, line: bytes, n: int, wall_seconds: float, cpu_seconds: float) -> Reply:
        """One request about n completions, one reply. After any exception the process must be killed or is dead already.

        Raises:
            ProcessDiedError: the process ended instead of answering.
            ClockLimitError: no answer within `wall_seconds`.
        """
        reply = await self._exchange(line, wall_seconds, cpu_seconds)
        try:
            found = _valid(_REPLY, reply)
            if not len(found.values) == len(found.errors) == n:
                raise ProcessDiedError(_NO_REPLY)
        except ProcessDiedError:
            await self.kill()
            raise
        self.calls += 1
        return found

    async def kill(self) -> None:
        """End the process and all that it started, and wait until the kernel has forgotten it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session, so its pid names its group
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _exchange(self, line: bytes, wall_seconds: float, cpu_seconds: float) -> bytes:
        answering = asyncio.ensure_future(self._answer(line))
        ending = asyncio.ensure_future(self._process.wait())
        try:
            # The end of the process is waited for besides the end of its output, which a forked child may hold open.
            done, _ = await asyncio.wait({answering, ending}, timeout=wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ClockLimitError(f"gave no answer in {wall_seconds:g} s by the clock (reward field wall_seconds)")
            if answering in done and (reply := answering.result()):
                return reply
        finally:
            answering.cancel()
            ending.cancel()
            await asyncio.gather(answering, ending, return_exceptions=True)
        await self.kill()
        raise ProcessDiedError(_how_it_ended(self._process.returncode, cpu_seconds))

    async def _answer(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
            return await self._process.stdout.readline()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            return b""


def _valid(kind: TypeAdapter[_T], reply: bytes) -> _T:
    """What a process wrote; one that an answer took over may write anything."""
    try:
        return kind.validate_json(reply)
    except ValidationError as error:
        raise ProcessDiedError(_NO_REPLY) from error


def _how_it_ended(status: int | None, cpu_seconds: float) -> str:
    if status is None or status >= 0:
        return f"ended its process with exit status {status} (a reward must return, not exit)"
    name = signal.Signals(-status).name
    if name == "SIGXCPU":
        return f"took more than {cpu_seconds:g} s of CPU time (reward field cpu_seconds) and could not be interrupted"
    hint = {"SIGKILL": "the system may be out of memory", "SIGSEGV": "a crash in compiled code"}.get(name, "")
    return f"killed its process with {name}{f' ({hint})' if hint else ''}"
