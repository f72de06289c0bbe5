"""The parent's end of a reward process: what it is to load, what it is asked, and what it answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import FiniteFloat, TypeAdapter

from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks.reasoning import ScorerSpec
from motet.tasks.worker_link import LOAD_SECONDS, NO_REPLY, ProcessDiedError, WorkerLink, import_path, valid


@dataclass(frozen=True)
class Reply:
    """What a process answers a request about n completions."""

    values: list[FiniteFloat | None]
    """One for each completion; None where there is no score: it failed, or does not apply."""
    errors: list[str]
    """Why it failed; empty otherwise."""
    failed: bool
    """Whether the call went wrong as a whole."""
    exceeded: Literal["", "cpu", "memory"]
    """Which limit it hit; the process should not be trusted with another call then."""


@dataclass(frozen=True)
class _Loaded:
    error: str = ""
    together: tuple[bool, ...] = ()


_REPLY, _LOADED = TypeAdapter(Reply), TypeAdapter(_Loaded)


def load_request(rewards: Sequence[RewardConfig], scorer: ScorerSpec | None, walled: bool) -> bytes:
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
    try:
        line = {
            "sys_path": import_path(),
            "rewards": items,
            "scorer": scorer.to_json() if scorer else None,
            "wall": walled,
        }
        line["memory_mb"] = max(reward.memory_mb for reward in rewards)
        return json.dumps(line).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise RewardError(f"args of a reward must be JSON values (text, numbers, lists, mappings): {error}") from error


class RewardLink(WorkerLink):
    """One reward process."""

    module = "motet.tasks.reward_process"
    kind = "reward"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.calls = 0
        """Calls that were answered."""
        self.together: tuple[bool, ...] = ()
        """Per reward: whether it takes all completions of a problem in one call."""

    @classmethod
    async def start(cls, first_line: bytes, log: Path | None, *, walled: bool = False) -> RewardLink:
        """Start a process and load its rewards.

        Raises:
            RewardError: the rewards do not load; the text is for the person.
            ProcessDiedError, ClockLimitError: loading ended the process or took too long.
        """
        link = await cls.spawn(log, walled=walled)
        try:
            reply = valid(_LOADED, await link.exchange(first_line, LOAD_SECONDS, 0))
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
        answer = await self.exchange(line, wall_seconds, cpu_seconds)
        try:
            reply = valid(_REPLY, answer)
            if not len(reply.values) == len(reply.errors) == n:
                raise ProcessDiedError(NO_REPLY)
        except ProcessDiedError:
            await self.kill()
            raise
        self.calls += 1
        return reply
