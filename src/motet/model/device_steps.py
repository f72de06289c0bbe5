"""Decode steps that go from tokens to tokens on a device: what a decoder asks of kernels that have them.

Legend: N rows of a step, V vocabulary, C changed entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from motet.core.types import BoolArray, FloatArray
from motet.model.lora import AdapterWeights

TOKEN, POSITION, DRAWN, KEY, TEMPERATURE, TOP_K, TOP_P, MIN_P, BLOCKS = range(9)
"""Columns of a record. Key: the bits of a uint64. Temperature, top-p, min-p: the bits of a float64. Blocks: to its end."""
GROUPS = 2
PLAIN, MASKED = range(GROUPS)
"""Rows that run ahead, and rows with a grammar, whose next mask depends on the token before."""


class StepLayout(Protocol):
    """A flat array of int64: a record for each row, and for each group the order in which a step computes rows."""

    n_rows: int
    width: int
    """Entries of a record."""
    size: int
    """Entries of the array, zero at first."""

    def order_at(self, group: int) -> int:
        """Index of the first entry of a group's order."""
        ...


@dataclass(frozen=True)
class DrawnTokens:
    """Drawn tokens of N rows, on the host."""

    tokens_N: NDArray[np.int64]
    logprobs_N: FloatArray
    usable_N: BoolArray
    """Whether the row's logits were finite; if not, its token and logprob mean nothing."""


@dataclass(frozen=True)
class DeviceStep:
    """A step for rows whose state is on the device, in a `StepLayout`.

    Each row reads its token, writes its key and value at its position, draws the next token, which becomes its token,
    and counts its position and its number of drawn tokens up by one.
    """

    group: int
    """Whose order of rows to read, and whether rows are masked."""
    n_rows: int
    changes_C2: NDArray[np.int64]
    """Indices and values of entries to set before; the last of an index counts. The next step may overwrite this memory as
    soon as `launch` returns."""
    weights: Sequence[AdapterWeights | None]
    """Of each row; the same object as in the last step of the group if the rows are unchanged."""
    n_blocks: int
    """Blocks of the row with most."""
    truncates: bool
    """Whether some row asks for top-k, top-p or min-p."""
    masks_NV: BoolArray | None = None
    """Tokens that the grammars of a masked group allow."""


class Flight(Protocol):
    """A step that runs on the device. The order of steps and other calls is that of their launches."""

    def tokens(self) -> DrawnTokens:
        """Wait for the step's tokens; called once."""
        ...


class DeviceSteps(Protocol):
    """Steps of one base and one KV cache."""

    def hold(self, layout: StepLayout) -> None:
        """Allocate the device's copy of the array; called once."""
        ...

    def launch(self, step: DeviceStep) -> Flight:
        """Begin a step behind everything that was begun before.

        Blocks and adapters of its rows must stay as they are until its tokens were waited for.
        """
        ...
