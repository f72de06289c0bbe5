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
from torch import Tensor, nn

from motet.model.arithmetic import least_rows

_ROWS_TRIED = (4, 32, 128)


class FrozenWeight(nn.Module):
    """A weight [N, K] and its bias, read anew for every product: whoever shards a model may exchange the parameters.

    Nothing else refers to the parameters but what they are tied to. A weight that is kept in another form derives from this
    class and says in `dense` how it is read (see `packed.py`).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.register_parameter("bias", None if bias is None else _parameter(bias))
        self._settle()

    def _settle(self) -> None:
        self.tile = 0
        """Rows of every product, 0 for all there are (see `Arithmetic.tile`); set by whoever loads the base."""
        self._reordered: Tensor | None = None
        self._least = least_rows(self.shape.numel(), self.dtype)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are multiplied with."""
        return self.weight.dtype

    def dense(self) -> Tensor:
        """The numbers [N, K] that rows are multiplied with."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., K] → x Wᵀ + b [..., N]; a gradient comes from `back` alone.

        Raises:
            ValueError: the rows are not whole tiles.
        """
        if self.tile:
            return self._by_tiles(x, self.dense().t(), self.bias)
        return self._with_enough_rows(x, self._product)

    def back(self, grad: Tensor) -> Tensor:
        """From a gradient with respect to the product [..., N] to one with respect to x [..., K].

        Raises:
            ValueError: the rows are not whole tiles.
        """
        if self.tile:
            return self._by_tiles(grad, self.dense(), None)
        return self._with_enough_rows(grad, lambda rows: torch.matmul(rows, self.dense()))

    def _product(self, x: Tensor) -> Tensor:
        if self._reordered is None:
            return F.linear(x, self.dense(), self.bias)
        return _reordered_linear(x, self._reordered, self.bias)

    def any_rows(self, x: Tensor) -> Tensor:
        """The product of rows that need not be whole tiles."""
        return self._product(x) if self.tile and x.shape[-2] % self.tile else self(x)

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
        out_TN = rows_TK.new_empty(n_rows, weight_KN.shape[1])
        for rows, out in zip(rows_TK.split(self.tile), out_TN.split(self.tile), strict=True):
            if bias is None:
                torch.mm(rows, weight_KN, out=out)
            else:
                torch.addmm(bias, rows, weight_KN, out=out)
        return out_TN.view(*x.shape[:-1], weight_KN.shape[1])

    def reorder(self) -> None:
        """Make the second copy, in the layout of oneDNN."""
        self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS_TRIED[1])

    def let_go(self) -> None:
        """Let the second copy go."""
        self._reordered = None

    def agrees(self) -> bool:
        """Whether products with the second copy have the bits of `F.linear`."""
        generator = torch.Generator().manual_seed(0)
        for rows in _ROWS_TRIED:
            x = torch.randn(rows, self.weight.shape[1], generator=generator).to(self.weight.dtype)
            if not torch.equal(F.linear(x, self.weight, self.bias), self(x)):
                return False
        return True


def _parameter(tensor: Tensor) -> nn.Parameter:
    """One that is a parameter already stays itself: it may be tied to another."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def reorder_all(weights: Iterable[FrozenWeight]) -> None:
    """Keep the second copy of the bfloat16 weights on the CPU whose shape passes the trial."""
    passed: dict[tuple[int, ...], bool] = {}
    for weight in weights:
        if (
            type(weight) is not FrozenWeight
            or weight.weight.device.type != "cpu"
            or weight.weight.dtype != torch.bfloat16
            or weight.tile
        ):
            continue
        shape = (*weight.weight.shape, weight.bias is not None)
        if passed.get(shape) is False:
            continue
        try:
            weight.reorder()
            if shape not in passed:
                passed[shape] = weight.agrees()
        except (AttributeError, RuntimeError):  # this build of torch has no such operator
            passed[shape] = False
        if not passed[shape]:
            weight.let_go()


def _reordered_linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return output
