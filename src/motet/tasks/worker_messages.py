"""Messages to and from processes that run a user's code: it is loaded once, then called; each call has one reply."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import structs

from motet.core.types import Problem, TurnParts
from motet.process.channel import ChannelMessage, ProcessFault
from motet.tasks.reasoning import ScorerSpec
from motet.tasks.reward_answers import Noted, TrainerState, sound

Limit = Literal["", "cpu", "memory"]
"""The limit that a call hit; its process should get no further calls then."""


LATE = "did not return in time (environment.wall_seconds)"


class WorkerMessage(ChannelMessage, frozen=True, kw_only=True):
    """A message of one call."""

    call: int = 0
    """Number of the call; its reply has the same."""


class WorkerReply(WorkerMessage, frozen=True):
    """The reply to a call."""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether it can be a reply to `request`: a user's code may write anything to the pipe."""
        return isinstance(self, _REPLIES[type(request)])


class LoadRefused(WorkerReply, frozen=True):
    """Loading failed; the text says why."""

    error: str

    def fits(self, request: WorkerMessage) -> bool:
        """Whether something was to be loaded."""
        return isinstance(request, LoadRewards | LoadObject)


# --- rewards -------------------------------------------------------------------------------------------------------------


class RewardSource(ChannelMessage, frozen=True):
    """One reward to load."""

    name: str
    args: dict[str, Any]
    pickled: bytes | None
    """A function object."""


class LoadRewards(WorkerMessage, frozen=True):
    """The first message to a process."""

    import_path: list[str]
    rewards: list[RewardSource]
    scorer: ScorerSpec | None
    walled: bool
    memory_mb: int
    columns: list[str] | None = None
    """Those that every row of the data has, if they are known."""


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

    def only(self, place: int) -> ScoreCompletions:
        """The same for one completion."""
        each = ("completions", "transcripts", "parts", "shown")
        return structs.replace(self, **{name: getattr(self, name)[place : place + 1] for name in each})


class Scores(WorkerReply, frozen=True):
    """A reward's score of each completion."""

    values: list[float | None]
    """Finite; None without a score: it failed, or does not apply."""
    errors: list[str]
    """Why it failed; empty otherwise."""
    failed: bool
    """Whether the whole call failed."""
    exceeded: Limit = ""
    metrics: list[dict[str, float]] = []
    """What it logged about each completion; empty if nothing."""
    extra: list[dict[str, str]] = []
    """Columns of each completion for the rollout log; empty if there are none."""
    waits: bool = False
    """Whether the call waited longer than it computed, as far as the system tells."""

    def fits(self, request: WorkerMessage) -> bool:
        """Whether it has a finite score, or none, of each completion."""
        n = len(request.completions) if isinstance(request, ScoreCompletions) else -1
        finite = all(value is None or math.isfinite(value) for value in self.values)
        logged = len(self.metrics) in (0, n) and len(self.extra) in (0, n)
        logged = logged and all(map(sound, self.metrics or [{}] * n, self.extra or [{}] * n))
        return super().fits(request) and finite and logged and len(self.values) == len(self.errors) == n

    def noted(self) -> list[float | None]:
        """The values, with what was logged."""
        n = len(self.values)
        every = zip(self.values, self.metrics or [{}] * n, self.extra or [{}] * n, strict=True)
        return [None if value is None else Noted.of(value, metrics, extra) for value, metrics, extra in every]


# --- environments --------------------------------------------------------------------------------------------------------


class LoadObject(WorkerMessage, frozen=True):
    """The first message to a process: an environment's class, or an agent's function, by its name."""

    import_path: list[str]
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
        return super().fits(request) and all(map(math.isfinite, (self.reward or 0.0, *self.rewards.values())))


# --- agents --------------------------------------------------------------------------------------------------------------


class RunAgent(WorkerMessage, frozen=True):
    """Run one episode."""

    problem: Problem
    base_url: str
    api_key: str
    deadline: float
    """On the clock of this machine, comparable to `time.time`."""
    seed: int
    """Random seed for the agent: the same whenever this rollout is run again."""


class StopAgent(WorkerMessage, frozen=True):
    """Stop a call that is no longer awaited; only that call has a reply."""


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


ToWorker = LoadRewards | ScoreCompletions | LoadObject | EpisodeCall | RunAgent | StopAgent
FromWorker = LoadRefused | RewardsLoaded | Scores | ObjectLoaded | EpisodeReply | AgentReturned | ProcessFault
_REPLIES: dict[type[WorkerMessage], type[WorkerReply]] = {
    LoadRewards: RewardsLoaded, ScoreCompletions: Scores, LoadObject: ObjectLoaded, EpisodeCall: EpisodeReply,
    RunAgent: AgentReturned,
}  # fmt: skip
"""The kind of reply to each call."""
