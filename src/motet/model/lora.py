"""Many LoRA adapters on the linear layers of one frozen base: y = W x + (alpha / rank) · B A x.

An adapter is one flat tensor; for each adapted layer it holds Aᵀ [K, R] and then Bᵀ [R, N], the layout that both the sampler
and the trainer multiply with, so that their products agree bit for bit. Masters, gradients and moments share this layout.

Legend: T packed rows, K inputs, N outputs, R rank, A adapters in the batch, M padded rows per adapter.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet import seeds

Views = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LinearPlace:
    """Where one adapted layer lies in an adapter's flat tensor."""

    path: str
    n_in: int
    n_out: int
    offset: int


@dataclass(frozen=True)
class AdapterLayout:
    """Which layers an adapter has, at which rank, and where each lies. Equal layouts can share one batched product."""

    rank: int
    places: tuple[LinearPlace, ...]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(self.rank * (place.n_in + place.n_out) for place in self.places)

    def views(self, flat: Tensor) -> Views:
        """Aᵀ [..., K, R] and Bᵀ [..., R, N] of each layer, as views of flat [..., size]."""
        lead = flat.shape[:-1]
        found: Views = {}
        for place in self.places:
            n_a, n_b = place.n_in * self.rank, place.n_out * self.rank
            a = flat[..., place.offset : place.offset + n_a].unflatten(-1, (place.n_in, self.rank))
            b = flat[..., place.offset + n_a : place.offset + n_a + n_b].unflatten(-1, (self.rank, place.n_out))
            assert a.shape[:-2] == lead
            found[place.path] = (a, b)
        return found


def make_layout(linears: Mapping[str, tuple[int, int]], rank: int) -> AdapterLayout:
    """Lay out layers {path: (inputs, outputs)} in the order given."""
    places, offset = [], 0
    for path, (n_in, n_out) in linears.items():
        places.append(LinearPlace(path, n_in, n_out, offset))
        offset += rank * (n_in + n_out)
    return AdapterLayout(rank, tuple(places))


def initial_weights(layout: AdapterLayout, seed: int) -> Tensor:
    """Fresh fp32 weights on the CPU: A uniform in ±1/√K (PEFT's default), a function of (seed, path, shape); B zero."""
    flat = torch.zeros(layout.size)
    for path, (a, _) in layout.views(flat).items():
        generator = torch.Generator().manual_seed(seeds.key(seed, f"init/{path}") >> 1)
        bound = 1.0 / math.sqrt(a.shape[0])
        a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
    return flat


@dataclass(frozen=True)
class AdapterWeights:
    """One version of an adapter in the base's dtype: what sampler and trainer multiply with. Never written after it is made."""

    layout: AdapterLayout
    scaling: float
    """alpha / rank."""
    flat: Tensor
    views: Views

    @classmethod
    def from_masters(cls, layout: AdapterLayout, scaling: float, masters: Tensor, dtype: torch.dtype) -> AdapterWeights:
        """A compute copy of fp32 masters."""
        flat = masters.detach().to(dtype, copy=True)
        return cls(layout, scaling, flat, layout.views(flat))


class Routing(Protocol):
    """Which rows of the packed input belong to which adapter."""

    def linear(self, layer: LoraLinear, x: Tensor) -> Tensor:
        """Apply base and adapters to x [1, T, K] → [1, T, N]."""
        ...


class LoraContext(threading.local):
    """The routing of the forward pass under way in this thread; owned by the base model, seen by its linear layers."""

    def __init__(self) -> None:
        self.routing: Routing | None = None


class LoraLinear(nn.Module):
    """A frozen linear layer that any number of adapters may add to."""

    def __init__(self, linear: nn.Linear, path: str, context: LoraContext) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.path = path
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        """Base alone, or base and adapters as the context routes them."""
        routing = self.context.routing
        if routing is None:
            return F.linear(x, self.weight, self.bias)
        if x.dim() == 2:  # some models flatten the batch before a layer (OPT, shared experts)
            return routing.linear(self, x[None])[0]
        return routing.linear(self, x)


_LEFT_OUT = {"experts", "router", "gate", "shared_expert_gate", "lm_head"}


def walk_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The adaptable layers by path: every nn.Linear of the decoder but routers and experts."""
    for path, module in model.named_modules():
        parts = path.split(".")
        if isinstance(module, nn.Linear) and not _LEFT_OUT & set(parts):
            yield path, module


# --- sampling: adapters of equal layout share one batched product -----------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    """Adapters of equal layout in one batch of rows."""

    rows_AM: Tensor
    n_adapters: int
    views: Views  # [A, K, R] and [A, R, N]
    scaling_A11: Tensor  # fp32, as torch multiplies a bf16 tensor by a number
    covers: Tensor  # rows of the packed input that have one of these adapters
    source: Tensor  # for each of them its place among the A·M product rows


class SamplerRouting:
    """Rows of a decode or prefill batch; each adapter's rows are contiguous."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets

    def linear(self, layer: LoraLinear, x: Tensor) -> Tensor:
        """Apply base and adapters to x [1, T, K] → [1, T, N]."""
        y = F.linear(x, layer.weight, layer.bias)
        for bucket in self._buckets:
            weights = bucket.views.get(layer.path)
            if weights is None:
                continue
            a, b = weights
            x_AMK = x[0].index_select(0, bucket.rows_AM).view(bucket.n_adapters, -1, x.shape[-1])
            inner = (torch.bmm(x_AMK, a).float() * bucket.scaling_A11).to(x.dtype)
            update = torch.bmm(inner, b).flatten(0, 1)
            y[0, bucket.covers] += update.index_select(0, bucket.source)
        return y


