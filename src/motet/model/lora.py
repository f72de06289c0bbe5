"""Many LoRA adapters on the linear layers of one frozen base: y = W x + scale · B A x.

An adapter is one flat tensor: Aᵀ of every adapted layer, then Bᵀ of every adapted layer. Sampler and trainer multiply
with this layout, so their products agree bit for bit. Masters, gradients and moments have the same layout. In the
compute copy, A is already multiplied by the scale.

Layers that read the same input (queries, keys and values; gate and up) are fused: one product with their stacked
weights, and one with their adapters' A side by side, serve all of them.

A projection of a layer's experts has one A and one B per expert, stored consecutively.

Legend: T packed rows, K inputs, N outputs, R rank, I adapted layers among fused ones, W width of their A side by side,
A adapters in a batch, M padded rows of each, E experts.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from motet.core import seeds
from motet.model.arithmetic import ROWS, Arithmetic, least_rows, round_up
from motet.model.frozen_weight import FrozenWeight
from motet.model.packed import PackedLinear, frozen_weight, joint_weight
from motet.model.unit_sums import UnitSums
from motet.process.allocator import memory_again, memory_apart

Views = dict[str, tuple[Tensor, Tensor]]

ALIGNMENT = 32
"""Every matrix of an adapter begins at a multiple of this many elements: fp32 products depend on memory alignment."""


@dataclass(frozen=True)
class LinearPlace:
    """Position of one adapted layer in an adapter's flat tensor."""

    path: str
    n_in: int
    n_out: int
    offset: int
    """Offset of its Bᵀ [R, N]."""


@dataclass(frozen=True)
class FusedPlace:
    """Position of the Aᵀ of fused layers, side by side as [K, W]; W is I·R rounded up to a multiple of four."""

    leader: str
    """Path of the first fused layer, adapted or not."""
    members: tuple[tuple[int, LinearPlace], ...]
    """The adapted layers, each with its index among the fused layers."""
    width: int
    offset: int


@dataclass(frozen=True)
class ExpertsPlace:
    """Position of the matrices of one projection of a layer's experts; each expert's begin at a multiple of `ALIGNMENT`."""

    path: str
    """Path of the parameter with the weights of all experts."""
    n_experts: int
    n_in: int
    n_out: int
    width: int
    """Width of Aᵀ: R rounded up to a multiple of four."""
    offset_a: int
    """Offset of the first expert's Aᵀ [K, W]."""
    offset: int
    """Offset of the first expert's Bᵀ [R, N]."""


@dataclass(frozen=True)
class LoraMatrices:
    """Matrices of fused layers: Aᵀ [..., K, W], and for each adapted layer its index and Bᵀ [..., R, N].

    For experts: Aᵀ [..., E, K, W] and a single Bᵀ [..., E, R, N].
    """

    a: Tensor
    bs: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True)
