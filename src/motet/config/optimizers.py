"""Optimizers and their rates. A job names an optimizer in `optimizer.type`; without it, that is AdamW."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.core.batch import AdamW, Optimizer
from motet.core.settings import Chosen

Step = Annotated[int, Field(ge=0, le=10**7)]
_WIDTH_POWER = {"llama": 1.5, "qwen": 0.08}
REFERENCE_ROLLOUTS = 128
"""Rollouts of an optimizer update with the default settings, at which the rule was fitted."""
MOST_ROLLOUTS = 1024
"""More rollouts do not raise the rate further; it was measured with 32 and 128."""


def auto_learning_rate(hidden_size: int, model_type: str, rollouts: float | None = None) -> float:
    """A starting rate for LoRA: 4e-5 · (4096 / width)^p · √(rollouts / 128).

    The anchor and p = 0.08 for Qwen-like bases follow the fit that Thinking Machines published for Tinker (2025). For
    other bases p = 1.5, from sweeps at widths 256 and 576. AdamW's noise falls with the square root of the batch, hence
    the root (Malladi et al. 2022, arXiv 2205.10287). The rank plays no part: the update is scaled by alpha / rank.
    `docs/learning.md` has the measurements.

    Args:
        hidden_size: width of the base.
        model_type: of the base, as transformers names it.
        rollouts: of a step, divided by its optimizer updates; None of a job that learns from rows.
    """
    family = "qwen" if model_type.startswith("qwen") else "llama"
    batch = 1.0 if rollouts is None else math.sqrt(min(rollouts, MOST_ROLLOUTS) / REFERENCE_ROLLOUTS)
    return float(4e-5 * (4096 / hidden_size) ** _WIDTH_POWER[family] * batch)


class OptimizerConfig(Chosen):
    """AdamW, per adapter."""

    STEP: ClassVar[type[Optimizer]] = AdamW
    """What takes its steps; each of its fields but `lr` is a field here."""

    lr: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = "auto"
    """Learning rate, between 0 and 1. `auto` derives it from the width and family of the base and the rollouts of an update
    ([The learning rate](learning.md#the-learning-rate)), and prints it."""
    lr_multiplier: float = Field(1.0, gt=0, le=1000)
    """Factor on the learning rate, to adjust `auto`, for instance in a sweep over several bases."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = AdamW.betas
    """AdamW's decay rates, for whoever takes settings from a paper."""
    eps: float = Field(AdamW.eps, gt=0)
    """AdamW's epsilon, for whoever takes settings from a paper."""
    weight_decay: float = Field(AdamW.weight_decay, ge=0)
    """Decoupled weight decay, for long jobs on few rows."""
    clip_norm: float = Field(AdamW.clip_norm, gt=0)
    """Largest gradient norm of the adapter. Lower it if `grad_norm` jumps."""
    warmup_steps: int = Field(0, ge=0, le=10**7)
    """Steps of linear warm-up, for rates above `auto`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate changes after warm-up, over the steps of the job. For a last stretch with less noise."""
    lr_factors: Annotated[dict[Step, Annotated[float, Field(gt=0, le=1e6)]], Field(max_length=64)] = {}
    """Factors on the rate, each from a step on: `{20: 0.3}` trains with 0.3 times the rate from step 20 (counted from 0). For
    whoever lowers it after a plateau; copies in earlier races have it."""
    max_skipped: int = Field(5, ge=1, le=10**7)
    """The job fails after this many steps in a row with a non-finite gradient, and never if a client steps."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[OptimizerConfig]]:
        """See `OPTIMIZERS`."""
        return OPTIMIZERS

    def rate(self, base_rate: float, step: int, steps: int) -> float:
        """The rate of step `step` (from 0) of `steps`: linear warm-up, then constant, or linear or half-cosine decay to 0."""
        if begun := [first for first in self.lr_factors if first <= step]:
            base_rate *= self.lr_factors[max(begun)]
        if step < self.warmup_steps:
            return base_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return base_rate
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        if self.schedule == "linear":
            return base_rate * (1 - progress)
        return base_rate * 0.5 * (1 + math.cos(math.pi * progress))

    def at(self, base_rate: float, step: int, steps: int) -> Optimizer:
        """The settings of step `step` (from 0) of `steps`."""
        names = [field.name for field in dataclasses.fields(self.STEP) if field.name != "lr"]  # type: ignore[arg-type]
        rate = self.rate(base_rate, step, steps)
        return self.STEP(lr=rate, **{name: getattr(self, name) for name in names})  # type: ignore[call-arg]


OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "adamw": OptimizerConfig,
}
"""The values of `optimizer.type`."""


def name_of(step: type[Optimizer]) -> str:
    """The name of the optimizer whose steps these are."""
    return {section.STEP: name for name, section in OPTIMIZERS.items()}[step]
