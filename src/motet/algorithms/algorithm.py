"""The base class of algorithms: a section of a job file, and a loss. Subclasses define how a job learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from motet.algorithms.packing import cut
from motet.core.batch import Loss, LossInputs, Sample, Segment, TokenLosses
from motet.core.settings import Config
from motet.core.types import FloatArray


def is_address(name: str) -> bool:
    """Whether the value of a reference or teacher is the address of a server."""
    return name.startswith(("http://", "https://"))


def _no_server(name: str) -> str:
    if is_address(name):
        raise ValueError("no server is asked here, only in `distill`; give `start`, `base` or a PEFT directory")
    return name


ReferenceName = Annotated[str, AfterValidator(_no_server)]
"""`start` (the adapter as the job begins with it), `base`, or a PEFT directory."""


@dataclass(frozen=True)
class ReferenceServer:
    """An OpenAI-compatible server that returns `prompt_logprobs`."""

    url: str
    model: str | None = None
    """The model's name on the server; None is the first that the server lists."""
    key_env: str | None = None
    """Environment variable with the server's key."""


class Algorithm(Config):
    """How a job learns. A plain string is the type."""

    needs_rewards: ClassVar[bool] = True
    """Whether a job must name rewards, or an environment that gives them."""
    compared_field: ClassVar[str] = "reference"
    """The field that `compared_with` reads."""
    best_by: ClassVar[str] = "reward"
    """The held-out figure that decides the best version, and after a comma what decides between equal ones."""

    type: str = ""
    """A name, or `file.py:Class` for your own."""

    @property
    def updates(self) -> int:
        """Optimizer steps of each adapter in a step."""
        return 1

    @property
    def lag(self) -> int:
        """The largest number of versions between the sampled data and the trained version."""
        return 0

    @property
    def same_groups(self) -> bool:
        """Whether a step that begins again trains on the same groups, so that those that are finished are worth keeping."""
        return True

    @property
    def compared_with(self) -> str:
        """The model of reference logprobs: `base`, `start`, a PEFT directory, or the address of `reference_server`."""
        return "base"

    @property
    def reference_server(self) -> ReferenceServer | None:
        """The server of reference logprobs, if any."""
        return None

    def companions(self, *, started: bool) -> int:
        """Adapters in the trainer besides the job's own; `started`: whether the job's adapter started from another."""
        return int(
            self.reference_server is None and self.compared_with not in (("base",) if started else ("base", "start"))
        )

    def mistake(self, max_tokens: int) -> str | None:
        """Why it cannot learn from answers of at most `max_tokens`; None if it can."""
        return None

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Loss of each trainable token of a segment [N], and whether a clip touched it [N]; runs in the trainer."""
        raise NotImplementedError(f"{type(self).__name__} has no token_losses")


@dataclass(frozen=True)
class StepBatch:
    """The training data of one step."""

    samples: tuple[Sample, ...]
    """In data order; samples that cannot have a gradient are left out."""
    denominator: float
    """The denominator of the complete step, including samples without a gradient."""
    groups: int = 0
    """Number of groups that have advantages."""
    share_prefixes: bool = False
    """Whether neighbouring samples share their whole common prefix, not only a group's prompt."""
    by_sample: bool = False
    """As of `Segment`."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(sample.n_tokens for sample in self.samples)

    def segments(self, adapter: str, loss: Loss | None, temperature: float, budget: int) -> tuple[Segment, ...]:
        """Cut into micro-batches of at most `budget` tokens; depends on these samples only."""
        whole = Segment(adapter, self.samples, loss, self.denominator, temperature, self.share_prefixes, self.by_sample)
        lengths = [sample.n_tokens for sample in self.samples]
        targets = [sample.n_trainable * sample.n_targets for sample in self.samples]
        parts = cut(lengths, budget, whole.shared, targets)
        return tuple(replace(whole, samples=self.samples[part.start : part.stop]) for part in parts)

    def with_logprobs(self, field: str, logprobs: Sequence[FloatArray]) -> StepBatch:
        """The same batch with `reference_logprobs` or `proximal_logprobs` filled in."""
        pairs = zip(self.samples, logprobs, strict=True)
        return replace(self, samples=tuple(replace(sample, **{field: values}) for sample, values in pairs))  # type: ignore[arg-type]
