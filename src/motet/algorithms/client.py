"""Learning that a client drives: it brings the data, names a loss of each request, and says when to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from motet.algorithms.algorithm import Algorithm
from motet.batch import Sample
from motet.types import FloatArray

if TYPE_CHECKING:
    from motet.algorithms.losses import LossInputs, TokenLosses


class ClientDriven(Algorithm):
    """A client of a service says what is trained, and when a step is made. Of the data only a prompt is used, as a probe."""

    type: Literal["client"] = "client"


@dataclass(frozen=True)
class Inputs:
    """What a loss wants of each datum, and its settings."""

    tensors: tuple[str, ...]
    """Besides `target_tokens`."""
    settings: Mapping[str, float | None]
    """Defaults; None has to be given."""


_POLICY = ("logprobs", "advantages")
CLIENT_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(("weights",), {}),
    "importance_sampling": Inputs(_POLICY, {}),
    "ppo": Inputs(_POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Inputs(_POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": Inputs((*_POLICY, "sequence_ratio_mask"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "dro": Inputs(_POLICY, {"beta": None}),
}
"""The losses that a client can name. All are summed, and nothing is normalised."""


@dataclass(frozen=True)
class ClientLoss:
    """One of `CLIENT_LOSSES`, with its settings."""

    name: str
    settings: Mapping[str, float]

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Loss of each trainable token [N], and whether a clip touched it [N]."""
        from motet.algorithms.losses import client_losses

        return client_losses(self.name, self.settings, inputs)

    def value(self, samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> float:
        """Σ weight · token loss of samples whose targets have these logprobs ([T] or [T, K] each)."""
        from motet.algorithms.losses import value_of

        return value_of(self, samples, logprobs)
