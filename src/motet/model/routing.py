"""Assigns the rows of a packed batch to adapters, in sampling and in training.

Adapters of equal layout share one batched product (`LoraProducts`). Sums over rows, which only gradients need, are
computed per segment, so no reduction mixes tenants' rows. A row's bits do not depend on the other rows.

Legend: T packed rows, K inputs, N outputs, R rank, W width of fused layers' A side by side, A adapters in a batch, M product
rows (those of a bucket's adapters, one adapter after another), S segments of a bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.arithmetic import ROWS
from motet.model.lora import AdapterLayout, AdapterWeights, ExpertRun, FusedLinears, LoraMatrices
from motet.model.lora_products import LoraProducts, RowProducts
from motet.model.unit_sums import UnitSums, add_part

AdapterRows = tuple[AdapterWeights | None, int, int]
"""Consecutive rows of one adapter: weights (None for the base), first row, number of rows."""

# --- a batched product for adapters of equal layout -------------------------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    """Adapters of equal layout in one batch of rows."""

    matrices: dict[str, LoraMatrices]  # [A, K, W] and [A, R, N]
    form: RowProducts
    """The product of rows with the matrices."""
    covers: slice | Tensor
    """Rows of the packed input that have one of these adapters."""
    rows_M: Tensor | None
    """Packed row of each product row; None if the product rows are exactly the covered rows."""
    source: Tensor | None
    """Index of each covered row among the product rows; None if both are the same rows."""
    starts: tuple[int, ...]
    """First product row of each run."""

    def gather(self, x_TK: Tensor) -> Tensor:
        """Gather the product rows: [T, K] → [M, K]; a view if they are exactly the covered rows."""
        return x_TK[self.covers] if self.rows_M is None else x_TK.index_select(0, self.rows_M)

    def put(self, y_TN: Tensor, rows: Tensor) -> None:
        """Write product rows [M, N] back into y in place; does nothing if `gather` returned a view of y."""
        if self.source is not None:
            y_TN[self.covers] = rows.index_select(0, self.source)

    def apply(self, fused: FusedLinears, x_TK: Tensor, y_TN: Tensor) -> Tensor | None:
        """Add the adapters of fused layers to y; returns the products with A, [M, W], if there are any."""
        matrices = self.matrices.get(fused.leader)
        if matrices is None:
            return None
        inner, y = self.form.multiply(self.gather(x_TK), matrices.a), self.gather(y_TN)
        rank = matrices.bs[0][1].shape[-2]
        for column, (index, b) in enumerate(matrices.bs):
            self.form.add(y[:, fused.columns(index)], inner[:, column * rank : (column + 1) * rank], b)
        self.put(y_TN, y)
        return inner


Member = tuple[AdapterWeights, int, int]
"""A run of rows with an adapter: weights, first row, number of rows."""


def _bucket(
    members: Sequence[Member], stacked: dict[str, LoraMatrices], device: torch.device, products: LoraProducts
) -> _Bucket:
    """The bucket of runs of one layout, in the order of their rows."""
    rooms, form = products.plan(members[0][0].layout, [length for _, _, length in members])
    starts = tuple(accumulate(rooms[:-1], initial=0))
    first, last = members[0][1], members[-1][1] + members[-1][2]
    contiguous = last - first == sum(length for _, _, length in members)
    covers: slice | Tensor = slice(first, last)
    if not contiguous:
        covers = torch.tensor([row for _, start, length in members for row in range(start, start + length)]).to(device)
    if contiguous and all(room == length for room, (_, _, length) in zip(rooms, members, strict=True)):
        return _Bucket(stacked, form, covers, None, None, starts)
    rows: list[int] = []
    source: list[int] = []
    for room, place, (_, start, length) in zip(rooms, starts, members, strict=True):
        rows.extend(range(start, start + length))
        rows.extend([start + length - 1] * (room - length))
        source.extend(range(place, place + length))
    return _Bucket(
        stacked, form, covers, torch.tensor(rows, device=device), torch.tensor(source, device=device), starts
    )


# --- sampling -----------------------------------------------------------------------------------------------------------


class Adds(Protocol):
    """Adapters of one layout, and their rows."""

    def apply(self, fused: FusedLinears, x_TK: Tensor, y_TN: Tensor) -> object:
        """Add the adapters of fused layers to y."""
        ...


class SamplerRouting:
    """Rows of a decode or prefill batch."""

    def __init__(
        self,
        buckets: Callable[[], Sequence[Adds]],
        expert_runs: Sequence[ExpertRun] = (),
        runs: Sequence[AdapterRows] = (),
    ) -> None:
        """`buckets` is called when torch multiplies; `runs` are for kernels that need no stacked weights."""
        self._make = buckets
        self.expert_runs = expert_runs
        self.runs = runs

    @functools.cached_property
    def buckets(self) -> Sequence[Adds]:
        """Adapters of equal layout, with their stacked weights."""
        return self._make()

    def linear(self, fused: FusedLinears, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of fused layers to x [1, T, K] → [1, T, N] each."""
        y = fused.frozen(x)
        for bucket in self.buckets:
            bucket.apply(fused, x[0], y[0])
        return tuple(y.split(fused.sizes, dim=-1))


