"""What passes between a `ShardedTrainer` and the processes of its ranks. A rank answers each message once, in their order."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from motet import budgets
from motet.algorithms.client import ClientLoss
from motet.algorithms.critic import ValueLoss
from motet.batch import AdamW, LossStats, OptimStats, Sample, Segment
from motet.channel import ChannelMessage
from motet.config import EngineConfig
from motet.native.choice import Choice, of_machine
from motet.types import FloatArray

# --- trainer → rank -----------------------------------------------------------------------------------------------------


class Join(ChannelMessage, frozen=True):
    """The first message: the base, what computes it, and who takes part."""

    base: str
    engine: dict[str, Any]
    """Fields of `EngineConfig`; `threads` are those of one rank."""
    own: Choice | None = None
    """What kernels `auto` is on every rank where own kernels cover the base."""
    trust_remote_code: bool = False
    """Apart from `engine`, because no file may set it."""
    embedded: bool = True
    """Whether Motet samples itself, which adapters on experts need."""
    rank: int = 0
    of_torchrun: bool = False
    """Whether torchrun has started the ranks, and says which of its node's each is."""
    meeting: str = ""
    """Where the ranks find each other: a file that does not exist yet, or an address that the first of them listens at."""

    @classmethod
    def of(cls, base: str, engine: EngineConfig, own: Choice | None = None, *, embedded: bool = True) -> Join:
        """What every rank of a host is told. None changes its kernels alone, as where memory is short."""
        fields = engine.model_dump(mode="json") | {"threads": budgets.threads_of(engine)}
        choice = dataclasses.replace(own or of_machine(), kept=True)
        return cls(base, fields, choice, engine.trust_remote_code, embedded)

    @property
    def config(self) -> EngineConfig:
        """As the rank loads it."""
        config = EngineConfig.model_validate(self.engine)
        return config.model_copy(update={"trust_remote_code": self.trust_remote_code})


class AddAdapter(ChannelMessage, frozen=True):
    """Make a fresh adapter."""

    name: str
    shape: dict[str, Any]
    """Fields of `AdapterConfig`."""
    seed: int
    owner: int
    """The rank that has its masters, gradient and moments; every rank has the copy that is multiplied with."""
    head: bool = False
    """Whether it gives values."""


class Leave(ChannelMessage, frozen=True):
    """There is nothing more to do: a rank that ends without having heard this says that something went wrong."""


class RemoveAdapter(ChannelMessage, frozen=True):
    """Let go of an adapter."""

    name: str


class RankLoss(msgspec.Struct, frozen=True):
    """What a segment minimises: one of three kinds."""

    algorithm: dict[str, Any] | None = None
    """Fields of an algorithm that a rank finds by its name."""
    value: ValueLoss | None = None
    client: ClientLoss | None = None


class RankSegment(msgspec.Struct, frozen=True):
    """A segment that a rank runs."""

    place: int
    """Among the segments of the whole batch."""
    adapter: str
    samples: tuple[Sample, ...]
    loss: RankLoss | None
    """None where there is no backward pass."""
    denominator: float
    temperature: float
    share_prefixes: bool

    @classmethod
    def of(cls, place: int, segment: Segment, loss: RankLoss | None) -> RankSegment:
        """A segment of a batch as its rank gets it."""
        return cls(
            place,
            segment.adapter,
            segment.samples,
            loss,
            segment.denominator,
            segment.temperature,
            segment.share_prefixes,
        )


class Train(ChannelMessage, frozen=True):
    """Run a forward and backward pass; all ranks do at once, those without parts too."""

    parts: tuple[RankSegment, ...]
    route: tuple[tuple[str, int], ...]
    """Of every segment of the batch, in order, its adapter and the rank that runs it."""


class Forward(ChannelMessage, frozen=True):
    """Run a forward pass, all ranks at once."""

    parts: tuple[RankSegment, ...]
    base: bool
    """Without adapters."""


class RankStep(ChannelMessage, frozen=True):
    """The owner steps, and hands the new version to all ranks."""

    name: str
    adamw: AdamW


class SaveAdapter(ChannelMessage, frozen=True):
    """To the owner alone: write an adapter."""

    name: str
    directory: str
    optimizer: bool


class ReadAdapter(ChannelMessage, frozen=True):
    """The owner reads an adapter, and hands it to all ranks."""

    name: str
    directory: str
    optimizer: bool


class ExamineOnRank(ChannelMessage, frozen=True):
    """To any rank: whether a job over this base could start from an adapter."""

    directory: str


ToRank = (
    Join | Leave | AddAdapter | RemoveAdapter | Train | Forward | RankStep | SaveAdapter | ReadAdapter | ExamineOnRank
)

# --- rank → trainer -----------------------------------------------------------------------------------------------------


class Joined(ChannelMessage, frozen=True):
    """The rank has its part of the base, and all ranks together have proved it."""

    facts: dict[str, Any]
    """Fields of `ModelInfo`, without the tokenizer."""
    fingerprint: str
    own_bytes: int
    """Of the weights that lie on this rank."""


class RankDone(ChannelMessage, frozen=True):
    """The message was carried out, and there is nothing to tell."""


class SegmentResult(msgspec.Struct, frozen=True):
    """What a pass says of one segment."""

    place: int
    logprobs: tuple[FloatArray, ...]
    stats: LossStats | None = None
    """Where there was a backward pass."""


class RankResult(ChannelMessage, frozen=True):
    """What a pass says of the rank's segments."""

    results: tuple[SegmentResult, ...]


class Stepped(ChannelMessage, frozen=True):
    """What an optimizer step did."""

    stats: OptimStats


class ExaminedOnRank(ChannelMessage, frozen=True):
    """An adapter that fits."""

    shape: dict[str, Any]
    """Fields of `AdapterConfig`: what the job's own adapter has to be."""


class RankRefused(ChannelMessage, frozen=True):
    """It was not done, on any rank; the ranks are in step and can go on."""

    kind: str
    """The exception's class; empty where it was another rank's."""
    reason: str
    number: int = 0
    """Of an OSError."""
    path: str | None = None
    """The file, of an OSError."""


FromRank = Joined | RankDone | RankResult | Stepped | ExaminedOnRank | RankRefused
