"""Adapters on experts: assigns an expert's rows to adapters, and adds the adapters' products.

An expert's rows are ordered by adapter, and each adapter's rows are padded separately. So an adapter's products and
sums over rows contain only its own rows. Sampling and training multiply in the same way.

Legend: T packed rows, K inputs, N outputs, R rank, W padded rank, M padded rows of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.arithmetic import ROWS, Arithmetic, round_up
from motet.model.frozen_weight import by_tiles
from motet.model.lora import ExpertRun
from motet.model.packed import PackedExperts
from motet.model.unit_sums import add_part


@dataclass(frozen=True)
class ExpertProjection:
    """One of an expert's frozen products, with the facts that its adapters need."""

    path: str
    """Path of the parameter with the weights of all experts."""
    number: int
    weights: Tensor | PackedExperts  # [E, N, K], or [E, K, N] if transposed
    bias: Tensor | None  # [N]
    transposed: bool
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    first: int = 0
    """Number of the first expert in `weights` and in the gradients of runs."""

    def _weight(self) -> Tensor:
        weight = self.weights[self.number - self.first]
        return weight.t() if self.transposed else weight

    @property
    def in_tiles(self) -> bool:
        """Whether some of its sums are so long that its products need tiles."""
        return any(self.arithmetic.tile_of(size) for size in self.weights.shape[1:])

    def base(self, rows_MK: Tensor) -> Tensor:
        """The frozen product, [M, N]."""
        tile = self.arithmetic.tile_of(rows_MK.shape[1])
        if not tile:
            return F.linear(rows_MK, self._weight(), self.bias)
        product_MN = self.product(rows_MK, self._weight().t())
        return product_MN if self.bias is None else product_MN.add_(self.bias)

    def back(self, grad_MN: Tensor) -> Tensor:
        """Gradient with respect to the rows, [M, K], from that of the product."""
        return self.product(grad_MN, self._weight())

    def product(self, left_MK: Tensor, right_KN: Tensor) -> Tensor:
        """Rows times a matrix, [M, N], in tiles if the sums are long."""
        tile = self.arithmetic.tile_of(left_MK.shape[1])
        if not tile:
            return left_MK @ right_KN
        return by_tiles(left_MK, tile, right_KN.shape[1], lambda rows, out: torch.mm(rows, right_KN, out=out))


@dataclass(frozen=True)
class ExpertShare:
    """The rows of one expert that belong to one run of the batch."""

    run: int
    """Index of the run; one past the last for rows without an adapter."""
    first: int
    last: int
    """End of the run's rows among the expert's rows, including padding."""


def runs_of_rows(runs: Sequence[ExpertRun], n_rows: int) -> Tensor:
    """Index [T] of each packed row's run; one past the last for rows without one."""
    run_T = torch.full((n_rows,), len(runs))
    for index, run in enumerate(runs):
        run_T[run.start : run.stop] = index
    return run_T


def room(runs: Sequence[ExpertRun], run: int, n_rows: int, dtype: torch.dtype) -> int:
    """Rows reserved in an expert's product for a run with `n_rows` rows."""
    least = runs[run].weights.layout.least_expert_rows(dtype) if run < len(runs) else 0
    return max(round_up(n_rows, ROWS), least)


def project(
    runs: Sequence[ExpertRun], projection: ExpertProjection, rows_MK: Tensor, shares: Sequence[ExpertShare]
) -> Tensor:
    """One projection of an expert, with the adapters of its rows, [M, N]."""
    own = [
        (runs[share.run], share)
        for share in shares
        if share.run < len(runs) and projection.path in runs[share.run].weights.matrices
    ]
    if not own and isinstance(projection.weights, Tensor) and not projection.in_tiles:
        return projection.base(rows_MK)
    anchor = own[0][0].anchor if own else None
    said: Tensor = _Adapted.apply(rows_MK, anchor, projection, own)  # type: ignore[no-untyped-call]
    return said


class _Adapted(torch.autograd.Function):
    """Frozen product and adapters in one autograd node.

    The base gets no gradient; adapters' gradients go directly to their arenas.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_MK: Tensor,
        anchor: Tensor | None,
        projection: ExpertProjection,
        own: Sequence[tuple[ExpertRun, ExpertShare]],
    ) -> Tensor:
        ctx.projection, ctx.own = projection, own
        y_MN = projection.base(rows_MK)
        inners = []
        for run, share in own:
            matrices, number = run.weights.matrices[projection.path], projection.number
            inner_MW = projection.product(rows_MK[share.first : share.last], matrices.a[number])
            b_RN = matrices.bs[0][1][number]
            y_MN[share.first : share.last].addmm_(inner_MW[:, : len(b_RN)], b_RN)
            inners.append(inner_MW)
        ctx.save_for_backward(rows_MK, *inners)
        return y_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        projection: ExpertProjection = ctx.projection
        rows_MK, *inners = ctx.saved_tensors
        grad_MN = grads[0].contiguous()
        grad_MK = projection.back(grad_MN)
        for (run, share), inner_MW in zip(ctx.own, inners, strict=True):
            place = slice(share.first, share.last)
            grad_inner_MW = _backward(run, projection, rows_MK[place], inner_MW, grad_MN[place])
            grad_MK[place].addmm_(grad_inner_MW, run.weights.matrices[projection.path].a[projection.number].t())
        return grad_MK, None, None, None


def _backward(
    run: ExpertRun, projection: ExpertProjection, rows_MK: Tensor, inner_MW: Tensor, grad_MN: Tensor
) -> Tensor:
    """Add the gradients of an adapter; returns the gradient of the products with A, [M, W]."""
    number = projection.number
    b_RN = run.weights.matrices[projection.path].bs[0][1][number]
    rank = len(b_RN)
    back_NR = b_RN.t() if rank > 1 else F.pad(b_RN.t(), (0, ROWS - 1))  # a product with a vector is not a GEMM
    grad_inner_MW = F.pad(projection.product(grad_MN, back_NR)[:, :rank], (0, inner_MW.shape[1] - rank))
    if run.gradients is not None:
        sums, place = run.gradients[projection.path], number - projection.first
        add_part(sums.bs[0][1][place], torch.mm(inner_MW[:, :rank].t(), grad_MN), 1.0, run.sums)
        add_part(sums.a[place], torch.mm(rows_MK.t(), grad_inner_MW), run.scaling, run.sums)
    return grad_inner_MW
