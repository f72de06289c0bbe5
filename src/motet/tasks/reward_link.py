"""The parent's end of a reward process: what it is to load, what it is asked, and what it answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks import worker_messages as m
from motet.tasks.reasoning import ScorerSpec
from motet.tasks.worker_link import LOAD_SECONDS, NO_REPLY, ProcessDiedError, WorkerLink, import_path


def load_request(rewards: Sequence[RewardConfig], scorer: ScorerSpec | None, walled: bool) -> m.LoadRewards:
    """The first message to a process: what to load, found along the same import path as here.

    Raises:
        RewardError: a function or its arguments cannot be sent.
    """
    try:
        json.dumps([reward.args for reward in rewards])
    except (TypeError, ValueError) as error:
        raise RewardError(f"args of a reward must be JSON values (text, numbers, lists, mappings): {error}") from error
    sources = [m.RewardSource(reward.name, reward.args, _pickled(reward)) for reward in rewards]
    return m.LoadRewards(import_path(), sources, scorer, walled, max(reward.memory_mb for reward in rewards))


def _pickled(reward: RewardConfig) -> bytes | None:
    if reward.function is None:
        return None
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(reward.function)
    except Exception as error:  # whatever the function holds says in its own way that it cannot be pickled
        raise RewardError(
            f"the function of reward {reward.name!r} cannot be sent to its process: {error}. Open files, locks "
            "and clients inside the function, or put it in a file and name it `file.py:function`"
        ) from error
    return pickled


class RewardLink(WorkerLink):
    """One reward process."""

    module = "motet.tasks.reward_process"
    kind = "reward"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.calls = 0
        """Calls that were answered."""
        self.loaded = m.RewardsLoaded((), ())

    @classmethod
    async def start(cls, request: m.LoadRewards, log: Path | None) -> RewardLink:
        """Start a process and load its rewards.

        Raises:
            RewardError: the rewards do not load; the text is for the person.
            ProcessDiedError, ClockLimitError: loading ended the process or took too long.
        """
        link = await cls.spawn(log, walled=request.walled)
        try:
            reply = await link.exchange(request, m.RewardsLoaded | m.Refused, LOAD_SECONDS)
            if isinstance(reply, m.Refused):
                raise RewardError(reply.error)
        except BaseException:
            await link.kill()
            raise
        link.loaded = reply
        return link

    async def ask(self, request: m.ScoreCompletions, wall_seconds: float) -> m.Scores:
        """One request, one reply. After any exception the process must be killed or is dead already.

        Raises:
            ProcessDiedError: the process ended instead of answering.
            ClockLimitError: no answer within `wall_seconds`.
        """
        reply: m.Scores = await self.exchange(request, m.Scores, wall_seconds, request.cpu_seconds)
        finite = all(value is None or math.isfinite(value) for value in reply.values)
        if not finite or not len(reply.values) == len(reply.errors) == len(request.completions):
            await self.kill()
            raise ProcessDiedError(NO_REPLY)
        self.calls += 1
        return reply
