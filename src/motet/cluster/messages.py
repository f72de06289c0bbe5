"""Messages between hosts and their parent. Answers repeat a question's `key`; the last is `Answered` or `QuestionRefused`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from motet.agents import episode_messages as e
from motet.channel import ChannelMessage
from motet.config.service import Largest
from motet.native.choice import Choice
from motet.runtime.slots import Rule
from motet.types import Chunk, FloatArray, IntArray, JobState, SamplingParams
from motet.types import Message as ChatMessage

Action = Literal["pause", "resume", "cancel"]

# --- to a host -------------------------------------------------------------------------------------------------------


class StartHost(ChannelMessage, frozen=True):
    """The first message."""

    base: str
    run: str
    """The run directory."""
    engine: dict[str, Any]
    """`EngineConfig`."""
    rollout: dict[str, Any]
    """`RolloutConfig`."""
    rewards: dict[str, dict[str, Any]]
    """The operator's, fields of `Installed` by name."""
    unwalled: list[str]
    """Rewards that may run without a wall."""
    patience_seconds: float
    largest: Largest
    serves: str = ""
    """The name of the base among those of a service."""
    host: int | None = None
    """Its number, where several share the run directory."""
    own_jobs: bool = False
    """Whether jobs are of the person who started all this: their rewards need no wall, their data and addresses no bounds."""
    accept_changes: bool = True
    """Whether a job goes on that differs from what its directory was made with, or that is damaged."""
    trust_remote_code: bool = False
    takeover_seconds: float = 0.0  # for which the host goes on without a service; 0: it ends with its parent
    own: Choice | None = None  # what kernels `auto` is on all hosts of this base
    code: str = ""
    """What the host runs besides what is said here: a host of other code is no host of this start."""


class Stop(ChannelMessage, frozen=True):
    """Let every job finish its step and save; answered by `Stopped`."""


class AddJob(ChannelMessage, frozen=True):
    """Take a job up, from its last commit."""

    job: dict[str, Any]
    """`JobConfig`, with the job's id as its name."""
    wanted: str
    """`run`, `pause` or `cancel`."""
    first_step: int
    """The first step whose event is to be sent again."""
    tenant: str
    rule: Rule
    slots: int = 1
    base: str = ""  # the name of the base that it is for
    resumes: bool = False  # whether it had a slot when its host ended


class SteerJob(ChannelMessage, frozen=True):
    """Pause, resume or cancel a job."""

    job: str
    action: Action


class ChangeJob(ChannelMessage, frozen=True):
    """Give a job another budget and priority."""

    job: str
    budget: int | None
    priority: int


class ReleaseJob(ChannelMessage, frozen=True):
    """Let a job finish its step and save, and forget it: another host takes it up. Answered by `Released`."""

    job: str


class ForgetJob(ChannelMessage, frozen=True):
    """Forget a job that has ended."""

    job: str


class Nudge(ChannelMessage, frozen=True):
    """A client may have asked more of its job: the journal of the job has it."""

    job: str


class SetRule(ChannelMessage, frozen=True):
    """What holds for a tenant's jobs from now on."""

    tenant: str
    rule: Rule


class EvenOut(ChannelMessage, frozen=True):
    """By how much the shares of tenants grow here, because others have had more over all hosts."""

    factors: dict[str, float]


class Complete(ChannelMessage, frozen=True):
    """A question: complete a conversation or a prompt as it is. Answered by `PromptRead`, `PromptScored` if asked, `Tokens`."""

    tenant: str
    """Whose tokens the answer costs."""
    adapter: str | None
    """The directory of a version, None for the base."""
    n: int
    seed: int
    stream: bool
    logprobs: bool
    """Whether each token's text is wanted beside its logprob."""
    sampling: SamplingParams
    messages: list[ChatMessage] = []
    tools: list[dict[str, Any]] = []
    prompt: str | list[int] | None = None
    """Text or token ids; None: `messages`, through the chat template."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a completion; None: those of the base."""
    prompt_ids: bool = False
    """Whether `PromptRead` has the token ids."""
    prompt_logprobs: bool = False
    """Whether `PromptScored` is wanted too."""
    prompt_top: int = 0
    """How many of the likeliest tokens of each place are wanted with it."""
    within_room: bool = False
    """Whether `max_tokens` ends with the room of the model; otherwise more is refused."""
    base: str = ""
    """The name of the base that answers, or whose adapter does."""
    key: int = 0


class ExamineAdapter(ChannelMessage, frozen=True):
    """A question: what an adapter is. Answered by `AdapterExamined` or `Unfit`."""

    directory: str
    key: int = 0
    base: str = ""


class Abandon(ChannelMessage, frozen=True):
    """Nobody waits for the answer any more."""

    key: int


class EventKept(ChannelMessage, frozen=True):
    """The oldest event or usage that waits for this is written down; those that wait are sent to the next service again."""


class ScoresAnswered(ChannelMessage, frozen=True):
    """The answer to a `ScoreRequest`."""

    key: int
    scores: list[Any] | None = None
    """As `tasks.reward_elsewhere` writes them."""
    away: bool = False
    """Nobody is there who could score, and the job is to rest."""


Question = Complete | ExamineAdapter | e.AskEpisode
ToHost = (
    StartHost | Stop | AddJob | SteerJob | ChangeJob | ReleaseJob | ForgetJob | Nudge | SetRule | EvenOut
    | Complete | ExamineAdapter | Abandon | ScoresAnswered | e.AskEpisode | e.BeginEpisode | e.EpisodeEnded | EventKept
)  # fmt: skip
# --- from a host -------------------------------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True):
    """A job that a host has."""

    job: str
    tenant: str
    slots: int
    state: JobState
    wanted: str
    """What was asked for last: `run`, `pause` or `cancel`."""


