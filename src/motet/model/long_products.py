"""Test products of training length, alone and with other rows: libraries may choose another kernel for many rows.

Sizes determine how a product is split among threads, so each size is tested once per process and number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from motet.model.arithmetic import round_up
from motet.model.lora import AdapterLayout, AdapterWeights, FusedLinears, make_layout
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment

_ROWS = (700, 468, 236)
"""Row counts of adapters that train together; the second is also tested alone."""
_WORK = 2 * 10**9
"""Maximum multiplications of a tested product; larger products are tested with fewer rows."""
_RANKS = (4, 8)
_tried: dict[tuple[Any, ...], bool] = {}


def agree(base: LoraModel) -> bool:
    """Whether products with each layer, and gradients of its adapters, have the same bits alone and with other rows."""
    for fused in {layer.fused.leader: layer.fused for layer in base.linears.values()}.values():
        frozen = fused.frozen
        key = (*frozen.shape, fused.sizes, type(frozen), base.dtype, base.arithmetic, torch.get_num_threads())
        if key not in _tried:
            _tried[key] = all(_agrees(base, fused, rank) for rank in _RANKS)
        if not _tried[key]:
            return False
    return True


def _agrees(base: LoraModel, fused: FusedLinears, rank: int) -> bool:
    n_out, n_in = fused.frozen.shape
    share = min(1.0, _WORK / (sum(_ROWS) * n_in * n_out))
    lengths = [round_up(max(1, int(rows * share)), base.arithmetic.rows) for rows in _ROWS]
    linears = {path: (n_in, size) for path, size in zip(fused.paths, fused.sizes, strict=True)}
    layout = make_layout(linears, rank, [fused.paths])
    generator = torch.Generator().manual_seed(0)
    x_TK, slope_TN = (torch.randn(sum(lengths), width, generator=generator).to(base.dtype) for width in (n_in, n_out))
    masters = [torch.randn(layout.size, generator=generator) for _ in lengths]
    adapters = [AdapterWeights.from_masters(layout, 1.0, each, base.dtype) for each in masters]
    mine = slice(lengths[0], lengths[0] + lengths[1])
    together = _train(base, fused, layout, list(zip(adapters, lengths, strict=True)), x_TK, slope_TN)
    alone = _train(base, fused, layout, [(adapters[1], lengths[1])], x_TK[mine], slope_TN[mine])
    rows = zip(together[:2], alone[:2], strict=True)
    return all(torch.equal(both[mine], one) for both, one in rows) and torch.equal(together[2][1], alone[2][0])


def _train(
    base: LoraModel,
    fused: FusedLinears,
    layout: AdapterLayout,
    members: Sequence[tuple[AdapterWeights, int]],
    x_TK: Tensor,
    slope_TN: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The layers' outputs [T, N], the gradient of their input [T, K], and the flat gradients of the adapters."""
    segments, arenas, start = list[TrainSegment](), list[Tensor](), 0
    for weights, length in members:
        arenas.append(torch.zeros(layout.size))
        segments.append(TrainSegment(start, start + length, weights, layout.matrices(arenas[-1])))
        start += length
    with torch.enable_grad():
        x = x_TK[None].clone().requires_grad_()
        y = torch.cat(TrainerRouting(segments, base.device, base.products, backward=True).linear(fused, x), dim=-1)
        y.backward(slope_TN[None])
    assert x.grad is not None
    return y[0].detach(), x.grad[0], arenas
