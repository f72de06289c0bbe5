"""What goes to the processes in which somebody's own code runs, and what comes back."""

from __future__ import annotations

from typing import Any, Literal

from motet.channel import Message
from motet.tasks.reasoning import ScorerSpec
from motet.types import Problem

Limit = Literal["", "cpu", "memory"]
"""Which limit a call hit; its process should not be trusted with another one then."""


class Refused(Message, frozen=True):
    """Nothing was loaded, and why."""

    error: str


# --- rewards -------------------------------------------------------------------------------------------------------------


class RewardSource(Message, frozen=True):
    """One reward to load."""

    name: str
    args: dict[str, Any]
    pickled: bytes | None
    """A function object."""


class LoadRewards(Message, frozen=True):
    """The first message to a process."""

    import_path: list[str]
    rewards: list[RewardSource]
    scorer: ScorerSpec | None
    walled: bool
    memory_mb: int


class RewardsLoaded(Message, frozen=True):
    """Of each reward, in their order."""

    together: tuple[bool, ...]
    """Whether it takes all completions of a problem in one call."""
    sees_all: tuple[bool, ...]
    """Whether it takes the whole conversation too."""


class ScoreCompletions(Message, frozen=True):
    """Score the completions of one problem."""

    reward: int
    """Its place among those loaded."""
    problem: Problem
    completions: list[str]
    cpu_seconds: float
    memory_mb: int
    transcripts: list[list[dict[str, Any]]] = []
    """One for each completion, where the reward takes them."""


class Scores(Message, frozen=True):
    """What a reward says of each completion."""

    values: list[float | None]
    """Finite; None where there is no score: it failed, or does not apply."""
    errors: list[str]
    """Why it failed; empty otherwise."""
    failed: bool
    """Whether the call went wrong as a whole."""
    exceeded: Limit = ""


# --- environments --------------------------------------------------------------------------------------------------------


class LoadEnvironment(Message, frozen=True):
    """The first message to a process: a class by its name."""

    import_path: list[str]
    name: str
    args: dict[str, Any]


class EnvironmentLoaded(Message, frozen=True):
    """What the class offers."""

    tools: tuple[dict[str, Any], ...] = ()
    steps: bool = False
    """Whether it has `step`."""
    judges: bool = False
    """Whether it has `get_reward`."""
    agent: bool = False
    """It is no class, but a function that is an agent and runs elsewhere."""


class Reset(Message, frozen=True, tag="reset"):
    """Begin an episode."""

    row: dict[str, Any]


class Step(Message, frozen=True, tag="step"):
    """Say something to a turn without a tool call."""

    text: str


class CallTool(Message, frozen=True, tag="call"):
    """Call a tool."""

    name: str
    arguments: dict[str, Any]


class Judge(Message, frozen=True, tag="get_reward"):
    """Say what the whole episode is worth."""


class Close(Message, frozen=True, tag="close"):
    """Let go of the instance."""


AnyAction = Reset | Step | CallTool | Judge | Close


class EpisodeCall(Message, frozen=True):
    """One call of an episode, which has an instance of the class."""

    episode: str
    seed: int
    number: int
    """Of the calls of its episode."""
    cpu_seconds: float
    memory_mb: int
    action: AnyAction


class EpisodeReply(Message, frozen=True):
    """What a call of an episode gave."""

    error: str = ""
    text: str = ""
    reward: float | None = None
    """Finite."""
    done: bool = False
    exceeded: Limit = ""