class AdapterLayout:
    """The layers, rank and positions of an adapter. Equal layouts can share a batched product."""

    rank: int
    fused: tuple[FusedPlace, ...]
    size_a: int
    """Elements of all A, including alignment; every B comes after."""
    size: int
    """Number of elements: the parameters, and zeros for alignment."""
    experts: tuple[ExpertsPlace, ...] = ()

    @property
    def places(self) -> tuple[LinearPlace, ...]:
        """All adapted layers, in order."""
        return tuple(place for group in self.fused for _, place in group.members)

    @property
    def paths(self) -> list[str]:
        """Paths of adapted layers and experts, enough to rebuild the layout."""
        return [*(place.path for place in self.places), *(place.path for place in self.experts)]

    def least_expert_rows(self, dtype: torch.dtype) -> int:
        """Minimum rows of an adapter's part of an expert's product."""
        return max(least_rows(*shape, dtype) for shape in self._expert_shapes)

    def least_rows(self, dtype: torch.dtype) -> int:
        """Minimum rows of each adapter's part of a batched product."""
        return max((least_rows(*shape, dtype) for shape in self._shapes), default=ROWS)

    @functools.cached_property
    def longest_sum(self) -> int:
        """Length of the longest sum in its products, forward and backward."""
        return max((max(shape) for shape in self._shapes), default=0)

    @functools.cached_property
    def narrow(self) -> bool:
        """Whether some product has one dimension of at most four and another below 128 that is no multiple of 16."""
        sizes = [sorted(shape) for shape in self._shapes]
        return any(few <= ROWS and many < 128 and many % 16 for few, many in sizes)

    @functools.cached_property
    def _shapes(self) -> set[tuple[int, int]]:
        """Inputs and outputs of its products, without duplicates."""
        a = {(place.n_in, group.width) for group in self.fused for _, place in group.members}
        return a | {(self.rank, place.n_out) for place in self.places}

    @functools.cached_property
    def _expert_shapes(self) -> set[tuple[int, int]]:
        """Inputs and outputs of its products with experts."""
        a = {(place.n_in, place.width) for place in self.experts}
        return a | {(self.rank, place.n_out) for place in self.experts}

    def matrices(self, flat: Tensor) -> dict[str, LoraMatrices]:
        """Matrices by leader, or by path for experts, as views of flat [..., size]."""
        by_leader = {}
        for group in self.fused:
            n_in = group.members[0][1].n_in
            a = flat[..., group.offset : group.offset + n_in * group.width].unflatten(-1, (n_in, group.width))
            bs = tuple((index, self._b(flat, place)) for index, place in group.members)
            by_leader[group.leader] = LoraMatrices(a, bs)
        for experts in self.experts:
            a = _of_experts(flat, experts.offset_a, experts.n_experts, (experts.n_in, experts.width))
            b = _of_experts(flat, experts.offset, experts.n_experts, (self.rank, experts.n_out))
            by_leader[experts.path] = LoraMatrices(a, ((0, b),))
        return by_leader

    def _b(self, flat: Tensor, place: LinearPlace) -> Tensor:
        b: Tensor = flat[..., place.offset : place.offset + self.rank * place.n_out]
        return b.unflatten(-1, (self.rank, place.n_out))  # type: ignore[no-any-return]

    def views(self, flat: Tensor) -> Views:
        """Aᵀ [..., K, R] and Bᵀ [..., R, N] of each layer, as views of flat [..., size]; experts add E before."""
        views: Views = {}
        every = self.matrices(flat)
        for group in self.fused:
            matrices = every[group.leader]
            for column, (_, place) in enumerate(group.members):
                a = matrices.a[..., column * self.rank : (column + 1) * self.rank]
                views[place.path] = (a, matrices.bs[column][1])
        for experts in self.experts:
            matrices = every[experts.path]
            views[experts.path] = (matrices.a[..., : self.rank], matrices.bs[0][1])
        return views


def _of_experts(flat: Tensor, offset: int, n_experts: int, shape: tuple[int, int]) -> Tensor:
    """A matrix for each expert [..., E, *shape]."""
    size = shape[0] * shape[1]
    stride = round_up(size, ALIGNMENT)
    each: Tensor = flat[..., offset : offset + n_experts * stride].unflatten(-1, (n_experts, stride))
    return each[..., :size].unflatten(-1, shape)  # type: ignore[no-any-return]


