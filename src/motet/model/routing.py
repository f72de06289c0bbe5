"""Which rows of a packed batch belong to which adapter, while sampling and while training.

Sampling puts adapters of equal layout into one batched product. Training gives each segment products of its own, so that no
reduction ever meets another tenant's rows. Both give a row the same bits.

Legend: T packed rows, K inputs, N outputs, R rank, W width of siblings' A side by side, A adapters in a batch, M padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.model.layout import ROWS, round_up
from motet.model.lora import AdapterWeights, Products, Siblings

# --- sampling: adapters of equal layout share one batched product -----------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    """Adapters of equal layout in one batch of rows."""

    products: dict[str, Products]  # [A, K, W] and [A, R, N]
    covers: slice | Tensor
    """Rows of the packed input that have one of these adapters."""
    rows_AM: Tensor | None
    """Row of each product row; None where the covered rows are just those."""
    source: Tensor | None
    """Place of each covered row among the product rows; None where they agree."""


class SamplerRouting:
    """Rows of a decode or prefill batch; each adapter's rows are contiguous."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets

    def linear(self, siblings: Siblings, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of all siblings to x [1, T, K] → [1, T, N] each."""
        y = siblings.weight(x)
        for bucket in self._buckets:
            products = bucket.products.get(siblings.leader)
            if products is None:
                continue
            rows = x[0, bucket.covers] if bucket.rows_AM is None else x[0].index_select(0, bucket.rows_AM)
            inner = _product(rows, products.a)
            rank = products.bs[0][1].shape[-2]
            for column, (index, b) in enumerate(products.bs):
                update = _product(inner[:, column * rank : (column + 1) * rank], b)
                if bucket.source is not None:
                    update = update.index_select(0, bucket.source)
                self._add(y[0], bucket.covers, siblings.columns(index), update)
        return tuple(y.split(siblings.sizes, dim=-1))

    @staticmethod
    def _add(y_TN: Tensor, covers: slice | Tensor, columns: slice, update: Tensor) -> None:
        if isinstance(covers, slice):
            y_TN[covers, columns].add_(update)  # `+=` would copy the result onto itself once more
        else:
            y_TN[covers, columns] += update


def _product(rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
    """Rows of A adapters, equally many each, times their weights: [M, K], [A, K, N] → [M, N]."""
    n_adapters = weights_AKN.shape[0]
    if n_adapters == 1:
        return torch.mm(rows_MK, weights_AKN[0])
    return torch.bmm(rows_MK.unflatten(0, (n_adapters, -1)), weights_AKN).flatten(0, 1)


def _stack(adapters: Sequence[dict[str, Products]]) -> dict[str, Products]:
    """One contiguous tensor per product: `bmm` copies anything else at every call."""
    if len(adapters) == 1:
        return {
            leader: Products(one.a[None], tuple((index, b[None]) for index, b in one.bs))
            for leader, one in adapters[0].items()
        }
    found = {}
    for leader, first in adapters[0].items():
        own = [products[leader] for products in adapters]
        bs = [(index, torch.stack([one.bs[place][1] for one in own])) for place, (index, _) in enumerate(first.bs)]
        found[leader] = Products(torch.stack([one.a for one in own]), tuple(bs))
    return found


class AdapterStacks:
    """Adapters of a batch stacked for batched products; the last compositions are kept, so a steady batch copies nothing."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._made: dict[tuple[int, ...], tuple[tuple[AdapterWeights, ...], dict[str, Products]]] = {}

    def products(self, adapters: tuple[AdapterWeights, ...]) -> dict[str, Products]:
        """[A, K, W] and [A, R, N] by leader."""
        key = tuple(id(weights) for weights in adapters)
        found = self._made.pop(key, None)
        if found is None:
            found = (adapters, _stack([weights.products for weights in adapters]))
        self._made[key] = found
        while len(self._made) > self._keep:
            del self._made[next(iter(self._made))]
        return found[1]

    def forget(self) -> None:
        """Drop every stack (a version was unloaded)."""
        self._made.clear()

    def routing(self, runs: Sequence[tuple[AdapterWeights | None, int, int]], device: torch.device) -> SamplerRouting:
        """Routing of runs (weights, first row, number of rows) that each belong to one adapter."""
        by_layout: dict[int, list[tuple[AdapterWeights, int, int]]] = {}
        for weights, start, length in runs:
            if weights is not None:  # a base makes each layout once, so equal ones are the same object
                by_layout.setdefault(id(weights.layout), []).append((weights, start, length))
        return SamplerRouting([self._bucket(members, device) for members in by_layout.values()])

    def _bucket(self, members: list[tuple[AdapterWeights, int, int]], device: torch.device) -> _Bucket:
        longest = max(length for _, _, length in members)
        padded = max(round_up(longest, ROWS), members[0][0].layout.least_rows)
        rows: list[int] = []
        covers: list[int] = []
        source: list[int] = []
        for place, (_, start, length) in enumerate(members):
            rows.extend(start + min(row, length - 1) for row in range(padded))
            covers.extend(range(start, start + length))
            source.extend(range(place * padded, place * padded + length))
        contiguous = covers[-1] - covers[0] == len(covers) - 1
        whole = contiguous and rows == covers
        return _Bucket(
            self.products(tuple(weights for weights, _, _ in members)),
            slice(covers[0], covers[-1] + 1) if contiguous else torch.tensor(covers, device=device),
            None if whole else torch.tensor(rows, device=device),
            None if whole else torch.tensor(source, device=device),
        )


# --- training: each segment has products of its own, so that reductions never meet another tenant's rows ---------------


@dataclass(frozen=True)
class TrainSegment:
    """A stretch of packed rows that trains one adapter."""

    start: int
    stop: int
    weights: AdapterWeights
    gradients: dict[str, Products] | None
    """fp32 views that gradients are added to; None where there is no backward pass."""


class TrainerRouting:
    """Rows of a packed training batch; gradients of the adapters are added as the backward pass meets each layer."""

    def __init__(self, segments: Sequence[TrainSegment], device: torch.device, *, backward: bool) -> None:
        self.segments = tuple(segments)
        self._anchor = torch.zeros((), device=device, requires_grad=backward)

    def linear(self, siblings: Siblings, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of all siblings to x [1, T, K] → [1, T, N] each."""
        found: tuple[Tensor, ...] = _TrainedLinears.apply(x, self._anchor, siblings, self)  # type: ignore[no-untyped-call]
        return found


class _TrainedLinears(torch.autograd.Function):
    """Base and adapters of siblings in one node: the base gets no gradient, the adapters' go straight to their arenas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, siblings: Siblings, routing: TrainerRouting) -> tuple[Tensor, ...]:
        ctx.siblings, ctx.routing = siblings, routing
        y = siblings.weight(x)
        inners = []
        for segment in routing.segments:
            products = segment.weights.products.get(siblings.leader)
            if products is None:
                continue
            rows, rank = slice(segment.start, segment.stop), segment.weights.layout.rank
            inner = torch.mm(x[0, rows], products.a)
            inners.append(inner)
            for column, (index, b) in enumerate(products.bs):
                y[0, rows, siblings.columns(index)].add_(torch.mm(inner[:, column * rank : (column + 1) * rank], b))
        ctx.save_for_backward(x, *inners)
        return tuple(y.split(siblings.sizes, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        siblings, routing = ctx.siblings, ctx.routing
        x, *inners = ctx.saved_tensors
        grad_y = torch.cat(grads, dim=-1) if len(grads) > 1 else grads[0]
        grad_x = torch.matmul(grad_y, siblings.weight.plain) if ctx.needs_input_grad[0] else None
        remaining = iter(inners)
        for segment in routing.segments:
            products = segment.weights.products.get(siblings.leader)
            if products is None:
                continue
            rows, rank, inner = slice(segment.start, segment.stop), segment.weights.layout.rank, next(remaining)
            own = [grad_y[0, rows, siblings.columns(index)] for index, _ in products.bs]
            parts = [torch.mm(grad, b.t()) for grad, (_, b) in zip(own, products.bs, strict=True)]
            pad = inner.shape[-1] - rank * len(parts)
            parts.extend([inner.new_zeros(len(inner), pad)] if pad else [])
            grad_inner = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
            if segment.gradients is not None:
                sums = segment.gradients[siblings.leader]
                sums.a.add_(torch.mm(x[0, rows].t(), grad_inner), alpha=segment.weights.scaling)
                for column, (grad, (_, total)) in enumerate(zip(own, sums.bs, strict=True)):
                    total.add_(torch.mm(inner[:, column * rank : (column + 1) * rank].t(), grad))
            if grad_x is not None:
                grad_x[0, rows].add_(torch.mm(grad_inner, products.a.t()))
        return grad_x, None, None, None
