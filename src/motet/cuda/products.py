"""Products of rows with frozen weights, and of rows with A of their adapters beside them.

Legend: T packed rows, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from motet.cuda.ways import Adapters, ProductShape, ProductWeight, WayTable

__all__ = ["ProductWeight", "Products"]


class Products:
    """The products of one base."""

    def __init__(self, table: WayTable) -> None:
        self.table = table

    def multiply(self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None = None) -> None:
        """Fill y = x Wᵀ + bias, rounded once; with adapters also `inner` = x A in pieces of K, of all rows in their tiles."""
        way = self.table.choose(ProductShape.of(weight), len(x_TK), adapted=adapters is not None)
        way.multiply(x_TK, weight, y_TN, adapters, back=False)

    def back(self, slope_TN: Tensor, weight: ProductWeight) -> Tensor:
        """The slope's product with W: [T, K]."""
        out_TK = slope_TN.new_empty(len(slope_TN), weight.weight_NK.shape[1])
        way = self.table.choose(ProductShape.of(weight, back=True), len(slope_TN))
        way.multiply(slope_TN, weight, out_TK, None, back=True)
        return out_TK

    def rows_of_pass(self, n_rows: int, weights: list[ProductWeight]) -> int:
        """The number of rows to which a pass with these products is padded."""
        return self.table.rows_of_pass(n_rows, [ProductShape.of(weight) for weight in weights])
