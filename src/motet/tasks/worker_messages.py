"""Messages to and from processes that run a user's code."""

from __future__ import annotations

from typing import Any, Literal

from motet.channel import ChannelMessage
from motet.tasks.reasoning import ScorerSpec
from motet.types import Problem

Limit = Literal["", "cpu", "memory"]
"""Which limit a call hit; its process should not be trusted with another one then."""


class LoadRefused(ChannelMessage, frozen=True):
    """Nothing was loaded, and why."""

    error: str


# --- rewards -------------------------------------------------------------------------------------------------------------


class RewardSource(ChannelMessage, frozen=True):
    """One reward to load."""

    name: str
    args: dict[str, Any]
    pickled: bytes | None
    """A function object."""


class LoadRewards(ChannelMessage, frozen=True):
    """The first message to a process."""

    import_path: list[str]
    rewards: list[RewardSource]
    scorer: ScorerSpec | None
    walled: bool
    memory_mb: int


class RewardsLoaded(ChannelMessage, frozen=True):
    """Of each reward, in their order."""

    together: tuple[bool, ...]
    """Whether it takes all completions of a problem in one call."""
    sees_all: tuple[bool, ...]
    """Whether it takes the whole conversation too."""
    compares: tuple[bool, ...] = ()
    """Whether a score depends on the other completions."""


class ScoreCompletions(ChannelMessage, frozen=True):
    """Score the completions of one problem."""

    reward: int
    """Index among the loaded rewards."""
    problem: Problem
    completions: list[str]
    cpu_seconds: float
    memory_mb: int
    transcripts: list[list[dict[str, Any]]] = []
    """One for each completion, where the reward takes them."""


class Scores(ChannelMessage, frozen=True):
    """A reward's scores of each completion."""

    values: list[float | None]
    """Finite; None where there is no score: it failed, or does not apply."""
    errors: list[str]
    """Why it failed; empty otherwise."""
    failed: bool
    """Whether the call went wrong as a whole."""
    exceeded: Limit = ""


# --- environments --------------------------------------------------------------------------------------------------------


class LoadEnvironment(ChannelMessage, frozen=True):
    """The first message to a process: a class by its name."""

    import_path: list[str]
    name: str
    args: dict[str, Any]


class EnvironmentLoaded(ChannelMessage, frozen=True):
    """Description of the class."""

    tools: tuple[dict[str, Any], ...] = ()
    steps: bool = False
    """Whether it has `step`."""
    judges: bool = False
    """Whether it has `get_reward`."""
    agent: bool = False
    """It is no class, but a function that is an agent and runs elsewhere."""


class Reset(ChannelMessage, frozen=True, tag="reset"):
    """Begin an episode."""

    row: dict[str, Any]


class EnvironmentStep(ChannelMessage, frozen=True, tag="step"):
    """Say something to a turn without a tool call."""

    text: str


class CallTool(ChannelMessage, frozen=True, tag="call"):
    """Call a tool."""

    name: str
    arguments: dict[str, Any]


class JudgeEpisode(ChannelMessage, frozen=True, tag="get_reward"):
    """Ask for the reward of the whole episode."""


class Close(ChannelMessage, frozen=True, tag="close"):
    """Release the instance."""


AnyAction = Reset | EnvironmentStep | CallTool | JudgeEpisode | Close


class EpisodeCall(ChannelMessage, frozen=True):
    """One call of an episode, which has an instance of the class."""

    episode: str
    seed: int
    number: int
    """Of the calls of its episode."""
    cpu_seconds: float
    memory_mb: int
    action: AnyAction


class EpisodeReply(ChannelMessage, frozen=True):
    """Result of a call in an episode."""

    error: str = ""
    text: str = ""
    reward: float | None = None
    """Finite."""
    rewards: dict[str, float] = {}
    """Finite, by the roles of a team."""
    role: str = ""
    """Who of a team has the next turn."""
    done: bool = False
    exceeded: Limit = ""
