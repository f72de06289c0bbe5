"""What a decoder asks of the model: logits through the KV cache, tokens drawn from them, and steps that run ahead.

Legend: N sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from motet.model.device_steps import DeviceSteps, DrawnTokens
from motet.model.lora import AdapterWeights
from motet.model.state_cache import StateCache
from motet.rollout.sequences import SampledSequence


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one sequence or prompt that are not in the cache yet."""

    weights: AdapterWeights | None
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int = StateCache.no_slot


class Executor(Protocol):
    """Computes logits and draws tokens, one call after the other."""

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        """Raw logits [N, V] for the last token of each input; the next call may overwrite them."""
        ...

    def draw(self, sequences: Sequence[SampledSequence], raw_NV: Tensor) -> DrawnTokens:
        """Draw the next token of each sequence, from its row of logits."""
        ...


@runtime_checkable
class AheadExecutor(Executor, DeviceSteps, Protocol):
    """An executor whose steps go from tokens to tokens on the device, so that the next may begin before they are read."""
