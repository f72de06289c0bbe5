"""A step of its optimizer that an adapter is due, as kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from motet.core.batch import Optimizer
from motet.model.lora import AdapterWeights
from motet.model.unit_sums import UnitSums


@dataclass(frozen=True)
class AdapterStep:
    """Kernels update masters and state in place."""

    optimizer: Optimizer
    number: int
    """From 1."""
    masters: Tensor
    state: Sequence[Tensor]
    """The vectors of `Optimizer.STATE`, fp32, as the masters."""
    gradient: Tensor | None
    """What was added in fp32; None if nothing was."""
    sums: UnitSums | None
    """What was added in whole numbers; None if nothing was."""
    new: AdapterWeights
    """The compute copy of the new masters, still empty."""

    def total(self) -> Tensor:
        """The whole gradient in fp32."""
        if self.sums is None:
            assert self.gradient is not None
            return self.gradient
        return self.sums.total() if self.gradient is None else self.gradient + self.sums.total()


@dataclass(frozen=True)
class StepNorms:
    """Euclidean norms of a step."""

    gradient: float
    """Before clipping; if it is not finite, masters and state are as before."""
    weights: float
    """Of the adapter's matrices after the step."""
