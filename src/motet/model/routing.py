"""Which rows of a packed batch belong to which adapter, while sampling and while training.

Adapters of equal layout share one batched product. Sums over rows, which only gradients have, are made for each segment alone
(or side by side in one call), so that no reduction ever meets another tenant's rows. A row has the same bits in any company.

Legend: T packed rows, K inputs, N outputs, R rank, W width of siblings' A side by side, A adapters in a batch, M padded rows of
each, S segments of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.model.layout import LEAST_FILL, ROWS, round_up
from motet.model.lora import AdapterLayout, AdapterWeights, Products, Siblings

Run = tuple[AdapterWeights | None, int, int]
"""Rows of one adapter that follow each other: weights (None for the base), first row, number of rows."""

# --- a batched product for adapters of equal layout -------------------------------------------------------------------


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
    padded: int
    """M."""

    def gather(self, x_TK: Tensor) -> Tensor:
        """The rows of the products: [T, K] → [A·M, K]; a view where the covered rows are just those."""
        return x_TK[self.covers] if self.rows_AM is None else x_TK.index_select(0, self.rows_AM)

    def put(self, y_TN: Tensor, rows: Tensor) -> None:
        """Bring back what `gather` took out, [A·M, N], changed in place."""
        if self.source is not None:
            y_TN[self.covers] = rows.index_select(0, self.source)

    def apply(self, siblings: Siblings, x_TK: Tensor, y_TN: Tensor) -> Tensor | None:
        """Add the adapters of siblings to y; returns the products with A, [A·M, W], where there are any."""
        products = self.products.get(siblings.leader)
        if products is None:
            return None
        inner, y = _product(self.gather(x_TK), products.a), self.gather(y_TN)
        rank = products.bs[0][1].shape[-2]
        for column, (index, b) in enumerate(products.bs):
            _add_product(y[:, siblings.columns(index)], inner[:, column * rank : (column + 1) * rank], b)
        self.put(y_TN, y)
        return inner


def _bucket(
    members: Sequence[tuple[AdapterWeights, int, int]], products: dict[str, Products], device: torch.device
) -> _Bucket:
    """Runs of adapters of one layout, with their stacked weights."""
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
        products,
        slice(covers[0], covers[-1] + 1) if contiguous else torch.tensor(covers, device=device),
        None if whole else torch.tensor(rows, device=device),
        None if whole else torch.tensor(source, device=device),
        padded,
    )


def _product(rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
    """Rows of A adapters, equally many each, times their weights: [M, K], [A, K, N] → [M, N]."""
    n_adapters = weights_AKN.shape[0]
    if n_adapters == 1:
        return torch.mm(rows_MK, weights_AKN[0])
    return torch.bmm(rows_MK.unflatten(0, (n_adapters, -1)), weights_AKN).flatten(0, 1)


def _add_product(sums_MN: Tensor, rows_MK: Tensor, weights_AKN: Tensor) -> None:
    """Add what `_product` would give, rounded once, together with the sum."""
    n_adapters = weights_AKN.shape[0]
    if n_adapters == 1:
        sums_MN.addmm_(rows_MK, weights_AKN[0])
    else:
        sums_MN.unflatten(0, (n_adapters, -1)).baddbmm_(rows_MK.unflatten(0, (n_adapters, -1)), weights_AKN)


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


# --- sampling -----------------------------------------------------------------------------------------------------------


class SamplerRouting:
    """Rows of a decode or prefill batch; each adapter's rows are contiguous."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets

    def linear(self, siblings: Siblings, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of all siblings to x [1, T, K] → [1, T, N] each."""
        y = siblings.weight(x)
        for bucket in self._buckets:
            bucket.apply(siblings, x[0], y[0])
        return tuple(y.split(siblings.sizes, dim=-1))


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

    def routing(self, runs: Sequence[Run], device: torch.device) -> SamplerRouting:
        """Routing of runs that each belong to one adapter."""
        return SamplerRouting(
            [
                _bucket(members, self.products(tuple(weights for weights, _, _ in members)), device)
                for members in _by_layout(runs)
            ]
        )


def _by_layout(runs: Iterable[Run]) -> list[list[tuple[AdapterWeights, int, int]]]:
    found: dict[int, list[tuple[AdapterWeights, int, int]]] = {}
    for weights, start, length in runs:
        if weights is not None:  # a base makes each layout once, so equal ones are the same object
            found.setdefault(id(weights.layout), []).append((weights, start, length))
    return list(found.values())


# --- training -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainSegment:
    """A stretch of packed rows that trains one adapter."""

    start: int
    stop: int
    weights: AdapterWeights
    gradients: dict[str, Products] | None
    """fp32 views that gradients are added to; None where there is no backward pass."""


@dataclass(frozen=True)
class _Trained:
    """A bucket and its segments, in the order of their rows."""

    bucket: _Bucket
    segments: tuple[TrainSegment, ...]
    spans: tuple[tuple[int, int], ...]
    """Rows of each segment among the product rows."""
    equal: bool
    """Whether the segments divide the product rows evenly, so that their sums can be made in one call."""

    @classmethod
    def of(cls, segments: Sequence[TrainSegment], device: torch.device) -> _Trained:
        runs: list[tuple[AdapterWeights, int, int]] = []
        spans = []
        for segment in segments:
            length = segment.stop - segment.start
            if runs and runs[-1][0] is segment.weights and runs[-1][1] + runs[-1][2] == segment.start:
                runs[-1] = (segment.weights, runs[-1][1], runs[-1][2] + length)
            else:
                runs.append((segment.weights, segment.start, length))
            spans.append((len(runs) - 1, runs[-1][2] - length, runs[-1][2]))
        bucket = _bucket(runs, _stack([weights.products for weights, _, _ in runs]), device)
        rows = tuple((run * bucket.padded + first, run * bucket.padded + last) for run, first, last in spans)
        lengths = {last - first for first, last in rows}
        equal = bucket.rows_AM is None and len(lengths) == 1 and min(lengths) >= runs[0][0].layout.least_rows
        return cls(bucket, tuple(segments), rows, equal)

    def sums(self, left: Tensor, right: Tensor) -> Sequence[Tensor]:
        """leftᵀ · right of each segment's rows: [A·M, K], [A·M, N] → [K, N] each, with the bits of the segment alone."""
        if self.equal and len(self.spans) > 1:
            left_SMK, right_SMN = (each.unflatten(0, (len(self.spans), -1)) for each in (left, right))
            return torch.bmm(left_SMK.transpose(1, 2), right_SMN).unbind()
        return [torch.mm(left[first:last].t(), right[first:last]) for first, last in self.spans]


class TrainerRouting:
    """Rows of a packed training batch; gradients of the adapters are added as the backward pass meets each layer."""

    def __init__(self, segments: Sequence[TrainSegment], device: torch.device, *, backward: bool) -> None:
        self.trained = [_Trained.of(members, device) for members in _alike(segments)]
        self._anchor = torch.zeros((), device=device, requires_grad=backward)

    def linear(self, siblings: Siblings, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of all siblings to x [1, T, K] → [1, T, N] each."""
        found: tuple[Tensor, ...] = _TrainedLinears.apply(x, self._anchor, siblings, self)  # type: ignore[no-untyped-call]
        return found


def _alike(segments: Sequence[TrainSegment]) -> list[list[TrainSegment]]:
    """Segments of one layout, and none much shorter than the longest: shorter ones would be mostly padding.

    An adapter's segments stay together, so that its gradients are added up in their order.
    """
    runs: dict[int, list[TrainSegment]] = {}
    for segment in segments:
        runs.setdefault(id(segment.weights), []).append(segment)
    found: list[tuple[AdapterLayout, int, list[TrainSegment]]] = []
    for own in sorted(runs.values(), key=_rows_of, reverse=True):
        layout = own[0].weights.layout
        for other, longest, members in found:
            if other is layout and _rows_of(own) >= LEAST_FILL * longest:
                members.extend(own)
                break
        else:
            found.append((layout, _rows_of(own), list(own)))
    return [sorted(members, key=lambda segment: segment.start) for _, _, members in found]


def _rows_of(segments: Sequence[TrainSegment]) -> int:
    return sum(segment.stop - segment.start for segment in segments)


class _TrainedLinears(torch.autograd.Function):
    """Base and adapters of siblings in one node: the base gets no gradient, the adapters' go straight to their arenas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, siblings: Siblings, routing: TrainerRouting) -> tuple[Tensor, ...]:
        ctx.siblings, ctx.routing = siblings, routing
        y = siblings.weight(x)
        inners = [trained.bucket.apply(siblings, x[0], y[0]) for trained in routing.trained]
        ctx.save_for_backward(x, *inners)
        return tuple(y.split(siblings.sizes, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        siblings, routing = ctx.siblings, ctx.routing
        x, *inners = ctx.saved_tensors
        grad_y = torch.cat(grads, dim=-1) if len(grads) > 1 else grads[0]
        grad_x = torch.matmul(grad_y, siblings.weight.plain) if ctx.needs_input_grad[0] else None
        for trained, inner in zip(routing.trained, inners, strict=True):
            if inner is not None:
                grad_inner = _backward(trained, siblings, x[0], inner, grad_y[0])
                if grad_x is not None:
                    rows = trained.bucket.gather(grad_x[0])
                    _add_product(rows, grad_inner, trained.bucket.products[siblings.leader].a.transpose(-1, -2))
                    trained.bucket.put(grad_x[0], rows)
        return grad_x, None, None, None


def _backward(trained: _Trained, siblings: Siblings, x_TK: Tensor, inner: Tensor, grad_TN: Tensor) -> Tensor:
    """Add up the gradients of a bucket's adapters; returns the gradient of the products with A, [A·M, W]."""
    products = trained.bucket.products[siblings.leader]
    rank = products.bs[0][1].shape[-2]
    gradients = [
        None if segment.gradients is None else segment.gradients[siblings.leader] for segment in trained.segments
    ]
    parts = []
    for column, (index, b) in enumerate(products.bs):
        grad = trained.bucket.gather(grad_TN[:, siblings.columns(index)])
        parts.append(_product(grad, b.transpose(-1, -2)))
        for sums, own in zip(gradients, trained.sums(inner[:, column * rank : (column + 1) * rank], grad), strict=True):
            if sums is not None:
                sums.bs[column][1].add_(own)
    pad = inner.shape[-1] - rank * len(parts)
    parts.extend([inner.new_zeros(len(inner), pad)] if pad else [])
    grad_inner = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    for segment, sums, own in zip(
        trained.segments, gradients, trained.sums(trained.bucket.gather(x_TK), grad_inner), strict=True
    ):
        if sums is not None:
            sums.a.add_(own, alpha=segment.weights.scaling)
    return grad_inner
