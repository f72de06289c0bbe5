"""Frozen weights: multiplied with, never changed.

On a GPU that is exact, products have the rows of one tile each, because cuBLAS chooses a kernel by the number of rows.

On a CPU they are kept in the layout that its kernels compute with, made once instead of at every product. oneDNN reorders a
bfloat16 weight whenever it multiplies with it, which at 4 to 32 rows takes a quarter to a half of the time. torch has the
reordered form and the product with it as private operators, so they are tried on every shape first: where they are missing, or
one bit differs from `F.linear`, the weight stays as it is.

Legend: T rows, K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.layout import least_rows

_ROWS_TRIED = (4, 32, 128)


class FrozenWeight:
    """A weight [N, K] and its bias, to be multiplied with and never changed."""

    def __init__(self, plain: Tensor, bias: Tensor | None) -> None:
        self.plain = plain
        self.bias = bias
        self.tile = 0
        """Rows of every product, 0 for all there are (see `Arithmetic.tile`); set by whoever loads the base."""
        self._packed: Tensor | None = None
        self._least = least_rows(plain.numel(), plain.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [..., K] → x Wᵀ + b [..., N]; without a gradient.

        Raises:
            ValueError: the rows are not whole tiles.
        """
        if self.tile:
            return self._by_tiles(x, self.plain.t(), self.bias)
        return self._with_enough_rows(x, self._product)

    def back(self, grad: Tensor) -> Tensor:
        """From a gradient with respect to the product [..., N] to one with respect to x [..., K].

        Raises:
            ValueError: the rows are not whole tiles.
        """
        if self.tile:
            return self._by_tiles(grad, self.plain, None)
        return self._with_enough_rows(grad, lambda rows: torch.matmul(rows, self.plain))

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.plain, self.bias)
        return _packed_linear(x, self._packed, self.bias)

    def _with_enough_rows(self, rows: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Of few rows [..., T, K] a small weight's product would not be made by the GEMM, and would have other bits."""
        n_rows = rows.shape[-2]
        if n_rows >= self._least:
            return product(rows)
        return product(F.pad(rows, (0, 0, 0, self._least - n_rows)))[..., :n_rows, :]

    def _by_tiles(self, x: Tensor, weight_KN: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [..., K] a tile of rows at a time → [..., N]; rows that lie apart are copied."""
        rows_TK = x.detach().reshape(-1, weight_KN.shape[0]).contiguous()
        n_rows = len(rows_TK)
        if n_rows % self.tile:
            raise ValueError(f"{n_rows} rows are not a multiple of {self.tile}; pad them (see Arithmetic.rows)")
        found_TN = rows_TK.new_empty(n_rows, weight_KN.shape[1])
        for rows, found in zip(rows_TK.split(self.tile), found_TN.split(self.tile), strict=True):
            if bias is None:
                torch.mm(rows, weight_KN, out=found)
            else:
                torch.addmm(bias, rows, weight_KN, out=found)
        return found_TN.view(*x.shape[:-1], weight_KN.shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], and whether there is a bias."""
        return (*self.plain.shape, int(self.bias is not None))

    def pack(self) -> None:
        """Make the second copy."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, _ROWS_TRIED[1])

    def unpack(self) -> None:
        """Let the second copy go."""
        self._packed = None

    def agrees(self) -> bool:
        """Whether products with the second copy have the bits of `F.linear`."""
        generator = torch.Generator().manual_seed(0)
        for rows in _ROWS_TRIED:
            x = torch.randn(rows, self.plain.shape[1], generator=generator).to(self.plain.dtype)
            if not torch.equal(F.linear(x, self.plain, self.bias), self(x)):
                return False
        return True


def pack_all(weights: Iterable[FrozenWeight]) -> None:
    """Pack the bfloat16 weights on the CPU whose shape passes the trial."""
    passed: dict[tuple[int, ...], bool] = {}
    for weight in weights:
        if weight.plain.device.type != "cpu" or weight.plain.dtype != torch.bfloat16 or weight.tile:
            continue
        if passed.get(weight.shape) is False:
            continue
        try:
            weight.pack()
            if weight.shape not in passed:
                passed[weight.shape] = weight.agrees()
        except (AttributeError, RuntimeError):  # this build of torch has no such operator
            passed[weight.shape] = False
        if not passed[weight.shape]:
            weight.unpack()


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output
