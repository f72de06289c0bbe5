"""Messages to and from processes that run rewards."""

from __future__ import annotations

import math
from typing import Any

from msgspec import structs

from motet.core.errors import RewardError
from motet.core.types import Problem, TurnParts
from motet.data.reasoning import ScorerSpec
from motet.process.channel import ChannelMessage, ProcessFault
from motet.rewards.reward_answers import Noted, TrainerState, sound
from motet.workers.worker_messages import Calls, Limit, LoadCode, LoadRefused, WorkerMessage, WorkerReply


class RewardSource(ChannelMessage, frozen=True):
    """One reward to load."""

    name: str
    args: dict[str, Any]
    pickled: bytes | None
    """A function object."""
    code: str | None = None
    """Text of the file in `name`, if others sent it."""


class LoadRewards(LoadCode, frozen=True):
    """The first message to a process."""

    rewards: list[RewardSource]
    scorer: ScorerSpec | None
    memory_mb: int
    columns: list[str] | None = None
    """Those that every row of the data has, if they are known."""

    @property
    def of_others(self) -> bool:
        """Whether others sent the code."""
        return any(reward.code is not None for reward in self.rewards)


class RewardsLoaded(WorkerReply, frozen=True):
    """One entry for each reward, in order."""

    together: tuple[bool, ...]
    """Whether it takes all completions of a problem in one call."""
    sees_all: tuple[bool, ...]
    """Whether it takes the whole conversation too."""
    compares: tuple[bool, ...] = ()
    """Whether a score depends on other completions."""
    waits: bool = False
    """Whether one is `async`: it waits, such as for a network, rather than compute."""
    reads_tokens: tuple[bool, ...] = ()
    """Whether it takes prompts and answers with their special tokens."""
    reads_state: tuple[bool, ...] = ()
    """Whether it takes `trainer_state`."""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether rewards were to be loaded."""
        return isinstance(request, LoadRewards)


class ScoreCompletions(WorkerMessage, frozen=True):
    """Score the completions of one problem."""

    reward: int
    """Index among the loaded rewards."""
    problem: Problem
    completions: list[str]
    cpu_seconds: float
    memory_mb: int
    transcripts: list[list[dict[str, Any]]] = []
    """One for each completion, if the reward takes them."""
    parts: list[TurnParts] = []
    """One for each completion; empty if all of each is speech."""
    shown: list[tuple[str, str]] = []
    """For each completion the prompt, and prompt and completion, with special tokens, if the reward takes them."""
    state: TrainerState | None = None
    source: RewardSource | None = None
    """The reward, if it is none of those that the process has loaded, but one of Motet's own."""

    def only(self, place: int, n: int = 1) -> ScoreCompletions:
        """The same for n completions."""
        each = ("completions", "transcripts", "parts", "shown")
        return structs.replace(self, **{name: getattr(self, name)[place : place + n] for name in each})


class Scores(WorkerReply, frozen=True):
    """A reward's score of each completion."""

    values: list[float | None]
    """Finite; None without a score: it failed, or does not apply."""
    errors: list[str]
    """Why it failed; empty otherwise."""
    failed: bool
    """Whether the whole call failed."""
    exceeded: Limit = ""
    refused: str = ""
    """Why the reward cannot be used."""
    metrics: list[dict[str, float]] = []
    """What it logged about each completion; empty if nothing."""
    extra: list[dict[str, str]] = []
    """Columns of each completion for the rollout log; empty if there are none."""
    waits: bool = False
    """Whether the call waited longer than it computed, as far as the system tells."""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether it has a finite score, or none, of each completion; of the first ones if the reward came with them."""
        if not isinstance(request, ScoreCompletions):
            return False
        n = len(request.completions)
        n = n if request.source is None or not self.values else min(n, len(self.values))
        finite = all(value is None or math.isfinite(value) for value in self.values)
        logged = len(self.metrics) in (0, n) and len(self.extra) in (0, n)
        logged = logged and all(map(sound, self.metrics or [{}] * n, self.extra or [{}] * n))
        return finite and logged and len(self.values) == len(self.errors) == n

    def noted(self) -> list[float | None]:
        """The values, with what was logged."""
        n = len(self.values)
        every = zip(self.values, self.metrics or [{}] * n, self.extra or [{}] * n, strict=True)
        return [None if value is None else Noted.of(value, metrics, extra) for value, metrics, extra in every]


REWARD_CALLS = Calls(
    "motet.rewards.reward_calls", "reward", LoadRefused | RewardsLoaded | Scores | ProcessFault, RewardError
)