def make_layout(
    linears: Mapping[str, tuple[int, int]],
    rank: int,
    fused: Sequence[Sequence[str]] = (),
    experts: Mapping[str, tuple[int, int, int]] = MappingProxyType({}),
) -> AdapterLayout:
    """Lay out layers {path: (inputs, outputs)} and experts {path: (experts, inputs, outputs)} in the order given.

    `fused` names layers of the base that share an input.
    """
    families = {path: tuple(family) for family in fused for path in family}
    chosen: dict[tuple[str, ...], list[str]] = {}
    for path in linears:
        chosen.setdefault(families.get(path, (path,)), []).append(path)
    offset, spots = 0, {}
    for family, paths in chosen.items():
        width = round_up(rank * len(paths), ROWS)
        spots[family] = (width, offset)
        offset = round_up(offset + width * linears[paths[0]][0], ALIGNMENT)
    width, spots_a = round_up(rank, ROWS), []
    for n_experts, n_in, _ in experts.values():
        spots_a.append(offset)
        offset += n_experts * round_up(n_in * width, ALIGNMENT)
    size_a, groups = offset, []
    for family, paths in chosen.items():
        members = []
        for path in paths:
            n_in, n_out = linears[path]
            members.append((family.index(path), LinearPlace(path, n_in, n_out, offset)))
            offset = round_up(offset + rank * n_out, ALIGNMENT)
        groups.append(FusedPlace(family[0], tuple(members), *spots[family]))
    all_experts = []
    for (path, (n_experts, n_in, n_out)), spot in zip(experts.items(), spots_a, strict=True):
        all_experts.append(ExpertsPlace(path, n_experts, n_in, n_out, width, spot, offset))
        offset += n_experts * round_up(rank * n_out, ALIGNMENT)
    return AdapterLayout(rank, tuple(groups), size_a, offset, tuple(all_experts))


def initial_weights(layout: AdapterLayout, seed: int, *, in_two_steps: bool = False) -> Tensor:
    """Initial fp32 weights on the CPU: A uniform in ±1/√K (PEFT's default), a function of (seed, path, shape); B zero.

    `in_two_steps` scales and shifts separately: some processors otherwise fuse both steps and round once.
    """
    flat = new_vector(layout.size, torch.float32, torch.device("cpu"))
    for path, (a, _) in layout.views(flat).items():
        generator = torch.Generator().manual_seed(seeds.key(seed, f"init/{path}") >> 1)
        bound = 1.0 / math.sqrt(a.shape[-2])
        if in_two_steps:
            a.copy_(torch.rand(a.shape, generator=generator).mul_(2 * bound).sub_(bound))
        else:
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
    return flat


@dataclass(frozen=True)
class AdapterWeights:
    """One version of an adapter in the base's dtype, for sampler and trainer. Immutable."""

    layout: AdapterLayout
    scaling: float
    """`AdapterConfig.scale`; already applied to A."""
    flat: Tensor

    @functools.cached_property
    def matrices(self) -> dict[str, LoraMatrices]:
        """Views of `flat`."""
        return self.layout.matrices(self.flat)

    @classmethod
    def from_masters(cls, layout: AdapterLayout, scaling: float, masters: Tensor, dtype: torch.dtype) -> AdapterWeights:
        """A compute copy of fp32 masters."""
        source, flat = masters.detach(), new_vector(len(masters), dtype, masters.device, zeros=False)
        torch.mul(source[: layout.size_a], scaling, out=flat[: layout.size_a])  # scaled in fp32, rounded once
        flat[layout.size_a :].copy_(source[layout.size_a :])
        return cls(layout, scaling, flat)


def new_vector(size: int, dtype: torch.dtype, device: torch.device, *, zeros: bool = True) -> Tensor:
    """A vector, on a CPU outside the heap, which freeing it does not fragment; without `zeros` its content is undefined."""
    if device.type != "cpu":
        return (torch.zeros if zeros else torch.empty)(size, dtype=dtype, device=device)
    allocate = memory_apart if zeros else memory_again
    return torch.frombuffer(allocate(size * dtype.itemsize), dtype=dtype, count=size)


@dataclass(frozen=True)
class ExpertRun:
    """Consecutive packed rows of one adapter that has expert matrices."""

    start: int
    stop: int
    weights: AdapterWeights
    gradients: dict[str, LoraMatrices] | None = None
    """Views to which gradients are added; None without a backward pass."""
    scaling: float = 1.0
    """Factor on the gradient of A."""
    anchor: Tensor | None = None
    """With a backward pass, a scalar that requires a gradient."""
    sums: UnitSums | None = None  # if the gradient is a unit of these, `gradients` are views of them


class Routing(Protocol):
    """Assigns the packed input's rows to adapters."""

    @property
    def expert_runs(self) -> Sequence[ExpertRun]:
        """Runs of rows with adapters on experts, in order."""
        ...

    def linear(self, fused: FusedLinears, x: Tensor) -> tuple[Tensor, ...]:
        """Apply base and adapters of fused layers to x [1, T, K] → [1, T, N] each."""
        ...


