"""The parent's end of a reward process: start it, ask it, know how it ended, and leave no zombie."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from motet.errors import RewardError
from motet.tasks.reasoning import HASH_SEED

LOAD_SECONDS = 120.0
"""Wall-clock time that importing a reward may take."""
_LONGEST_REPLY = 1 << 26
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class ProcessDiedError(Exception):
    """The process ended in the middle of a call; the text says how."""


class ClockLimitError(Exception):
    """The wall clock ran out; the text says after how long."""


class RewardLink:
    """One reward process. Calls go one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.calls = 0
        """Calls that were answered."""
        self.together: tuple[bool, ...] = ()
        """Per reward: whether it takes all completions of a problem in one call."""

    @classmethod
    async def start(cls, hello: bytes, log: Path | None) -> RewardLink:
        """Start a process and load its rewards.

        Raises:
            RewardError: the rewards do not load; the text is for the person.
            ProcessDiedError, ClockLimitError: loading ended the process or took too long.
        """
        # One arena and one thread keep address space, which is what is limited, near to memory in use.
        fixed = {"PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": _PACKAGE_ROOT, "MALLOC_ARENA_MAX": "2"}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with contextlib.ExitStack() as stack:
            stderr = None if log is None else stack.enter_context(log.open("ab"))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "motet.tasks.reward_process", str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env={**os.environ, **threads, **fixed}, limit=_LONGEST_REPLY, start_new_session=True,
            )  # fmt: skip
        link = cls(process)
        try:
            reply = await link._exchange(hello, LOAD_SECONDS, 0)
        except BaseException:
            await link.kill()
            raise
        if "error" in reply:
            await link.kill()
            raise RewardError(reply["error"])
        link.together = tuple(a or b for a, b in zip(reply["batched"], reply["is_async"], strict=True))
        return link

    async def ask(self, line: bytes, wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
        """One request, one reply. After any exception the process must be killed or is dead already.

        Raises:
            ProcessDiedError: the process ended instead of answering.
            ClockLimitError: no answer within `wall_seconds`.
        """
        reply = await self._exchange(line, wall_seconds, cpu_seconds)
        self.calls += 1
        return reply

    async def kill(self) -> None:
        """End the process and all that it started, and wait until the kernel has forgotten it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session, so its pid names its group
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _exchange(self, line: bytes, wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
        answering = asyncio.ensure_future(self._answer(line))
        ending = asyncio.ensure_future(self._process.wait())
        try:
            # The end of the process is waited for besides the end of its output, which a forked child may hold open.
            done, _ = await asyncio.wait({answering, ending}, timeout=wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ClockLimitError(f"gave no answer in {wall_seconds:g} s by the clock (reward field wall_seconds)")
            if answering in done and (reply := answering.result()):
                value: dict[str, Any] = json.loads(reply)
                return value
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


def _how_it_ended(status: int | None, cpu_seconds: float) -> str:
    if status is None or status >= 0:
        return f"ended its process with exit status {status} (a reward must return, not exit)"
    name = signal.Signals(-status).name
    if name == "SIGXCPU":
        return f"took more than {cpu_seconds:g} s of CPU time (reward field cpu_seconds) and could not be interrupted"
    hint = {"SIGKILL": "the system may be out of memory", "SIGSEGV": "a crash in compiled code"}.get(name, "")
    return f"killed its process with {name}{f' ({hint})' if hint else ''}"
