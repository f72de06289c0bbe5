"""Refuses samples that alone do not fit into the memory that a base leaves free, before anything is sampled or trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motet.config import EngineConfig
from motet.config.budgets import Need
from motet.core.errors import ConfigError

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel


@dataclass(frozen=True)
class SampleMemory:
    """What can be trained in the memory beside a base that Motet's kernels compute."""

    free: int
    """Bytes."""
    longest: int
    """Tokens of the longest sample, as the engine is configured."""
    recomputed: int
    """The same if all passes compute their layers again."""

    @classmethod
    def of(cls, base: LoraModel, engine: EngineConfig, free: int) -> SampleMemory | None:
        """None if torch computes the base: what it keeps is estimated, so that is told by `motet check` only."""
        from motet.training.memory import longest_sample

        if base.kernels is None:
            return None
        return cls(free, longest_sample(base, engine.kept_tokens, free), longest_sample(base, 0, free))

    def check(self, needs: Sequence[Need]) -> None:
        """Check the samples that jobs have in any case.

        Raises:
            ConfigError: the longest does not fit.
        """
        least = max((need.least for need in needs), default=0)
        if least <= self.longest:
            return
        more = self.recomputed
        way = f"set engine.recompute to true, with which {more:,} fit, or " if more >= least else ""
        raise ConfigError(
            f"the jobs have a sample of at least {least:,} tokens, and beside the base {self.free / 2**30:.1f} GiB are "
            f"free, in which one of {self.longest:,} can be trained; {way}shorten such rows, or, where the "
            f"prompt alone is as long, leave them out by data.max_prompt_tokens: {max(self.longest - 1, 1)}"
        )
