"""Messages to and from the process in which agents run."""

from __future__ import annotations

from typing import Any

from motet.core.types import Problem
from motet.process.channel import ChannelMessage, ProcessFault

LATE = "did not return in time (environment.wall_seconds)"


def of_agent(error: str) -> str:
    """The reason of an agent's rollout; empty without."""
    return error and f"the agent{':' * error.startswith('its ')} {error}"


class LoadAgent(ChannelMessage, frozen=True):
    """The first message: a function by its name."""

    import_path: list[str]
    name: str
    args: dict[str, Any]


class AgentLoaded(ChannelMessage, frozen=True):
    """The agent can be called."""


class AgentRefused(ChannelMessage, frozen=True):
    """The agent cannot be loaded; the text says why."""

    error: str


class RunAgent(ChannelMessage, frozen=True):
    """Run one episode."""

    episode: int
    problem: Problem
    base_url: str
    api_key: str
    deadline: float
    """On the clock of this machine, comparable to `time.time`."""
    seed: int
    """Random seed for the agent: the same whenever this rollout is run again."""


class StopAgent(ChannelMessage, frozen=True):
    """Stop an episode that is no longer awaited; has no answer."""

    episode: int


class AgentReturned(ChannelMessage, frozen=True):
    """The result of an episode."""

    episode: int
    reward: float | None = None
    rewards: dict[str, float] = {}
    """Rewards by the ids of calls."""
    error: str = ""
    late: bool = False
    """Whether the clock ended it."""
    hangs: bool = False
    """Whether it still runs, in a thread that cannot be ended."""
    killed: bool = False
    """Whether its process was killed by a signal that Motet did not send."""


ToProcess = LoadAgent | RunAgent | StopAgent
FromProcess = AgentLoaded | AgentRefused | AgentReturned | ProcessFault
