"""Frozen weights: used in products, never changed.

If a library chooses its kernel by the number of rows, each product has the rows of one tile (see `arithmetic.py`).

On a CPU, a bfloat16 weight gets a second copy in oneDNN's layout. Otherwise oneDNN reorders the weight in every
product, which takes a quarter to a half of the time at 4 to 32 rows. Both operators are private in torch, so each shape
is tested first. If an operator is missing, or one bit differs from `F.linear`, the copy is dropped.

Legend: T rows, K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.model.arithmetic import Arithmetic, least_rows

_ROWS_TRIED = (4, 32, 128)
_ROWS_COMPARED = 4096


class FrozenWeight(nn.Module):
    """A weight [N, K] and its bias. Each product reads the parameters anew, because sharding may replace them.

    No other module refers to the parameters unless they are tied. A subclass that stores the weight in another form
    implements `dense` (see `packed.py`).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.register_parameter("bias", None if bias is None else _parameter(bias))
        self._settle()

    def _settle(self) -> None:
        self.compute_with(Arithmetic())
        self._reordered: Tensor | None = None
        self._least = least_rows(self.shape[1], self.shape[0], self.dtype)

    def compute_with(self, arithmetic: Arithmetic) -> None:
        """Set the rows per product, forward and backward."""
        n_outputs, n_inputs = self.shape
        self.tile, self._tile_back = arithmetic.tile_of(n_inputs), arithmetic.tile_of(n_outputs)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights in products."""
        return self.weight.dtype

    def dense(self) -> Tensor:
        """The weights [N, K] that products use."""
        return self.weight

    def twins(self, rows: Sequence[int]) -> list[int]:
        """Count, for each of these rows, the other rows that differ from it by a twentieth of its length at most."""
        weight_NK, near_R = self.dense(), torch.zeros(len(rows), dtype=torch.int64)
        rows_RK = weight_NK[list(rows)].float()
        farthest_R1 = rows_RK.norm(dim=1, keepdim=True) / 20
        for block_BK in weight_NK.split(_ROWS_COMPARED):
            near_R += (torch.cdist(rows_RK, block_BK.float()) <= farthest_R1).sum(1).cpu()
        return (near_R - 1).tolist()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., K] → x Wᵀ + b [..., N]; gradients come from `back`."""
        if self.tile:
            return by_tiles(x, self.tile, self.shape[0], self._tile_product())
        return self._with_enough_rows(x, self._product)

    def back(self, grad: Tensor) -> Tensor:
        """Gradient with respect to x [..., K] from that of the product [..., N]."""
        if self._tile_back:
            weight_NK = self.dense()
            return by_tiles(grad, self._tile_back, self.shape[1], lambda rows, out: torch.mm(rows, weight_NK, out=out))
        return self._with_enough_rows(grad, lambda rows: torch.matmul(rows, self.dense()))

    def _product(self, x: Tensor) -> Tensor:
        if self._reordered is None:
            return F.linear(x, self.dense(), self.bias)
        return _reordered_linear(x, self._reordered, self.bias)

    def _tile_product(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Multiply the rows of a tile [tile, K] into an output [tile, N]."""
        bias, reordered = self.bias, self._reordered
        if reordered is not None:
            return lambda rows, out: out.copy_(_reordered_linear(rows, reordered, bias))
        weight_KN = self.dense().t()
        if bias is None:
            return lambda rows, out: torch.mm(rows, weight_KN, out=out)
        return lambda rows, out: torch.addmm(bias, rows, weight_KN, out=out)

    def _with_enough_rows(self, rows: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Pad rows [..., T, K] to the minimum of a small weight's GEMM; products of fewer rows differ in bits."""
        n_rows = rows.shape[-2]
        if n_rows >= self._least:
            return product(rows)
        return product(F.pad(rows, (0, 0, 0, self._least - n_rows)))[..., :n_rows, :]

    def reorder(self) -> None:
        """Create the second copy, in oneDNN's layout."""
        self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS_TRIED[1])

    def let_go(self) -> None:
        """Drop the second copy."""
        self._reordered = None

    def agrees(self) -> bool:
        """Whether products with the second copy have the bits of `F.linear`."""
        generator = torch.Generator().manual_seed(0)
        for rows in (self.tile,) if self.tile else _ROWS_TRIED:
            x = torch.randn(rows, self.weight.shape[1], generator=generator).to(self.weight.dtype)
            if not torch.equal(F.linear(x, self.weight, self.bias), self(x)):
                return False
        return True


def by_tiles(x: Tensor, tile: int, n_outputs: int, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Multiply x [..., K] one tile of rows at a time → [..., N]; copies strided rows and pads the last tile."""
    rows_TK = x.detach().reshape(-1, x.shape[-1]).contiguous()
    n_rows = len(rows_TK)
    if n_rows % tile:
        rows_TK = F.pad(rows_TK, (0, 0, 0, -n_rows % tile))
    out_TN = rows_TK.new_empty(len(rows_TK), n_outputs)
    for rows, out in zip(rows_TK.split(tile), out_TN.split(tile), strict=True):
        product(rows, out)
    return out_TN[:n_rows].view(*x.shape[:-1], n_outputs)


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Wrap a tensor; a parameter is returned unchanged, because it may be tied to another module's."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def reorder_all(weights: Iterable[FrozenWeight]) -> None:
    """Create the second copy of bfloat16 weights on the CPU whose shape passes the test."""
    passed: dict[tuple[int, ...], bool] = {}
    for weight in (weight for weight in weights if type(weight) is FrozenWeight):
        if weight.weight.device.type != "cpu" or weight.weight.dtype != torch.bfloat16:
            continue
        shape = (*weight.weight.shape, weight.bias is not None)
        if passed.get(shape) is False:
            continue
        try:
            weight.reorder()
            if shape not in passed:
                passed[shape] = weight.agrees()
        except (AttributeError, RuntimeError):  # this build of torch lacks the operator
            passed[shape] = False
        if not passed[shape]:
            weight.let_go()


def _reordered_linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return output
