"""Refuses samples that alone do not fit into the memory that a base leaves free, before anything is sampled or trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from motet.config import EngineConfig
from motet.config.budgets import Need
from motet.core.errors import ConfigError

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel


def check_samples(base: LoraModel, engine: EngineConfig, free: int, needs: Sequence[Need]) -> None:
    """Motet's kernels say what a pass keeps. What torch keeps is estimated, so that is told by `motet check` only.

    Raises:
        ConfigError: the longest sample of the jobs needs more than `free` bytes.
    """
    from motet.training.memory import pass_memory

    least = max((need.least for need in needs), default=0)
    if base.kernels is None or not least:
        return
    fits = pass_memory(base, recompute=engine.recompute).longest(free)
    if least <= fits:
        return
    more = 0 if engine.recompute else pass_memory(base, recompute=True).longest(free)
    way = f"set engine.recompute, with which {more:,} fit, or " if more >= least else ""
    raise ConfigError(
        f"the jobs have a sample of at least {least:,} tokens, and beside the base {free / 2**30:.1f} GiB are free, in which "
        f"one of {fits:,} can be trained; {way}shorten such rows, or leave them out by data.max_prompt_tokens"
    )