class AdapterStacks:
    """Adapters of a batch stacked for batched products; the last compositions are kept, so a steady batch copies nothing."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._made: dict[tuple[int, ...], tuple[tuple[AdapterWeights, ...], Views]] = {}

    def views(self, adapters: tuple[AdapterWeights, ...]) -> Views:
        """Views [A, K, R] and [A, R, N] per layer."""
        key = tuple(id(weights) for weights in adapters)
        found = self._made.pop(key, None)
        if found is None:
            flat = adapters[0].flat[None] if len(adapters) == 1 else torch.stack([weights.flat for weights in adapters])
            found = (adapters, adapters[0].layout.views(flat))
        self._made[key] = found
        while len(self._made) > self._keep:
            del self._made[next(iter(self._made))]
        return found[1]

    def forget(self) -> None:
        """Drop every stack (a version was unloaded)."""
        self._made.clear()

    def routing(self, runs: Sequence[tuple[AdapterWeights | None, int, int]], device: torch.device) -> SamplerRouting:
        """Routing of runs (weights, first row, number of rows) that each belong to one adapter."""
        by_layout: dict[AdapterLayout, list[tuple[AdapterWeights, int, int]]] = {}
        for weights, start, length in runs:
            if weights is not None:
                by_layout.setdefault(weights.layout, []).append((weights, start, length))
        buckets = []
        for members in by_layout.values():
            padded = -(-max(length for _, _, length in members) // 4) * 4
            rows: list[int] = []
            covers: list[int] = []
            source: list[int] = []
            for place, (_, start, length) in enumerate(members):
                rows.extend(start + min(row, length - 1) for row in range(padded))
                covers.extend(range(start, start + length))
                source.extend(range(place * padded, place * padded + length))
            adapters = tuple(weights for weights, _, _ in members)
            scaling = torch.tensor([weights.scaling for weights in adapters], device=device)
            buckets.append(
                _Bucket(
                    torch.tensor(rows, device=device),
                    len(members),
                    self.views(adapters),
                    scaling[:, None, None],
                    torch.tensor(covers, device=device),
                    torch.tensor(source, device=device),
                )
            )
        return SamplerRouting(buckets)


# --- training: each segment has products of its own, so that reductions never meet another tenant's rows ---------------


@dataclass(frozen=True)
class TrainSegment:
    """A stretch of packed rows that trains one adapter."""

    start: int
    stop: int
    weights: AdapterWeights
    gradients: Views | None
    """fp32 views that gradients are added to; None where there is no backward pass."""


class TrainerRouting:
    """Rows of a packed training batch; gradients of the adapters are added as the backward pass meets each layer."""

    def __init__(self, segments: Sequence[TrainSegment], device: torch.device, *, backward: bool) -> None:
        self.segments = tuple(segments)
        self._anchor = torch.zeros((), device=device, requires_grad=backward)

    def linear(self, layer: LoraLinear, x: Tensor) -> Tensor:
        """Apply base and adapters to x [1, T, K] → [1, T, N]."""
        y: Tensor = _TrainedLinear.apply(x, self._anchor, layer, self)  # type: ignore[no-untyped-call]
        return y


class _TrainedLinear(torch.autograd.Function):
    """Base and adapters in one node: the base gets no gradient, the adapters' go straight to their arenas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: LoraLinear, routing: TrainerRouting) -> Tensor:
        ctx.layer, ctx.routing = layer, routing
        ctx.save_for_backward(x)
        y = F.linear(x, layer.weight, layer.bias)
        for segment in routing.segments:
            weights = segment.weights.views.get(layer.path)
            if weights is not None:
                a, b = weights
                rows = slice(segment.start, segment.stop)
                y[0, rows] += torch.mm(torch.mm(x[0, rows], a) * segment.weights.scaling, b)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer, routing = ctx.layer, ctx.routing
        (x,) = ctx.saved_tensors
        grad_x = torch.matmul(grad_y, layer.weight) if ctx.needs_input_grad[0] else None
        for segment in routing.segments:
            weights = segment.weights.views.get(layer.path)
            if weights is None:
                continue
            a, b = weights
            rows = slice(segment.start, segment.stop)
            grad, inputs = grad_y[0, rows], x[0, rows]
            inner = torch.mm(grad, b.t()) * segment.weights.scaling
            if segment.gradients is not None:
                grad_a, grad_b = segment.gradients[layer.path]
                grad_a += torch.mm(inputs.t(), inner)
                grad_b += torch.mm((torch.mm(inputs, a) * segment.weights.scaling).t(), grad)
            if grad_x is not None:
                grad_x[0, rows] += torch.mm(inner, a.t())
        return grad_x, None, None, None
