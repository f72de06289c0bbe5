"""Compare a base with transformers' own model layer by layer, each on the same input, so that no rounding adds up.

A layer's parts are its output, as what it adds to its input, and the outputs of its direct children (attention, MLP,
norms). A part that is not near is judged by fp32: ours may not be much farther from it than transformers' is.

Legend: T rows, D width.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from motet.model.exactness import packed_logits
from motet.model.reference_model import Part, outputs_replaced, parts_recorded
from motet.model.shards import layers_of
from motet.model.tolerance import FLOOR, gap, spread, spread_of_all

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel
    from motet.model.reference_model import Stock

_log = logging.getLogger(__name__)

TIMES = 2
"""Accepted distance from fp32, as a multiple of transformers' own."""


@dataclass(frozen=True)
class LayerVerdict:
    """How far the worst part is from transformers' own."""

    part: str
    gap: float
    """Share of the part's size."""
    accepted: float

    @property
    def close(self) -> bool:
        """Whether rounding explains the gap; False for NaN."""
        return self.gap <= self.accepted

    @property
    def excess(self) -> float:
        """The gap as a multiple of the accepted one."""
        return self.gap / self.accepted

    def __str__(self) -> str:
        return (
            f"{self.part} differs from transformers' own on the same input by {self.gap:.2g} of its size "
            f"(accepted: {self.accepted:.2g})"
        )


def compare_layers(base: LoraModel, stock: Stock, *, thorough: bool) -> LayerVerdict | None:
    """The worst part of all layers, and of what comes after them; None if the layers cannot be compared.

    Args:
        base: routed without adapters, with the experts of the stock model.
        stock: transformers' model.
        thorough: fp32 judges every part, not only those that are not near.
    """
    try:
        layers = layers_of(base.decoder)
        recorded: dict[Part, list[Tensor]] = {}
        with parts_recorded(layers, recorded), outputs_replaced(layers, stock.parts):
            logits = torch.cat(packed_logits(base, stock.sequences)[0])
    except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:  # layers of an unknown form
        _log.debug("%s: its layers cannot be compared: %r", base.info.name, error)
        return None
    rows = sum(map(len, stock.sequences))
    ours = {part: found[0][..., :rows, :] for part, found in recorded.items() if len(found) == 1}
    wanted = torch.cat(stock.logits)
    tail = gap(base.changes.of_tokens(logits), base.changes.of_tokens(wanted))
    verdicts = [LayerVerdict("what follows the last layer", tail, FLOOR[base.dtype])]
    for index in range(len(layers)):
        near = {part: _near(ours[part], stock, part) for part in _parts(ours, stock, index)}
        far = {part for part, verdict in near.items() if thorough or not verdict.close}
        verdicts += [verdict for part, verdict in near.items() if part not in far]
        by_float32 = _by_float32(ours, stock, index, far) if far else []
        if by_float32 is None and thorough:
            return None
        verdicts += by_float32 or []
    return max(verdicts, key=lambda verdict: (math.isnan(verdict.excess), verdict.excess))


def _parts(ours: dict[Part, Tensor], stock: Stock, layer: int) -> list[Part]:
    return [
        part
        for part, found in stock.parts.items()
        if part[0] == layer and part in ours and ours[part].shape == found.shape
    ]


def _near(ours: Tensor, stock: Stock, part: Part) -> LayerVerdict:
    """Whether a part is as near as a floor allows, beside the rounding of its numbers."""
    theirs = stock.parts[part]
    size = spread_of_all(stock.added(part, theirs))
    limit = FLOOR[ours.dtype] * size + torch.finfo(ours.dtype).eps / 2 * spread_of_all(theirs)
    return LayerVerdict(_name(part), _distance(ours, theirs) / size, limit / size)


def _by_float32(ours: dict[Part, Tensor], stock: Stock, layer: int, parts: set[Part]) -> list[LayerVerdict] | None:
    """Verdicts on parts of a layer by their distances from fp32; None if the layer does not run in fp32."""
    try:
        right = stock.in_float32(layer)
    except Exception as error:  # code of a model may need its dtype
        _log.debug("layer %s does not run in fp32: %r", layer, error)
        return None
    verdicts = []
    for part in parts:
        exact = right.get(part[1])
        if exact is None or exact.shape != ours[part].shape:
            return None
        size = spread_of_all(stock.added(part, exact))
        limit = TIMES * _distance(stock.parts[part], exact) + FLOOR[torch.float32] * spread_of_all(exact)
        verdicts.append(LayerVerdict(_name(part), _distance(ours[part], exact) / size, limit / size))
    return verdicts


def _distance(left: Tensor, right: Tensor) -> float:
    return spread((left.float() - right.float()).flatten(0, -2))


def _name(part: Part) -> str:
    layer, child = part
    return f"{child} of layer {layer}" if child else f"layer {layer}"
