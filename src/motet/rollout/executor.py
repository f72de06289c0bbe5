"""What a decoder asks of the model: logits through the KV cache, tokens drawn from them, and steps that run ahead.

Legend: T packed rows, N sampled rows, V vocabulary, C changed entries of a `StepTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from motet.core.types import BoolArray, FloatArray
from motet.model.lora import AdapterWeights
from motet.model.state_cache import StateCache
from motet.rollout.sequences import SampledSequence
from motet.rollout.step_table import StepTable


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one sequence or prompt that are not in the cache yet."""

    weights: AdapterWeights | None
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int = StateCache.no_slot
    n_logits: int = 1
    """Number of its last tokens to return logits for."""


@dataclass(frozen=True)
class DrawnTokens:
    """DrawnTokens tokens of N rows, on the host."""

    tokens_N: NDArray[np.int64]
    logprobs_N: FloatArray
    usable_N: BoolArray
    """Whether the row's logits were finite; if not, its token and logprob mean nothing."""


class Executor(Protocol):
    """Computes logits and draws tokens, one call after the other."""

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        """Raw logits [N, V] for the last tokens of each input; the next call may overwrite them."""
        ...

    def draw(self, rows: Sequence[tuple[SampledSequence, int]], raw_NV: Tensor) -> DrawnTokens:
        """Draw a token for each row: a sequence, and the number of drafted tokens before this one."""
        ...


@dataclass(frozen=True)
class DeviceStep:
    """A step for rows whose state is on the device, in the layout of `StepTable`.

    Each row reads its token, writes its key and value at its position, draws the next token, which becomes its token,
    and counts its position and its number of drawn tokens up by one.
    """

    group: int
    """Whose order of rows to read, and whether rows are masked: see `StepTable`."""
    n_rows: int
    changes_C2: NDArray[np.int64]
    """Indices and values of entries to set before; the next step may overwrite this memory as soon as `launch` returns."""
    weights: Sequence[AdapterWeights | None]
    """Of each row; the same object as in the last step of the group if it is unchanged."""
    masks_NV: BoolArray | None = None
    """Tokens that the grammars of a masked group allow."""


class Flight(Protocol):
    """A step that runs on the device. The order of steps and other calls is that of their launches."""

    def tokens(self) -> DrawnTokens:
        """Wait for the step's tokens."""
        ...


@runtime_checkable
class AheadExecutor(Executor, Protocol):
    """An executor whose steps go from tokens to tokens on the device, so that the next may begin before they are read."""

    def hold(self, table: StepTable) -> None:
        """Allocate the device's copy of a table; called once."""
        ...

    def launch(self, step: DeviceStep) -> Flight:
        """Begin a step behind everything that was begun before.

        Blocks and adapters of its rows must stay as they are until its tokens were waited for.
        """
        ...
