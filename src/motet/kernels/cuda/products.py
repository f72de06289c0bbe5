"""Products of rows with frozen weights, and of rows with A of their adapters beside them.

Legend: T packed rows, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from motet.kernels.cuda.product_backends import Adapters, ProductShape, ProductWeight, Way, WayTable, shrink

__all__ = ["ProductWeight", "Products"]


class Products:
    """The products of one base."""

    def __init__(self, table: WayTable) -> None:
        self.table = table

    def multiply(self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None = None) -> None:
        """Fill y = x Wᵀ + bias, rounded once; with adapters also `inner` = x A in pieces of K, of all rows in their tiles."""
        parts = self._parts(ProductShape.of(weight), x_TK, weight, y_TN, adapted=adapters is not None)
        if adapters is not None and len(parts) > 1:
            shrink(x_TK, adapters)
            adapters = None
        _by_parts(parts, x_TK, weight, y_TN, adapters, back=False)

    def back(self, slope_TN: Tensor, weight: ProductWeight) -> Tensor:
        """The slope's product with W: [T, K]."""
        out_TK = slope_TN.new_empty(len(slope_TN), weight.weight_NK.shape[1])
        parts = self._parts(ProductShape.of(weight, back=True), slope_TN, weight, out_TK)
        _by_parts(parts, slope_TN, weight, out_TK, None, back=True)
        return out_TK

    def _parts(
        self, shape: ProductShape, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, *, adapted: bool = False
    ) -> list[tuple[int, Way]]:
        """Ways of the rows; Motet's own alone where an address is not as in the trial."""
        library = self.table.library
        tensors = x_TK, weight.weight_NK, y_TN
        if library is not None and any(each.data_ptr() % library.alignment for each in tensors):
            return [(len(x_TK), self.table.own(shape, len(x_TK)))]
        return self.table.split(shape, len(x_TK), adapted=adapted)


def _by_parts(
    parts: list[tuple[int, Way]],
    x_TK: Tensor,
    weight: ProductWeight,
    y_TN: Tensor,
    adapters: Adapters | None,
    *,
    back: bool,
) -> None:
    """Each part of the rows by its way; adapters only with one part, because their tiles name rows of all."""
    first = 0
    for n_rows, way in parts:
        rows = slice(first, first + n_rows)
        way.multiply(x_TK[rows], weight, y_TN[rows], adapters, back=back)
        first += n_rows
