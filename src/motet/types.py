"""The nouns of Motet, in the order data takes them.

A `Problem` is sampled into `Rollout`s; the rollouts of one problem form a `Group`; the groups of one step become
`Sample`s with advantages; samples of several adapters are packed into one `Batch`. All records are frozen and hold numpy
arrays or plain values, so that they can cross rooms, threads and processes without torch.

Legend of array suffixes in comments: T tokens of one sequence (prompt included), N trainable tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from motet.algorithms.losses import Loss

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""What a PEFT directory holds, as the library `peft` names it."""


class JobState(StrEnum):
    """Where a job stands: queued → running ⇄ paused → succeeded / failed / cancelled."""

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


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The end-of-turn token, a stop token or a stop string was sampled."""
    LENGTH = "length"
    """`max_tokens` was reached: the answer is truncated."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are kept."""
    ERROR = "error"
    """The logits were not finite; nothing more can be sampled."""


@dataclass(frozen=True)
class ToolCall:
    """What the model asks a tool for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant`, or `tool` with what one answered."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant asked for in this text."""
    name: str = ""
    """Of the tool that answered."""


@dataclass(frozen=True)
class Problem:
    """One row of a job's data."""

    id: int
    """The row's place in the data before shuffling; names the problem in logs and seeds its random numbers."""
    messages: tuple[Message, ...]
    """The prompt, ready for the chat template. A raw prompt is one `user` message."""
    answer: str
    """The reference answer, as text; empty where the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the row apart from the prompt's; JSON values only."""
    conversational: bool = False
    """Whether the data gave a list of messages rather than text; TRL's reward functions see completions in the same form."""


@dataclass(frozen=True)
class AdapterRef:
    """One version of one adapter, as engines know it. A reference is never used for two different sets of weights."""

    name: str
    version: int

    @property
    def served_name(self) -> str:
        """What a server knows the version by, its directory too: the one place where this name is made."""
        return f"{self.name}-v{self.version}"


@dataclass(frozen=True)
class ServerLoad:
    """What a server that samples is doing."""

    url: str
    up: bool
    requests: int
    tokens: int
    """Outstanding: prompts, and what may still be sampled."""
    versions: int
    """Loaded there."""
    note: str
    """Why it is away."""


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn from the model."""

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

    @property
    def truncates(self) -> bool:
        """Whether any option changes the distribution apart from temperature; not allowed in training."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt, to be completed once per seed."""

    id: str
    job: str
    """Whom the request belongs to: accounting and abort go by it."""
    prompt_ids: IntArray  # [T]
    adapter: AdapterRef | None
    """The version to sample from; None is the base."""
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One 64-bit key per completion; the random number of position p is a function of (key, p) alone."""
    stream: bool = False
    """Deliver tokens as they come; otherwise each completion comes as one chunk."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one completion of a request: a piece of it when streamed, otherwise the whole."""

    index: int
    """Which of the request's seeds."""
    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T]
    versions: IntArray  # [T]
    """The adapter version that sampled each token; -1 for the base."""
    text: str
    """Text added by these tokens; cut before a stop string."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk."""
    error: str = ""
    """What happened, when the reason is `error`."""


@dataclass(frozen=True)
class Turn:
    """One stretch of a rollout that the model sampled, and what the environment said to it."""

    text: str
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()
    replies: tuple[Message, ...] = ()
    """What the model read next."""
    reward: float | None = None
    """For this turn alone, where the environment gives one."""


@dataclass(frozen=True)
class Branch:
    """One linear token sequence of a rollout. A sampled stretch is trained in the first branch that holds it."""

    token_ids: IntArray  # [T] prompt, then everything read and written
    loss_mask: BoolArray  # [T] true where the model sampled the token in this branch
    logprobs: FloatArray  # [T] of the sampler; 0 where the mask is false
    versions: IntArray  # [T] the version that sampled the token; -1 where the mask is false or the base sampled

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled in it."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Rollout:
    """One episode on a problem."""

    problem: Problem
    index: int
    """Its place in the group."""
    branches: tuple[Branch, ...]
    """One, unless its history was rewritten; none where it failed before the first token."""
    turns: tuple[Turn, ...]
    reward: float = float("nan")
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    """Why the rollout failed (its reward raised, timed out, was not finite; its logits were not finite)."""
    opening: tuple[Message, ...] = ()
    """What the model read first, where that is not the problem's messages."""

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(branch.sampled for branch in self.branches)

    @property
    def completion(self) -> str:
        """The text of the last turn, which rewards judge."""
        return self.turns[-1].text if self.turns else ""

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The whole conversation."""
        messages = list(self.opening or self.problem.messages)
        for turn in self.turns:
            messages += [Message("assistant", turn.text, turn.tool_calls), *turn.replies]
        return tuple(messages)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last turn ended."""
        return self.turns[-1].finish_reason if self.turns else FinishReason.ERROR

    @property
    def truncated(self) -> bool:
        """Whether any turn ran into `max_tokens`."""
        return any(turn.finish_reason is FinishReason.LENGTH for turn in self.turns)


