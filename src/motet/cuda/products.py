"""Products of rows with frozen weights, and of rows with A of their adapters beside them.

Legend: T packed rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from motet.cuda.adapters import AdapterGroup, AdapterTables


@dataclass(frozen=True, eq=False)
class ProductWeight:
    """A frozen product of the base."""

    weight_NK: Tensor
    """Contiguous."""
    bias_N: Tensor | None = None


class Products:
    """The products of one base."""

    def multiply(
        self,
        x_TK: Tensor,
        weight: ProductWeight,
        y_TN: Tensor,
        adapters: tuple[AdapterTables, AdapterGroup] | None = None,
    ) -> None:
        """Fill y = x Wᵀ + bias, rounded once; with adapters also `inner` = x A in pieces of K, of all rows in their tiles."""
        raise NotImplementedError

    def back(self, slope_TN: Tensor, weight: ProductWeight) -> Tensor:
        """The slope's product with W: [T, K]."""
        raise NotImplementedError