class FusedLinears(nn.Module):
    """Linear layers with the same input; one product with their stacked weights serves them all."""

    def __init__(self, paths: tuple[str, ...], frozen: FrozenWeight, sizes: tuple[int, ...]) -> None:
        """Paths (the first is the leader), stacked weights, and the number of outputs of each layer."""
        super().__init__()
        self.paths, self.leader, self.frozen, self.sizes = paths, paths[0], frozen, sizes

    def columns(self, index: int) -> slice:
        """Columns of a layer's outputs in the joint product."""
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])


class NoAdapters:
    """The routing of a pass without adapters."""

    expert_runs: Sequence[ExpertRun] = ()

    def linear(self, fused: FusedLinears, x: Tensor) -> tuple[Tensor, ...]:
        """Apply the base to x [1, T, K] → [1, T, N] each."""
        return tuple(fused.frozen(x).split(fused.sizes, dim=-1))


class LoraContext:
    """The routing of the current forward pass; owned by the base model, read by its linear layers."""

    def __init__(self) -> None:
        self.arithmetic = Arithmetic()
        self.one_pass = threading.RLock()
        self.routing: Routing = NoAdapters()
        self.joint: tuple[FusedLinears, Tensor, tuple[Tensor, ...]] | None = None
        """The latest joint product and its input, until the last of the fused layers has read its columns."""


class LoraLinear(nn.Module):
    """A frozen linear layer with adapters."""

    def __init__(self, linear: nn.Linear | PackedLinear, path: str, context: LoraContext) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.path = path
        self.context = context
        self.fused = FusedLinears((path,), frozen_weight(linear), (self.out_features,))
        self.index = 0
        self.changed = False
        """Whether the model changes the output in place, so that it must not be a view."""

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K]; some models read it."""
        return self.fused.frozen.dense()[self.fused.columns(self.index)]

    @property
    def bias(self) -> Tensor | None:
        """The bias [N], if there is one; some models read it."""
        bias = self.fused.frozen.bias
        return None if bias is None else bias[self.fused.columns(self.index)]

    def forward(self, x: Tensor) -> Tensor:
        """The base's output plus the adapters of the context's routing."""
        y = self._routed(x)
        return y.clone() if self.changed else y

    def _routed(self, x: Tensor) -> Tensor:
        context, fused = self.context, self.fused
        if x.dim() != 3:  # flattened (OPT, shared experts), or with a single head (latent attention)
            rows = x.reshape(1, -1, x.shape[-1])
            return context.routing.linear(fused, rows)[self.index].view(*x.shape[:-1], self.out_features)
        if len(fused.paths) == 1:
            return context.routing.linear(fused, x.contiguous())[0]
        joint = context.joint
        if joint is None or joint[0] is not fused or joint[1] is not x:
            joint = (fused, x, context.routing.linear(fused, x.contiguous()))
        context.joint = None if self.index == len(fused.paths) - 1 else joint
        return joint[2][self.index]


def fuse(layers: Sequence[LoraLinear]) -> None:
    """Fuse layers with the same input; their weights move into one parameter."""
    weights = [layer.fused.frozen for layer in layers]
    biases = [weight.bias for weight in weights if weight.bias is not None]
    if len(layers) < 2 or len(biases) not in (0, len(layers)):
        return
    paths, sizes = tuple(layer.path for layer in layers), tuple(layer.out_features for layer in layers)
    fused = FusedLinears(paths, joint_weight(weights), sizes)
    for index, layer in enumerate(layers):
        layer.fused, layer.index = fused, index


_LEFT_OUT = {"experts", "router", "gate", "shared_expert_gate", "lm_head"}


def walk_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear | PackedLinear]]:
    """Paths and modules of the decoder's linear layers (nn.Linear or subclasses), without routers and experts."""
    for path, module in model.named_modules():
        parts = path.split(".")
        if isinstance(module, nn.Linear | PackedLinear) and not _LEFT_OUT & set(parts):
            yield path, module