class AdapterStacks:
    """Stacked weights of a batch's adapters; recent stacks are cached, so an unchanged batch copies nothing."""

    def __init__(self, products: LoraProducts, keep: int = 4) -> None:
        self._products, self._keep = products, keep
        self._made: dict[tuple[int, ...], tuple[tuple[AdapterWeights, ...], dict[str, LoraMatrices]]] = {}

    def _stacked(self, adapters: tuple[AdapterWeights, ...]) -> dict[str, LoraMatrices]:
        key = tuple(id(weights) for weights in adapters)
        stacked = self._made.pop(key, None)
        if stacked is None:
            stacked = (adapters, self._products.stack(adapters))
        self._made[key] = stacked
        while len(self._made) > self._keep:
            del self._made[next(iter(self._made))]
        return stacked[1]

    def forget(self) -> None:
        """Drop all stacks; call this when a version is unloaded."""
        self._made.clear()

    def routing(self, runs: Sequence[AdapterRows], device: torch.device) -> SamplerRouting:
        """The routing of runs that are in row order; each run has one adapter or none."""
        adapting = [
            ExpertRun(start, start + length, weights)
            for weights, start, length in runs
            if weights is not None and weights.layout.experts
        ]
        return SamplerRouting(lambda: self._buckets(runs, device), adapting, runs)

    def _buckets(self, runs: Sequence[AdapterRows], device: torch.device) -> list[_Bucket]:
        buckets = []
        for members in _by_layout(runs):
            stacked = self._stacked(tuple(weights for weights, _, _ in members))
            buckets.append(_bucket(members, stacked, device, self._products))
        return buckets


def _by_layout(runs: Iterable[AdapterRows]) -> list[list[Member]]:
    by_layout: dict[int, list[Member]] = {}
    for weights, start, length in runs:
        if weights is not None and weights.layout.fused:
            # a base makes each layout once, so equal ones are the same object
            by_layout.setdefault(id(weights.layout), []).append((weights, start, length))
    return list(by_layout.values())


# --- training -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainSegment:
    """Consecutive packed rows that train one adapter."""

    start: int
    stop: int
    weights: AdapterWeights
    gradients: dict[str, LoraMatrices] | None
    """Views that gradients are added to; None without a backward pass. With `sums`, views of those."""
    unscaled: bool = False
    """Whether to add the gradient of A without the scale; `row_tiles` scales the sum of all tiles after rounding."""
    sums: UnitSums | None = None
    """If they are given, the gradient is a unit of these; kernels on GPUs add every sequence of the segment as a unit."""

    @property
    def scaling(self) -> float:
        """Factor on the gradient of A when it is added."""
        return 1.0 if self.unscaled else self.weights.scaling


@dataclass(frozen=True)
class _Trained:
    """A bucket and its segments, in the order of their rows."""

    bucket: _Bucket
    segments: tuple[TrainSegment, ...]
    spans: tuple[tuple[int, int], ...]
    """Rows of each segment among the product rows."""
    products: LoraProducts

    @classmethod
    def of(cls, segments: Sequence[TrainSegment], device: torch.device, products: LoraProducts) -> _Trained:
        runs: list[Member] = []
        spans = []
        for segment in segments:
            length = segment.stop - segment.start
            if runs and runs[-1][0] is segment.weights and runs[-1][1] + runs[-1][2] == segment.start:
                runs[-1] = (segment.weights, runs[-1][1], runs[-1][2] + length)
            else:
                runs.append((segment.weights, segment.start, length))
            spans.append((len(runs) - 1, runs[-1][2] - length, runs[-1][2]))
        bucket = _bucket(runs, products.stack([weights for weights, _, _ in runs]), device, products)
        rows = tuple((bucket.starts[run] + first, bucket.starts[run] + last) for run, first, last in spans)
        return cls(bucket, tuple(segments), rows, products)


