"""Learning rates: the default that a base's width suggests, warm-up and schedule. Pure functions."""

from __future__ import annotations

import math

from motet.config import OptimizerConfig
from motet.core.batch import AdamW

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


def learning_rate(config: OptimizerConfig, base_rate: float, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then constant, or linear or half-cosine decay to 0."""
    if begun := [first for first in config.lr_factors if first <= step]:
        base_rate *= config.lr_factors[max(begun)]
    if step < config.warmup_steps:
        return base_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return base_rate
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.schedule == "linear":
        return base_rate * (1 - progress)
    return base_rate * 0.5 * (1 + math.cos(math.pi * progress))


def adamw(config: OptimizerConfig, base_rate: float, step: int, steps: int) -> AdamW:
    """AdamW settings of step `step` (from 0) of `steps`."""
    rate = learning_rate(config, base_rate, step, steps)
    return AdamW(rate, config.betas, config.eps, config.weight_decay, config.clip_norm)
