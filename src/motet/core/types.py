"""The nouns of Motet, in the order data takes them.

A `Problem` is sampled into `Rollout`s; the rollouts of one problem form a `Group`; training data is in `motet.core.batch`. All
records are frozen and hold numpy arrays or plain values, so that they can cross rooms, threads and processes without torch.

Legend of array suffixes in comments: T tokens of one sequence (prompt included), N trainable tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from motet.core.conversation import Message as Message  # noqa: PLC0414  (what others import from here)
from motet.core.conversation import Thought as Thought  # noqa: PLC0414
from motet.core.conversation import ToolCall as ToolCall  # noqa: PLC0414
from motet.core.conversation import TurnParts as TurnParts  # noqa: PLC0414

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
TopTokens = tuple[IntArray, FloatArray]
"""The likeliest tokens [T, k] at each position of a prompt, best first, and their logprobs."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""The files of a PEFT directory, under the names that `peft` gives them."""
TRAINED_CONFIG = "adapter_config.as_trained.json"
"""In an export: the config as the run wrote it; the export's own config may name the base differently."""
MOST_ROLES = 8
"""Most roles of a team."""


def adapter_files(names: Iterable[str]) -> tuple[str, ...]:
    """The adapter files among a commit's files; for a team, those in the directories of its roles."""
    known = set(names)
    own = tuple(name for name in ADAPTER_FILES if name in known)
    below = (name for name in known if name.partition("/")[2] in ADAPTER_FILES)
    return own or tuple(sorted(name for name in below if name.partition("/")[0] not in ("", ".", "..")))


class JobState(StrEnum):
    """State of a job: queued → running ⇄ paused → succeeded / failed / cancelled."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the job can never run again without being submitted anew."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


Word = Literal["pause", "resume", "cancel"]
"""What a person asks of a job."""


class Wanted(StrEnum):
    """What a job shall do, whatever it does now."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"

    @classmethod
    def of(cls, word: Word) -> Wanted:
        """What a word asks for."""
        return cls.RUN if word == "resume" else cls(word)

    @property
    def word(self) -> Word:
        """The word that asks for it."""
        return "resume" if self is Wanted.RUN else self.value  # type: ignore[return-value]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The end-of-turn token, a stop token or a stop string was sampled."""
    LENGTH = "length"
    """`max_tokens` was reached, or the context is full: the answer, or its episode, is truncated."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are kept."""
    ERROR = "error"
    """The logits were not finite; nothing more can be sampled."""


@dataclass(frozen=True)
class Problem:
    """One row of a job's data."""

    id: int
    """The row's place in the data before shuffling; names the problem in logs and seeds its random numbers."""
    messages: tuple[Message, ...]
    """The prompt, ready for the chat template. A raw prompt is one `user` message."""
    answer: str
    """The reference answer, as text; empty if the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the row apart from the prompt's; JSON values only."""
    conversational: bool = False
    """Whether the data gave a list of messages rather than text; TRL's reward functions see completions in the same form."""
    continuation: tuple[Message, ...] = ()
    """The messages after the prompt in the row: the assistant's last turn."""

    if not TYPE_CHECKING:  # for rewards that take it for a row; type checkers know that there is no such attribute

        def __getitem__(self, name: object) -> Any:
            raise TypeError(_no_part(name))

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(_no_part(name))


def _no_part(name: object) -> str:
    known = ("answer", "messages", "metadata", "id")
    column = f"problem.{name}" if name in known else f"a column of the row is problem.metadata[{name!r}]"
    return f"a problem is no row and has no {name!r}: " + (f"write {column}" if name in known else column)


@dataclass(frozen=True)
class AdapterRef:
    """One version of one adapter, as engines know it. A reference is never used for two different sets of weights."""

    name: str
    version: int

    @property
    def served_name(self) -> str:
        """The version's name on a server, and of its directory; made in this place only."""
        return f"{self.name}-v{self.version}"


@dataclass(frozen=True)
class ServerLoad:
    """The state of a server that samples."""

    url: str
    up: bool
    requests: int
    tokens: int
    """Outstanding tokens: prompts, and those that may still be sampled."""
    versions: int
    """Versions that it has loaded."""
    note: str
    """Why it is away."""


@dataclass(frozen=True)
class HostNow:
    """The state of a host."""

    name: str
    up: bool
    jobs: int
    tokens_per_second: float
    note: str
    """Why it is away."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings for sampling a completion."""

    temperature: float = 1.0
    """0 is greedy. Logprobs are `log_softmax(logits / temperature)`, at 0 of the unscaled logits."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Stop strings: the token that completes one is kept, the text is cut before the match."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, the end-of-turn token included; the token is kept."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    grammar: str = ""
    """A grammar of llguidance for the completion: tokens that it forbids have probability 0, also in the logprobs. Such
    completions are not trained."""

    @property
    def truncates(self) -> bool:
        """Whether any option changes the distribution apart from temperature; not allowed in training."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


JSON_GRAMMAR = "start: %json "
"""The beginning of a grammar that consists of a JSON schema only."""


