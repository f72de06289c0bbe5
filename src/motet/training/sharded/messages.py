"""Messages between a `ShardedTrainer` and the processes of its ranks. A rank answers each message once, in order."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from motet.algorithms.client import ClientLoss
from motet.algorithms.critic import ValueLoss
from motet.config import EngineConfig, budgets
from motet.config.optimizers import OPTIMIZERS, name_of
from motet.core.batch import LossStats, Optimizer, OptimStats, Segment
from motet.core.types import FloatArray
from motet.kernels.cpu.choice import Choice, of_machine
from motet.process.channel import ChannelMessage

# --- trainer → rank -----------------------------------------------------------------------------------------------------


class Join(ChannelMessage, frozen=True):
    """The first message: the base, its settings, and the ranks."""

    base: str
    engine: dict[str, Any]
    """Fields of `EngineConfig`; `threads` is per rank."""
    own: Choice | None = None
    """Kernels that `auto` selects on every rank, if Motet's kernels cover the base."""
    trust_remote_code: bool = False
    """Separate from `engine`, because no file may set it."""
    embedded: bool = True
    """Whether the embedded engine samples, which adapters on experts require."""
    rank: int = 0
    of_torchrun: bool = False
    """Whether torchrun started the ranks and sets their local ranks."""
    meeting: str = ""
    """Rendezvous of the ranks: a file that does not exist yet, or an address at which the first rank listens."""

    @classmethod
    def of(cls, base: str, engine: EngineConfig, own: Choice | None = None, *, embedded: bool = True) -> Join:
        """The message for all ranks of a host. `kept` stops a rank that is short of memory from using torch."""
        fields = engine.model_dump(mode="json") | {"threads": budgets.threads_of(engine)}
        choice = dataclasses.replace(own or of_machine(), kept=True)
        return cls(base, fields, choice, engine.trust_remote_code, embedded)

    @property
    def config(self) -> EngineConfig:
        """The configuration that the rank loads."""
        config = EngineConfig.model_validate(self.engine)
        return config.model_copy(update={"trust_remote_code": self.trust_remote_code})


class AddAdapter(ChannelMessage, frozen=True):
    """Create a new adapter."""

    name: str
    shape: dict[str, Any]
    """Fields of `AdapterConfig`."""
    seed: int
    owner: int
    """The rank with its masters, gradient and moments; every rank has the compute copy."""
    head: bool = False
    """Whether it has a value head."""


class Leave(ChannelMessage, frozen=True):
    """Leave the group; a rank that ends without this message reports an error."""


class RemoveAdapter(ChannelMessage, frozen=True):
    """Remove an adapter."""

    name: str


class RankLoss(msgspec.Struct, frozen=True):
    """A segment's loss: one of three kinds."""

    algorithm: dict[str, Any] | None = None
    """Fields of an algorithm that a rank finds by its name."""
    value: ValueLoss | None = None
    client: ClientLoss | None = None


class RankSegment(msgspec.Struct, frozen=True):
    """A segment for a rank."""

    place: int
    """Index in the whole batch."""
    segment: Segment
    """Without its loss."""
    loss: RankLoss | None
    """None for a forward pass."""


Place = tuple[str, int, int]
"""Adapter and rank of a segment, and the number of its samples if their gradients are added by sample, else 0."""


class Train(ChannelMessage, frozen=True):
    """Run a forward and backward pass; all ranks take part, also those without segments."""

    parts: tuple[RankSegment, ...]
    route: tuple[Place, ...]
    """Of every segment of the batch, in order."""
    n_tokens: int
    """Of the batch."""


class Forward(ChannelMessage, frozen=True):
    """Run a forward pass; all ranks take part."""

    parts: tuple[RankSegment, ...]
    route: tuple[Place, ...]
    """As of `Train`."""
    base: bool
    """Whether to disable the adapters."""


class RankStep(ChannelMessage, frozen=True):
    """The owner updates the adapter and sends the new version to all ranks."""

    name: str
    kind: str
    settings: dict[str, Any]
    """Fields of the optimizer of this name."""

    @classmethod
    def of(cls, name: str, optimizer: Optimizer) -> RankStep:
        """The message for a step of an adapter."""
        return cls(name, name_of(type(optimizer)), dataclasses.asdict(optimizer))  # type: ignore[call-overload]

    @property
    def optimizer(self) -> Optimizer:
        """What takes the step."""
        return msgspec.convert(self.settings, OPTIMIZERS[self.kind].STEP)


class SaveAdapter(ChannelMessage, frozen=True):
    """To the owner only: write an adapter."""

    name: str
    directory: str
    optimizer: bool
    gradient: bool = True


class ReadAdapter(ChannelMessage, frozen=True):
    """The owner reads an adapter and sends it to all ranks."""

    name: str
    directory: str
    optimizer: bool


class ExamineOnRank(ChannelMessage, frozen=True):
    """To any rank: check whether a job over this base could start from an adapter."""

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
    """Bytes of the weights on this rank."""


class RankDone(ChannelMessage, frozen=True):
    """The message was executed and has no result."""


class SegmentResult(msgspec.Struct, frozen=True):
    """Result of a pass for one segment."""

    place: int
    logprobs: tuple[FloatArray, ...]
    stats: LossStats | None = None
    """Set after a backward pass."""


class RankResult(ChannelMessage, frozen=True):
    """Results of the rank's segments."""

    results: tuple[SegmentResult, ...]


class Stepped(ChannelMessage, frozen=True):
    """Result of an optimizer step."""

    stats: OptimStats


class ExaminedOnRank(ChannelMessage, frozen=True):
    """The adapter fits."""

    shape: dict[str, Any]
    """Fields of `AdapterConfig` that the job's own adapter needs."""


class RankRefused(ChannelMessage, frozen=True):
    """The message was executed on no rank; all ranks are ready for the next."""

    kind: str
    """Class name of the exception; empty if another rank raised it."""
    reason: str
    number: int = 0
    """`errno` of an OSError."""
    path: str | None = None
    """The file, of an OSError."""


FromRank = Joined | RankDone | RankResult | Stepped | ExaminedOnRank | RankRefused