class TrainerRouting:
    """Rows of a packed training batch; the backward pass adds the gradients of adapters layer by layer."""

    def __init__(
        self,
        segments: Sequence[TrainSegment],
        device: torch.device,
        products: LoraProducts,
        *,
        backward: bool,
    ) -> None:
        """Segments in the order of their rows, each with a multiple of `Arithmetic.rows`."""
        self.segments = tuple(segments)
        self._device, self._products, self._backward = device, products, backward
        self.anchor = torch.zeros((), device=device, requires_grad=backward)
        self.expert_runs = [
            ExpertRun(each.start, each.stop, each.weights, each.gradients, each.scaling, self.anchor, each.sums)
            for each in segments
            if each.weights.layout.experts
        ]

    @functools.cached_property
    def trained(self) -> list[_Trained]:
        """Buckets with stacked weights, made when torch first multiplies."""
        linear = [segment for segment in self.segments if segment.weights.layout.fused]
        return [
            _Trained.of(members, self._device, self._products) for members in _alike(linear, self._products.least_fill)
        ]

    def alike(self, segments: Sequence[TrainSegment]) -> TrainerRouting:
        """A routing for other rows of the same pass."""
        return TrainerRouting(segments, self._device, self._products, backward=self._backward)

    def linear(self, fused: FusedLinears, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of fused layers to x [1, T, K] → [1, T, N] each."""
        outputs: tuple[Tensor, ...] = _TrainedLinears.apply(x, self.anchor, fused, self)  # type: ignore[no-untyped-call]
        return outputs


def _alike(segments: Sequence[TrainSegment], least_fill: float) -> list[list[TrainSegment]]:
    """Group segments of one layout and similar length: much shorter ones would be mostly padding.

    An adapter's segments stay together, so that its gradients are added in row order.
    """
    runs: dict[int, list[TrainSegment]] = {}
    for segment in segments:
        runs.setdefault(id(segment.weights), []).append(segment)
    alike: list[tuple[AdapterLayout, int, list[TrainSegment]]] = []
    for own in sorted(runs.values(), key=_rows_of, reverse=True):
        layout = own[0].weights.layout
        for other, longest, members in alike:
            if other is layout and _rows_of(own) >= least_fill * longest:
                members.extend(own)
                break
        else:
            alike.append((layout, _rows_of(own), list(own)))
    return [sorted(members, key=lambda segment: segment.start) for _, _, members in alike]


def _rows_of(segments: Sequence[TrainSegment]) -> int:
    return sum(segment.stop - segment.start for segment in segments)


class _TrainedLinears(torch.autograd.Function):
    """Base and adapters of fused layers in one autograd node; adapter gradients are added directly to their arenas."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, fused: FusedLinears, routing: TrainerRouting
    ) -> tuple[Tensor, ...]:
        ctx.fused, ctx.routing = fused, routing
        y = fused.frozen(x)
        inners = [trained.bucket.apply(fused, x[0], y[0]) for trained in routing.trained]
        ctx.save_for_backward(x, *inners)
        return tuple(y.split(fused.sizes, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        fused, routing = ctx.fused, ctx.routing
        x, *inners = ctx.saved_tensors
        # a transposed gradient (Gemma 3n, LFM2) would be copied only in larger batches, which changes bits
        grad_y = torch.cat(grads, dim=-1) if len(grads) > 1 else grads[0].contiguous()
        grad_x = fused.frozen.back(grad_y) if ctx.needs_input_grad[0] else None
        for trained, inner in zip(routing.trained, inners, strict=True):
            if inner is not None:
                grad_inner = _backward(trained, fused, x[0], inner, grad_y[0])
                if grad_x is not None:
                    rows = trained.bucket.gather(grad_x[0])
                    trained.bucket.form.add(rows, grad_inner, trained.bucket.matrices[fused.leader].a.transpose(-1, -2))
                    trained.bucket.put(grad_x[0], rows)
        return grad_x, None, None, None


def _backward(trained: _Trained, fused: FusedLinears, x_TK: Tensor, inner: Tensor, grad_TN: Tensor) -> Tensor:
    """Add the gradients of a bucket's adapters; returns the gradient of the products with A, [M, W]."""
    matrices = trained.bucket.matrices[fused.leader]
    rank = matrices.bs[0][1].shape[-2]
    gradients = [None if segment.gradients is None else segment.gradients[fused.leader] for segment in trained.segments]
    parts = []
    for column, (index, b) in enumerate(matrices.bs):
        grad = trained.bucket.gather(grad_TN[:, fused.columns(index)])
        back = b.transpose(-1, -2)
        if rank == 1:  # products with a vector choose a kernel by the number of rows; zero columns make it a matrix
            back = F.pad(back, (0, ROWS - 1))
        parts.append(trained.bucket.form.multiply(grad, back)[:, :rank])
        for segment, sums, own in zip(
            trained.segments,
            gradients,
            trained.products.sums(inner[:, column * rank : (column + 1) * rank], grad, trained.spans),
            strict=True,
        ):
            if sums is not None:
                add_part(sums.bs[column][1], own, 1.0, segment.sums)
    pad = inner.shape[-1] - rank * len(parts)
    parts.extend([inner.new_zeros(len(inner), pad)] if pad else [])
    grad_inner = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    for segment, sums, own in zip(
        trained.segments,
        gradients,
        trained.products.sums(trained.bucket.gather(x_TK), grad_inner, trained.spans),
        strict=True,
    ):
        if sums is not None:
            add_part(sums.a, own, segment.scaling, segment.sums)
    return grad_inner
