"""Messages between hosts and their parent. Answers repeat the question's `key`; the last is `Answered` or `QuestionRefused`."""

from __future__ import annotations

from typing import Any

import msgspec

from motet.chat.turn_stream import SpokenPart
from motet.config.service import Largest
from motet.core.types import Chunk, FloatArray, IntArray, JobState, SamplingParams, Wanted
from motet.core.types import Message as ChatMessage
from motet.environments import episode_messages as e
from motet.kernels.cpu.choice import Choice
from motet.process.channel import Alive, ChannelMessage
from motet.runtime import progress
from motet.runtime.slots import Rule

# --- to a host -------------------------------------------------------------------------------------------------------


class StartHost(ChannelMessage, frozen=True):
    """The first message."""

    base: str
    run: str  # the run directory
    engine: dict[str, Any] = {}
    """`EngineConfig`; it and the next are those of one host (`starts_of`)."""
    rollout: dict[str, Any] = {}
    """`RolloutConfig`."""
    rewards: dict[str, dict[str, Any]] = {}
    """The operator's rewards: fields of `Installed`, by name."""
    unwalled: list[str] = []
    """Rewards that may run without a wall."""
    patience_seconds: float = 1e9
    """Before a job that only waits loses its slot to another tenant's; a run's jobs have one tenant."""
    largest: Largest = Largest()
    step_seconds: float = 60.0
    serves: str = ""
    """The base's name, on a service with several bases."""
    host: int | None = None
    """Its number if several hosts share the run directory."""
    own_jobs: bool = False
    """Whether jobs belong to the person who started the host: then rewards need no wall, and data and addresses no limits."""
    accept_changes: bool = True
    """Whether a job resumes even if it differs from its directory, or its directory is damaged."""
    trust_remote_code: bool = False
    own: Choice | None = None  # the kernels that `auto` selects on all hosts of this base


class Stop(ChannelMessage, frozen=True):
    """Finish the step of every job and save; answered by `Stopped`."""


class AddJob(ChannelMessage, frozen=True):
    """Run a job from its last commit."""

    job: dict[str, Any]
    """`JobConfig`, with the job's id as its name."""
    wanted: Wanted
    first_step: int  # first step whose event is sent again
    tenant: str
    rule: Rule
    slots: int = 1
    base: str = ""
    resumes: bool = False  # it had a slot when its host ended


class SteerJob(ChannelMessage, frozen=True):
    """Let a job run, pause or end."""

    job: str
    wanted: Wanted


class ChangeJob(ChannelMessage, frozen=True):
    """Change a job's budget and priority."""

    job: str
    budget: int | None
    priority: int


class ReleaseJob(ChannelMessage, frozen=True):
    """Finish a job's step, save and forget it, so that another host can run it. Answered by `Released`."""

    job: str


class ForgetJob(ChannelMessage, frozen=True):
    """Forget a job that has ended."""

    job: str


class Nudge(ChannelMessage, frozen=True):
    """A client may have added commands to its job's journal."""

    job: str


class SetRule(ChannelMessage, frozen=True):
    """Set the rule for a tenant's jobs."""

    tenant: str
    rule: Rule


class Complete(ChannelMessage, frozen=True):
    """A question: complete a conversation or a plain prompt. Answered by `PromptRead`, `PromptScored` if asked, `Tokens`."""

    tenant: str  # the tenant charged for the tokens
    adapter: str | None
    """The directory of a version; None is the base."""
    n: int
    seed: int
    stream: bool
    logprobs: bool
    """Whether to send each token's text with its logprob."""
    sampling: SamplingParams
    messages: list[ChatMessage] = []
    tools: list[dict[str, Any]] = []
    prompt: str | list[int] | None = None
    """Text or token ids; None uses `messages` with the chat template."""
    template: dict[str, Any] = {}  # how its job uses the chat template: fields of `DataConfig`
    stop_token_ids: list[int] | None = None
    """Token ids that end a completion; None is the base's."""
    prompt_ids: bool = False  # whether `PromptRead` includes the token ids
    prompt_logprobs: bool = False  # whether to send `PromptScored`
    prompt_top: int = 0
    """Number of likeliest tokens per position in `PromptScored`."""
    within_room: bool = False
    """Whether to cut `max_tokens` to the room left in the model's length; otherwise too many are refused."""
    base: str = ""
    """The name of the base that answers, with or without an adapter."""
    key: int = 0
    account: str = ""  # whose tokens they are within the tenant; hosts do not read it


class ExamineAdapter(ChannelMessage, frozen=True):
    """A question: examine an adapter. Answered by `AdapterExamined` or `Unfit`."""

    directory: str
    key: int = 0
    base: str = ""
    tenant: str = ""  # tenants take turns


class Abandon(ChannelMessage, frozen=True):
    """Cancel a question."""

    key: int


class EventKept(ChannelMessage, frozen=True):
    """The oldest unconfirmed event or usage is stored; unconfirmed ones are sent to the next service again."""


class ScoresAnswered(ChannelMessage, frozen=True):
    """The answer to a `ScoreRequest`."""

    key: int
    scores: list[Any] | None = None
    """As `rewards.reward_elsewhere` writes them."""
    away: bool = False  # whether no scorer is connected, so that the job must pause


Question = Complete | ExamineAdapter | e.AskEpisode
ToHost = (
    StartHost | Stop | AddJob | SteerJob | ChangeJob | ReleaseJob | ForgetJob | Nudge | SetRule
    | Complete | ExamineAdapter | Abandon | ScoresAnswered | e.AskEpisode | e.BeginEpisode | e.EpisodeEnded | EventKept
)  # fmt: skip
# --- from a host -------------------------------------------------------------------------------------------------------