class HostReady(ChannelMessage, frozen=True):
    """The base is loaded."""

    notes: list[str]
    """Such as why results depend on more than the seed."""
    tokens_per_second: float = 0.0
    """That it reads of one prompt; 0 where that is not known."""
    device: str = ""
    """What it computes with: hosts with the same are as fast as each other, whatever kept one of them busy meanwhile."""
    jobs: list[Held] = []
    """Jobs that an earlier service gave it and that have not ended."""
    positions: int = 0
    """Tokens of the base's longest sequence; 0 where that is not known."""


class HostFailed(ChannelMessage, frozen=True):
    """The base cannot be loaded."""

    reason: str


class Stopped(ChannelMessage, frozen=True):
    """Every job has saved."""


class JobStanding(msgspec.Struct, frozen=True):
    """How a running job stands."""

    phase: str
    """`sampling`, `training`, `evaluating` or `saving`."""
    step: int
    rollouts_done: int
    """Of the step that is being sampled."""
    rollouts_wanted: int
    tokens: int
    """Sampled and trained on this host."""
    tokens_per_second: float
    seconds_left: float | None
    host: int | None = None
    warnings: list[str] = []


class Progress(ChannelMessage, frozen=True):
    """How running jobs stand, by id, seconds of the device by what it did, and drafts that it checked."""

    jobs: dict[str, JobStanding]
    device: dict[str, float]
    used: dict[str, float] = {}
    """Tokens by tenant since the start, each divided by the weight of its job."""
    away: str = ""
    """Why nobody can be answered now, because no server of this host is there."""


class JobChanged(ChannelMessage, frozen=True):
    """A job has another state, or another message with it."""

    job: str
    state: JobState
    message: str
    inexact: list[str] | None = None
    """Why its bytes may depend on more than itself; None where nobody has looked at it yet."""
    spent: bool = False
    """Whether the job is paused because its budget is spent."""
    key: str = ""
    """Another one for each event: an event that comes twice is kept once."""


class JobStepped(ChannelMessage, frozen=True):
    """A step of a job is done, or its last version evaluated."""

    job: str
    line: dict[str, Any]
    """Of metrics.jsonl, with the tokens of the step and, where they were measured, its seconds."""


class JobWorked(ChannelMessage, frozen=True):
    """A part of a step that a client drives was done, whether or not the step comes."""

    job: str
    step: int
    """The version that it started from."""
    tokens: int
    """All of the step so far, times their targets."""


class Released(ChannelMessage, frozen=True):
    """A job has saved and is unknown here."""

    job: str


class Obeyed(ChannelMessage, frozen=True):
    """A command of a client's is done; its outcome is in the journal of the job."""

    job: str


class UsageWindow(ChannelMessage, frozen=True):
    """A window of device time."""

    engine: str
    """Another one for each start."""
    window: int
    """Its number, growing."""
    microseconds: dict[str, int]
    """By account: a job, completions of a tenant, or nobody."""
    base: str = ""


class ScoreRequest(ChannelMessage, frozen=True):
    """A question of the engine's: scores of completions that no process of their job scores. Answered by `ScoresAnswered`."""

    key: int
    job: str
    reward: dict[str, Any]
    """`RewardConfig`."""
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    completions: list[str]
    transcripts: list[list[dict[str, Any]]]
    """The whole conversation of each, or none at all where each is the prompt and the completion."""


class CancelScore(ChannelMessage, frozen=True):
    """Nobody waits for the scores any more."""

    key: int


class Rest(ChannelMessage, frozen=True):
    """Whether a job is to rest as soon as nobody is there who scores for it."""

    job: str
    wanted: bool


class PromptRead(ChannelMessage, frozen=True):
    """The first answer to `Complete`."""

    key: int
    tokens: int
    token_ids: list[int] = []


class PromptScored(ChannelMessage, frozen=True):
    """Logprobs of the prompt's tokens at temperature 1, the first one's 0."""

    key: int
    logprobs: FloatArray
    top_ids: IntArray | None = None  # [T, k]
    """The likeliest tokens of each place, best first, the first place's 0."""
    top_logprobs: FloatArray | None = None  # [T, k]


class Tokens(ChannelMessage, frozen=True):
    """Some tokens of one completion."""

    key: int
    chunk: Chunk
    texts: list[str]
    """Of each token, where they were asked for."""


class AdapterExamined(ChannelMessage, frozen=True):
    """An adapter that fits the base."""

    key: int
    rank: int
    alpha: float
    target_modules: list[str]


class Unfit(ChannelMessage, frozen=True):
    """Why an adapter does not fit the base."""

    key: int
    reason: str


class Answered(ChannelMessage, frozen=True):
    """A question is answered."""

    key: int


class QuestionRefused(ChannelMessage, frozen=True):
    """A question cannot be answered."""

    key: int
    reason: str
    never: bool = False
    """Whether it never could."""


Answer = (
    PromptRead | PromptScored | Tokens | AdapterExamined | Unfit | e.EpisodeAnswered | Answered | QuestionRefused
)  # fmt: skip
FromHost = (
    HostReady | HostFailed | Stopped | Progress | JobChanged | JobStepped | JobWorked | Released | Obeyed | UsageWindow
    | ScoreRequest | CancelScore | Rest | PromptRead | PromptScored | Tokens | AdapterExamined | Unfit | Answered
    | QuestionRefused | e.OfferEpisode | e.WithdrawEpisode | e.EpisodeAnswered
)  # fmt: skip