@dataclass(frozen=True)
class Group:
    """The rollouts of one problem: the unit of advantage, of back-pressure and of staleness."""

    problem: Problem
    step: int
    version: int
    """The version that was current at admission."""
    rollouts: tuple[Rollout, ...]

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have a reward."""
        return tuple(rollout for rollout in self.rollouts if not rollout.error)

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ, so that centred advantages are not all zero."""
        rewards = {rollout.reward for rollout in self.scored}
        return len(rewards) > 1


@dataclass(frozen=True)
class Sample:
    """A trainable token sequence. Worked example, prompt of 2 tokens and completion of 3:

    token_ids  [11, 12, 21, 22, 2]
    loss_mask  [ 0,  0,  1,  1, 1]
    logprobs   [ 0,  0, -.5, -.1, -.2]   the sampler's
    advantages [ 0,  0, .7, .7, .7]
    """

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T]
    logprobs: FloatArray  # [T]
    advantages: FloatArray  # [T]
    versions: IntArray  # [T]
    weights: FloatArray | None = None  # [T] or [T, K] factor of each token's loss in the sum; None is all ones
    targets: IntArray | None = None  # [T] or [T, K] what the tokens before each place predict; None is the token there
    reference_logprobs: FloatArray | None = None  # [T] of the base, where a loss or a metric asks for it
    proximal_logprobs: FloatArray | None = (
        None  # [T] of the policy at the start of the step, for off-policy corrections
    )

    @property
    def n_tokens(self) -> int:
        """Length of the sequence, prompt included."""
        return len(self.token_ids)

    @property
    def n_trainable(self) -> int:
        """Number of tokens that carry a loss."""
        return int(self.loss_mask.sum())

    @property
    def n_targets(self) -> int:
        """Targets of each such token."""
        return 1 if self.targets is None or self.targets.ndim == 1 else self.targets.shape[1]


def shared_prompts(samples: Sequence[Sample]) -> tuple[int, ...]:
    """For each sample the tokens that it need not bring, because the sample before it begins with the same prompt.

    A prompt is what lies before a sample's first trained token. The samples of a group follow one another, so all but the first
    leave their prompt out.
    """
    found = [0] * len(samples)
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        length = int(np.argmax(sample.loss_mask))
        same = length == int(np.argmax(before.loss_mask)) and length > 0
        if same and np.array_equal(before.token_ids[:length], sample.token_ids[:length]):
            found[index] = length
    return tuple(found)


@dataclass(frozen=True)
class AdamW:
    """One step of AdamW; the moments are the trainer's, everything else comes with the step."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest norm of the gradient; larger ones are scaled down to it."""


@dataclass(frozen=True)
class Segment:
    """Whole samples of one adapter, in the order they are trained: a micro-batch of one job."""

    adapter: str
    samples: tuple[Sample, ...]
    loss: Loss | None = None
    """What is minimised; only a backward pass needs it."""
    denominator: float = 1.0
    """What summed token losses are divided by; a figure of the job's complete step."""
    temperature: float = 1.0
    """Of the logprobs."""

    @property
    def n_tokens(self) -> int:
        """Packed length, each shared prompt counted once, before padding to whole rows."""
        return sum(sample.n_tokens for sample in self.samples) - sum(shared_prompts(self.samples))


@dataclass(frozen=True)
class Batch:
    """Segments of several adapters, trained in one forward and backward pass."""

    segments: tuple[Segment, ...]

    @property
    def n_tokens(self) -> int:
        """Packed length, before padding to whole rows."""
        return sum(segment.n_tokens for segment in self.segments)


@dataclass(frozen=True)
class LossStats:
    """Sums over the trainable tokens of a segment; sums of segments add up to those of a step."""

    tokens: int = 0
    loss: float = 0.0
    """Already divided by the denominator."""
    entropy: float = 0.0
    ratio: float = 0.0
    """Sum of policy / sampler probability ratios."""
    ratio_max: float = 0.0
    clipped: float = 0.0
    """Tokens whose gradient the clip removed."""
    kl_sampler: float = 0.0
    """Sum of k3 estimates of KL(sampler ‖ policy)."""
    kl_base: float = 0.0
    """Sum of k3 estimates of KL(policy ‖ base), where reference logprobs are there."""
    kl_base_tokens: int = 0
    logprob_gap: float = 0.0
    """Largest |trainer − sampler| logprob."""

    def __add__(self, other: LossStats) -> LossStats:
        """Combine two segments: sums add, maxima take the larger (a NaN stays)."""
        return LossStats(
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            entropy=self.entropy + other.entropy,
            ratio=self.ratio + other.ratio,
            ratio_max=float(np.maximum(self.ratio_max, other.ratio_max)),
            clipped=self.clipped + other.clipped,
            kl_sampler=self.kl_sampler + other.kl_sampler,
            kl_base=self.kl_base + other.kl_base,
            kl_base_tokens=self.kl_base_tokens + other.kl_base_tokens,
            logprob_gap=float(np.maximum(self.logprob_gap, other.logprob_gap)),
        )


@dataclass(frozen=True)
class Trained:
    """What a training pass says of a segment."""

    stats: LossStats
    logprobs: tuple[FloatArray, ...]  # [T] or [T, K] per sample
    """Of the targets, by the weights that were in use; 0 where nothing is trained."""


@dataclass(frozen=True)
class OptimStats:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """The gradient was not finite: weights, moments and AdamW's count are as before."""
