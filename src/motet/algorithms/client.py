"""Training driven by a client, which sends the data, names a loss in each request, and decides when to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from motet.algorithms.algorithm import Algorithm, StepBatch
from motet.core.batch import LossFunctions, LossInputs, Sample, TokenLosses
from motet.core.errors import ConfigError
from motet.core.types import FloatArray


class ClientDriven(Algorithm):
    """A client of a service sends the data, and decides what to train and when to step."""

    needs_rewards: ClassVar[bool] = False

    type: Literal["client"] = "client"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a loss, and its settings."""

    tensors: tuple[str, ...]
    """Inputs besides `target_tokens`."""
    settings: Mapping[str, float | None]
    """Settings with their defaults; None means required."""


_LARGEST = float(np.finfo(np.float32).max)
"""Losses are computed in 32 bits."""
_POLICY = ("logprobs", "advantages")
CLIENT_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(("weights",), {}),
    "importance_sampling": Inputs(_POLICY, {}),
    "ppo": Inputs(_POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Inputs(_POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": Inputs((*_POLICY, "sequence_ratio_mask"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "dro": Inputs(_POLICY, {"beta": None}),
}
"""The losses that a client can name. All are sums, without normalisation."""
_ELSEWHERE = {
    "stable_reinforce": "it is not published; use importance_sampling, ppo, cispo or gspo",
    "custom": "run it in the client: forward_backward_custom",
}


def datum(
    tokens: ArrayLike,
    target_tokens: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    logprobs: ArrayLike | None = None,
    advantages: ArrayLike | None = None,
    sequence_ratio_mask: ArrayLike | None = None,
) -> Sample:
    """A client's training data, with the names of the Tinker protocol: T tokens, and the targets at each position.

    Targets and weights may be [T] or [T, K]. The sample has T + 1 tokens: nothing predicts the first, and the last,
    which is not one of the T, predicts nothing.
    """
    ids, targets = np.asarray(tokens, np.int32), np.asarray(target_tokens, np.int32)
    length = len(ids) + 1

    def shifted(values: ArrayLike | None) -> FloatArray:
        if values is None:
            return np.zeros(length, np.float32)
        own = np.asarray(values, np.float32)
        return np.concatenate([np.zeros_like(own[:1]), own])

    return Sample(
        token_ids=np.append(ids, np.int32(0)),
        loss_mask=np.arange(length) > 0,
        logprobs=shifted(logprobs),
        advantages=shifted(advantages),
        versions=np.full(length, -1, np.int32),
        weights=None if weights is None else shifted(weights),
        targets=np.concatenate([np.zeros_like(targets[:1]), targets]),
        ratio_mask=None if sequence_ratio_mask is None else shifted(sequence_ratio_mask),
    )


def batch_of(samples: Sequence[Sample], *, by_sample: bool) -> StepBatch:
    """The samples of one pass, added sample by sample; else neighbours that begin alike run their beginning once.

    Every target of a client's datum is trained, so its prompt cannot be told from what was sampled.
    """
    return StepBatch(tuple(samples), 1.0, share_prefixes=not by_sample, by_sample=by_sample)


@dataclass(frozen=True)
class ClientLoss:
    """One of `CLIENT_LOSSES`, with its settings."""

    name: str
    settings: Mapping[str, float]

    @classmethod
    def of(cls, name: str, given: Mapping[str, float] | None = None) -> ClientLoss:
        """A loss by its name, with settings that replace the defaults.

        Raises:
            ConfigError: there is no such loss or setting; the message lists those that exist.
        """
        if name not in CLIENT_LOSSES:
            instead = _ELSEWHERE.get(name, f"there are {', '.join(CLIENT_LOSSES)}")
            raise ConfigError(f"loss_fn {name!r} is not here: {instead}")
        given, known = given or {}, CLIENT_LOSSES[name].settings
        if odd := sorted(set(given) - set(known)):
            takes = ", ".join(known) or "no settings"
            raise ConfigError(f"loss_fn_config.{odd[0]} is nothing that {name} takes; it takes {takes}")
        settings = {key: given.get(key, default) for key, default in known.items()}
        if missing := [key for key, value in settings.items() if value is None]:
            raise ConfigError(f"{name} needs loss_fn_config.{missing[0]}")
        if odd := [key for key, value in given.items() if not abs(value) <= _LARGEST]:
            raise ConfigError(f"loss_fn_config.{odd[0]} is {given[odd[0]]}, not a finite number of 32 bits")
        return cls(name, {key: value for key, value in settings.items() if value is not None})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Loss of each trainable token [N], and whether a clip touched it [N]."""
        from motet.algorithms.losses import client_losses

        return client_losses(self.name, self.settings, inputs)

    def value(
        self, samples: Sequence[Sample], logprobs: Sequence[FloatArray], functions: LossFunctions | None
    ) -> float:
        """Σ weight · token loss of a segment's samples, whose targets have these logprobs ([T] or [T, K] each)."""
        from motet.algorithms.losses import value_of

        return value_of(self, samples, logprobs, functions)