# what a job tells its observer is sent as it is
JobStanding = progress.JobStanding
JobChanged = progress.JobChanged
JobStepped = progress.JobStepped
JobWorked = progress.JobWorked
Obeyed = progress.Obeyed


class Held(msgspec.Struct, frozen=True):
    """A job that a host has."""

    job: str
    tenant: str
    slots: int
    state: JobState
    wanted: Wanted


class HostReady(ChannelMessage, frozen=True):
    """The base is loaded."""

    notes: list[str]  # for a person; for instance, why results depend on more than the seed
    tokens_per_second: float = 0.0  # prefill speed on one prompt; 0 if unknown
    device: str = ""
    """Name of its device; hosts with equal names count as equally fast, even if other work slowed one down."""
    jobs: list[Held] = []  # unfinished jobs from an earlier service
    positions: int = 0  # tokens of the base's longest sequence; 0 if unknown
    room: int = 0  # tokens of the longest prompt with its answer; less than `positions` with a small KV cache
    tool_format: str = ""  # in which its base writes turns; empty if it is not known
    base_note: str = ""  # what those who talk to its base must know, such as that its form is not known


class HostFailed(ChannelMessage, frozen=True):
    """The base cannot be loaded, or no more work can be done."""

    reason: str
    device: bool = False  # whether its device is lost, perhaps by the fault of a job
    job: str = ""  # the job in whose turn the process was ended, because its loop stood still or memory was short


class Stopped(ChannelMessage, frozen=True):
    """Every job has saved."""


class Progress(ChannelMessage, frozen=True):
    """Progress of running jobs by id, and device seconds by activity."""

    jobs: dict[str, JobStanding]
    device: dict[str, float]
    away: str = ""  # why no question can be answered now: no server of this host is available
    prepared: dict[str, int] = {}  # by tenant: bytes of the rows of its jobs here, in memory and in unlinked files
    step_tokens: int = 0  # most tokens of a step by default; 0 before they are known


class Released(ChannelMessage, frozen=True):
    """A job is saved, and this host has forgotten it, as it was asked to."""

    job: str


class UsageWindow(ChannelMessage, frozen=True):
    """A window of device time."""

    engine: str  # unique for each start
    window: int  # its number; later windows have larger ones
    microseconds: dict[str, int]
    """By account: a job, completions of a tenant, or nobody."""
    base: str = ""
    cpu: dict[str, int] = {}  # microseconds of the processor by job: of its rewards, and of its preparation
    read: dict[str, int] = {}  # tokens of prompts by job


class ScoreRequest(ChannelMessage, frozen=True):
    """A question of the host: score completions that the job's processes do not score. Answered by `ScoresAnswered`."""

    key: int
    job: str
    reward: dict[str, Any]
    """`RewardConfig`."""
    problem: dict[str, Any]
    """`id`, `messages`, `answer`, `metadata`, `conversational`."""
    completions: list[str]
    transcripts: list[list[dict[str, Any]]]
    """The conversation of each; empty if each is only the prompt and the completion."""
    parts: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    """As `AnswerDetails` has them."""
    more: bool = False  # whether a message with more completions follows, without the problem

    def with_more(self, later: ScoreRequest) -> ScoreRequest:
        """Add the completions of the message that follows."""
        joined = {name: getattr(self, name) + getattr(later, name) for name in ("completions", "transcripts", "parts")}
        return msgspec.structs.replace(self, **joined, more=later.more)


class CancelScore(ChannelMessage, frozen=True):
    """Cancel a `ScoreRequest`."""

    key: int


class Rest(ChannelMessage, frozen=True):
    """Whether a job pauses as soon as no scorer is connected for it."""

    job: str
    wanted: bool


class PromptRead(ChannelMessage, frozen=True):
    """The first answer to `Complete`."""

    key: int
    tokens: int
    token_ids: list[int] = []


class PromptScored(ChannelMessage, frozen=True):
    """Logprobs of the prompt's tokens at temperature 1; 0 for the first token."""

    key: int
    logprobs: FloatArray
    top_ids: IntArray | None = None  # [T, k]
    """The likeliest tokens of each position, best first; 0 at the first position."""
    top_logprobs: FloatArray | None = None  # [T, k]


class Tokens(ChannelMessage, frozen=True):
    """Some tokens of one completion."""

    key: int
    chunk: Chunk
    token_bytes: list[bytes]
    """The bytes of each token, if requested."""
    stopped: str = ""  # the stop string that ended the completion, with its last tokens
    said: SpokenPart | None = None  # what a turn of a chat says; None: the text of `chunk`


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
    """The end of a successful answer."""

    key: int


class QuestionRefused(ChannelMessage, frozen=True):
    """A question cannot be answered."""

    key: int
    reason: str
    never: bool = False  # whether it can never be answered
    code: str = ""  # see `MotetError`


Answer = (
    PromptRead | PromptScored | Tokens | AdapterExamined | Unfit | e.EpisodeAnswered | Answered | QuestionRefused
)  # fmt: skip
FromHost = (
    HostReady | HostFailed | Stopped | Progress | JobChanged | JobStepped | JobWorked | Released | Obeyed | UsageWindow
    | ScoreRequest | CancelScore | Rest | PromptRead | PromptScored | Tokens | AdapterExamined | Unfit | Answered
    | QuestionRefused | Alive | e.OfferEpisode | e.WithdrawEpisode | e.EpisodeAnswered
)  # fmt: skip
