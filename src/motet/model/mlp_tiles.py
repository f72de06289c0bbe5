"""Run MLPs over long sequences one tile of rows at a time: memory grows with the tile, not with the sequence.

A row's bits do not depend on other rows, so tiles do not change logprobs. Adapter gradients are summed tile by tile,
which differs in bits from one sum over all rows. So only segments longer than `Arithmetic.long_rows` are tiled, each
from its first row, regardless of the rest of the batch.

Legend: T packed rows, D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from motet.model.arithmetic import Arithmetic
from motet.model.experts import has_experts
from motet.model.lora import LoraLinear, LoraMatrices
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.unit_sums import add_part

_NAMES = ("mlp", "feed_forward")
"""Names of MLP modules in transformers' layers."""


@dataclass(frozen=True)
class Tile:
    """Rows that an MLP processes together."""

    start: int
    stop: int
    routing: TrainerRouting
    segment: TrainSegment | None = None
    """The long segment that contains the tile; None for other tiles."""
    sums: dict[str, LoraMatrices] | None = None
    """fp32 sums of that segment's gradients over its tiles, by leader; filled during a backward pass."""


def cut(routing: TrainerRouting, n_rows: int, arithmetic: Arithmetic) -> list[Tile]:
    """Tiles of `n_rows` packed rows; empty if no segment is long."""
    longest = max((each.stop - each.start for each in routing.segments), default=n_rows)
    if longest <= arithmetic.long_rows:
        return []
    tiles, start = list[Tile](), 0
    for segment in routing.segments:
        tiles += [*_without_adapters(routing, start, segment.start, arithmetic), *_of(routing, segment, arithmetic)]
        start = segment.stop
    return [*tiles, *_without_adapters(routing, start, n_rows, arithmetic)]


def _without_adapters(routing: TrainerRouting, start: int, stop: int, arithmetic: Arithmetic) -> Iterator[Tile]:
    for first in range(start, stop, arithmetic.mlp_rows):
        yield Tile(first, min(stop, first + arithmetic.mlp_rows), routing.alike([]))


def _of(routing: TrainerRouting, segment: TrainSegment, arithmetic: Arithmetic) -> Iterator[Tile]:
    length = segment.stop - segment.start
    if length <= arithmetic.long_rows:
        yield Tile(segment.start, segment.stop, routing.alike([replace(segment, start=0, stop=length)]))
        return
    sums: dict[str, LoraMatrices] | None = None if segment.gradients is None else {}
    for first in range(segment.start, segment.stop, arithmetic.mlp_rows):
        last = min(segment.stop, first + arithmetic.mlp_rows)
        part = replace(segment, start=0, stop=last - first, gradients=sums, unscaled=True, sums=None)
        yield Tile(first, last, routing.alike([part]), segment, sums)


class _Mlp:
    """A layer's MLP, applied to long segments tile by tile."""

    def __init__(self, module: nn.Module, leaders: tuple[str, ...], base: LoraModel) -> None:
        """`leaders` are the leaders of the module's fused layers."""
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._leaders, self._base = leaders, base

    def forward(self, x: Tensor) -> Tensor:
        """Replaces the module's forward pass: [1, T, D] → [1, T, D]."""
        routing = self._base.context.routing
        tiles = cut(routing, x.shape[1], self._base.arithmetic) if isinstance(routing, TrainerRouting) else []
        if not tiles:
            return self._stock(x)
        assert isinstance(routing, TrainerRouting)
        output: Tensor = _Tiled.apply(x, routing.anchor, self, tiles)  # type: ignore[no-untyped-call]
        return output

    def rows(self, x: Tensor, routing: TrainerRouting) -> Tensor:
        """The module's output for the rows of a tile."""
        context = self._base.context
        whole, context.routing = context.routing, routing
        try:
            return self._stock(x)
        finally:
            context.routing, context.joint = whole, None

    def begin(self, tile: Tile) -> None:
        """Before the first tile of a long segment, allocate zeros for its gradient sums."""
        if tile.segment is None or tile.sums is None or tile.start > tile.segment.start:
            return
        for leader in self._leaders:
            like = tile.segment.weights.matrices.get(leader)
            if like is not None:
                zeros = tuple((index, torch.zeros_like(b, dtype=torch.float32)) for index, b in like.bs)
                tile.sums[leader] = LoraMatrices(torch.zeros_like(like.a, dtype=torch.float32), zeros)

    def finish(self, tile: Tile) -> None:
        """After the last tile of a long segment, round its sums to the base's dtype and add them to the gradients."""
        if tile.segment is None or tile.sums is None or tile.stop < tile.segment.stop:
            return
        assert tile.segment.gradients is not None
        for leader, own in tile.sums.items():
            gradient, units = tile.segment.gradients[leader], tile.segment.sums
            add_part(gradient.a, own.a.to(self._base.dtype), tile.segment.scaling, units)
            for (_, b), (_, sums) in zip(gradient.bs, own.bs, strict=True):
                add_part(b, sums.to(self._base.dtype), 1.0, units)
        tile.sums.clear()


class _Tiled(torch.autograd.Function):
    """An MLP over tiles of rows; the backward pass recomputes activations tile by tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, mlp: _Mlp, tiles: list[Tile]) -> Tensor:
        ctx.mlp, ctx.tiles = mlp, tiles
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for tile in tiles:
            y[:, tile.start : tile.stop] = mlp.rows(x[:, tile.start : tile.stop], tile.routing)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), mlp = ctx.saved_tensors, ctx.mlp
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        for tile in ctx.tiles:
            rows = slice(tile.start, tile.stop)
            mlp.begin(tile)
            with torch.enable_grad():
                leaf = x[:, rows].detach().requires_grad_(grad_x is not None)
                y = mlp.rows(leaf, tile.routing)
            if y.requires_grad:
                torch.autograd.backward(y, grads[0][:, rows])
            if grad_x is not None and leaf.grad is not None:
                grad_x[:, rows] = leaf.grad
            mlp.finish(tile)
        return grad_x, None, None, None


def cut_mlps(base: LoraModel) -> None:
    """Apply a base's MLPs to long segments tile by tile."""
    layers = {layer.path: layer for layer in base.decoder.modules() if isinstance(layer, LoraLinear)}
    for path, module in base.decoder.named_modules():
        if path.rpartition(".")[2] not in _NAMES or len(inspect.signature(module.forward).parameters) != 1:
            continue
        inside = {each.path for each in module.modules() if isinstance(each, LoraLinear)}
        fused = [layers[inner_path].fused for inner_path in inside]
        if inside and not has_experts(module) and all(inside.issuperset(each.paths) for each in fused):
            module.forward = _Mlp(module, tuple({each.leader for each in fused}), base).forward
