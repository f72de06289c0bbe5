"""Messages to and from processes that run environments and agents."""

from __future__ import annotations

import math
from typing import Any

from motet.core.errors import EnvironmentFault
from motet.core.types import Problem
from motet.process.channel import ChannelMessage, ProcessFault
from motet.workers.worker_messages import Calls, Limit, LoadCode, LoadRefused, WorkerMessage, WorkerReply

LATE = "did not return in time (environment.wall_seconds)"


class LoadObject(LoadCode, frozen=True):
    """The first message to a process: an environment's class, or an agent's function, by its name."""

    name: str
    args: dict[str, Any]
    agent: bool = False
    """Whether it is called as an agent, many times at once; otherwise it has episodes."""


class ObjectLoaded(WorkerReply, frozen=True):
    """Description of a class."""

    tools: tuple[dict[str, Any], ...] = ()
    steps: bool = False
    """Whether it has `step`."""
    judges: bool = False
    """Whether it has `get_reward`."""
    agent: bool = False
    """It is not a class, but an agent's function."""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether an object was to be loaded."""
        return isinstance(request, LoadObject)


class Reset(ChannelMessage, frozen=True, tag="reset"):
    """Begin an episode."""

    row: dict[str, Any]


class EnvironmentStep(ChannelMessage, frozen=True, tag="step"):
    """Reply to a turn without a tool call."""

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


class EpisodeCall(WorkerMessage, frozen=True):
    """One call of an episode; each episode has an instance of the class."""

    episode: str
    seed: int
    number: int
    """Number of the call in its episode."""
    cpu_seconds: float
    memory_mb: int
    action: AnyAction


class EpisodeReply(WorkerReply, frozen=True):
    """Result of a call in an episode."""

    error: str = ""
    text: str = ""
    reward: float | None = None
    """Finite."""
    rewards: dict[str, float] = {}
    """Finite rewards by role, in a team."""
    role: str = ""
    """The role of a team with the next turn."""
    done: bool = False
    exceeded: Limit = ""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether its rewards are finite."""
        finite = all(map(math.isfinite, (self.reward or 0.0, *self.rewards.values())))
        return isinstance(request, EpisodeCall) and finite

    def too_long(self, request: WorkerMessage, error: Exception) -> WorkerReply:
        """An error that names the method."""
        where = f"{request.action.__struct_config__.tag}: " if isinstance(request, EpisodeCall) else ""
        return EpisodeReply(error=f"{where}returned {error}")


class RunAgent(WorkerMessage, frozen=True):
    """Run one episode."""

    problem: Problem
    base_url: str
    api_key: str
    deadline: float
    """On the clock of this machine, comparable to `time.time`."""
    seed: int
    """Random seed for the agent: the same whenever this rollout is run again."""


class AgentReturned(WorkerReply, frozen=True):
    """The result of an episode."""

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

    def fits(self, request: WorkerMessage) -> bool:
        """Whether an agent was to run."""
        return isinstance(request, RunAgent)

    def too_long(self, request: WorkerMessage, error: Exception) -> WorkerReply:
        """An error."""
        return AgentReturned(error=f"returned {error}")


_REPLIES = LoadRefused | ObjectLoaded | EpisodeReply | AgentReturned | ProcessFault
_MODULE = "motet.environments.environment_calls"
ENVIRONMENT_CALLS = Calls(_MODULE, "environment", _REPLIES, EnvironmentFault)
AGENT_CALLS = Calls(_MODULE, "agent", _REPLIES, EnvironmentFault, at_once=True)