def schema_of(grammar: str) -> str:
    """The JSON schema, if it alone keeps to the grammar; empty if a thought must end first, or tools may be called."""
    if grammar.startswith(JSON_GRAMMAR):
        return grammar.removeprefix(JSON_GRAMMAR)
    rules, _, schema = grammar.partition("\nanswer: %json ")
    return schema if rules.partition("\n")[0].endswith(")? answer") else ""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt, to be completed once per seed."""

    id: str
    job: str
    """The job that the request belongs to, for accounting and abort."""
    prompt_ids: IntArray  # [T]
    adapter: AdapterRef | None
    """The version to sample from; None is the base."""
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One 64-bit key per completion; the random number of position p is a function of (key, p) alone."""
    stream: bool = False
    """Return tokens as they are sampled; otherwise each completion is one chunk."""
    keep_aborted: bool = False
    """Whether an abort returns the tokens that a server has sent of a long completion that is not streamed."""
    episodes: tuple[str, ...] = ()
    """For each seed, the episode that continues after it: an engine may keep what it has computed for the episode's next
    turn."""
    tenant: str = ""
    """The job's tenant: tenants take turns if a device samples for several."""
    share: float = 1.0
    """The tenant's share among others."""
    interactive: bool = False
    """Whether somebody waits for the answer: its tenant's turn comes earlier, by `LEAD` (`motet.core.tenant_turns`)."""
    chunk_tokens: int = 1
    """A streamed chunk comes for each so many tokens; an engine may return more of them, with fewer tokens each."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one completion of a request: a piece of it when streamed, otherwise the whole."""

    index: int
    """The position among the request's seeds."""
    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T]
    versions: IntArray  # [T]
    """The adapter version that sampled each token; -1 for the base."""
    text: str
    """Text added by these tokens; cut before a stop string."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk."""
    error: str = ""
    """The error's message if the reason is `error`."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model in a rollout, and the environment's reply."""

    text: str
    """As the template shows it."""
    finish_reason: FinishReason
    parts: TurnParts = field(default_factory=TurnParts)
    replies: tuple[Message, ...] = ()
    """The messages that the model read next."""
    reward: float | None = None
    """The reward of this turn, if the environment gives one."""
    trained: bool = True
    """Whether its tokens are trained; an agent may ask for an answer that is not."""
    role: str = ""
    """The role that sampled it, in a team."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that it makes."""
        return self.parts.calls


@dataclass(frozen=True)
class Branch:
    """One linear token sequence of a rollout. A sampled turn is trained in the first branch that contains it."""

    token_ids: IntArray  # [T] prompt, then everything read and written
    loss_mask: BoolArray  # [T] true where the model sampled the token in this branch
    logprobs: FloatArray  # [T] of the sampler; 0 where the mask is false
    versions: IntArray  # [T] the version that sampled the token; -1 where the mask is false or the base sampled
    turn: int = 0
    """Its first turn; the turns before the next branch's first one are its own."""
    after: int | None = None
    """The turn of an earlier branch after which it continues; None if it starts anew."""

    @property
    def sampled(self) -> int:
        """Number of tokens that the model sampled in it."""
        return int(self.loss_mask.sum())


LARGEST_REWARD = 1e30
"""Limit of the rewards of a rollout and of their sum, so that sums and squares over a step are finite."""
NOT_JUDGED = "no reward applies"
"""Begins the reason of a rollout that no reward judged, which is no failure."""


@dataclass(frozen=True)
class Rollout:
    """One episode on a problem."""

    problem: Problem
    index: int
    """Its position in the group."""
    branches: tuple[Branch, ...]
    """One, unless its history was rewritten; none if it failed before the first token."""
    turns: tuple[Turn, ...]
    reward: float = float("nan")
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    """Why the rollout failed (its reward raised, timed out, was not finite; its logits were not finite)."""
    opening: tuple[Message, ...] = ()
    """The messages that the model read first, if they differ from the problem's."""
    roles: Mapping[str, Rollout] = field(default_factory=dict)
    """In a team: the conversation of each role that took part, with its own branches and reward. `branches` then has those of
    all roles, `turns` are in the order of the episode, and the reward is the mean over these roles."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that its rewards logged, by name."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Texts that its rewards logged, by column."""

    @property
    def sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(branch.sampled for branch in self.branches)

    @property
    def prompt_ids(self) -> IntArray:
        """The tokens that the model read before its first turn, [T]."""
        if not self.branches:
            return np.zeros(0, np.int32)
        first = self.branches[0]
        return first.token_ids[: int(first.loss_mask.argmax()) if first.sampled else len(first.token_ids)]

    @property
    def completion(self) -> str:
        """The text of the last turn, which rewards judge."""
        return self.turns[-1].text if self.turns else ""

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The whole conversation; the model's turns are in parts."""
        messages = list(self.opening or self.problem.messages)
        for turn in self.turns:
            parts = turn.parts
            messages += [Message("assistant", parts.speech, parts.calls, thought=parts.thought), *turn.replies]
        return tuple(messages)

    @property
    def cut_short(self) -> Rollout:
        """The rollout, ended because the context has no room for the turn after its last one."""
        last = (replace(turn, finish_reason=FinishReason.LENGTH) for turn in self.turns[-1:])
        return replace(self, turns=(*self.turns[:-1], *last))

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last turn ended."""
        return self.turns[-1].finish_reason if self.turns else FinishReason.ERROR

    @property
    def truncated(self) -> bool:
        """Whether a trained turn reached `max_tokens`, or the context had no room for another turn."""
        return any(turn.trained and turn.finish_reason is FinishReason.LENGTH for turn in self.turns)


@dataclass(frozen=True)
class Group:
    """The rollouts of one problem: the unit of advantage, of back-pressure and of staleness."""

    problem: Problem
    step: int
    version: int
    """The version that was current when sampling began."""
    rollouts: tuple[Rollout, ...]

    def rewarded(self, reward: Callable[[Rollout], float]) -> Group:
        """The group with these rewards."""
        return replace(self, rollouts=tuple(replace(rollout, reward=reward(rollout)) for rollout in self.rollouts))

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have a reward."""
        return tuple(rollout for rollout in self.rollouts if not rollout.error)

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ (in a team, those of any role), so that centred advantages are not all zero."""
        rewards = {(rollout.reward, *(own.reward for own in rollout.roles.values())) for rollout in self.scored}
        return len(rewards) > 1
