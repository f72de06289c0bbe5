"""Learning rates: the default that a base's width suggests, warm-up and schedule. Pure functions."""

from __future__ import annotations

import math

from motet.batch import AdamW
from motet.config import OptimizerConfig

_WIDTH_POWER = {"llama": 1.5, "qwen": 0.08}


def auto_learning_rate(hidden_size: int, model_type: str) -> float:
    """A starting rate for LoRA with reinforcement learning: 4e-5 · (4096 / width)^p.

    The anchor and p = 0.08 for Qwen-like bases follow the fit that Thinking Machines published for Tinker (2025). For
    other bases p = 1.5, from sweeps at widths 256 and 576; `docs/learning.md` has the curves.
    """
    family = "qwen" if model_type.startswith("qwen") else "llama"
    return float(4e-5 * (4096 / hidden_size) ** _WIDTH_POWER[family])


def learning_rate(config: OptimizerConfig, base_rate: float, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then constant, or linear or half-cosine decay to 0."""
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
