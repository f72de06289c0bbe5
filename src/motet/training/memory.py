"""Memory of training passes: measures the bytes that a pass keeps per row, and derives the longest trainable sequence.

Legend: T rows of a sequence.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from motet.model.attention.torch_attention import KEPT_SCORES
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.recompute import recomputes
from motet.model.routing import TrainerRouting, TrainSegment
from motet.training.head import HEAD_ROWS

_ROWS = 64
"""Rows of the measured pass."""
_RANK = 8
_MOST = 1 << 30
_SCORES = 4
"""Copies in fp32 of one block's attention scores during the backward pass."""
_SUMS = 4
"""Copies of the last hidden states that the head makes: hidden states, slopes and gradients."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes for training one sequence, without weights and adapters."""

    whole: int
    """Per row, for sequences whose MLPs run all rows at once."""
    tiled: int
    """Per row, for sequences longer than `long_rows`."""
    long_rows: int
    heads: int
    tile: int
    """Temporary memory of an MLP tile."""

    def of(self, n_tokens: int) -> int:
        """Bytes for a sequence of `n_tokens`; measured values are between half and twice the result."""
        scores = 4 * min(KEPT_SCORES, self.heads * n_tokens**2 // 2)
        if n_tokens <= self.long_rows:
            return scores + n_tokens * self.whole
        return scores + self.tile + n_tokens * self.tiled

    def longest(self, n_bytes: int) -> int:
        """The longest sequence that fits into `n_bytes`, in tokens."""
        whole, tiled = range(1, self.long_rows + 1), range(self.long_rows + 1, _MOST)
        in_tiles = bisect.bisect_right(tiled, n_bytes, key=self.of)
        return self.long_rows + in_tiles if in_tiles else bisect.bisect_right(whole, n_bytes, key=self.of)


def longest_sample(base: LoraModel, kept_tokens: int | None, n_bytes: int) -> int:
    """Tokens of the longest sample that can be trained in `n_bytes`.

    Args:
        base: the base.
        kept_tokens: as of `TorchTrainer`; a pass of as many must fit, too, or no longer sample is counted on.
        n_bytes: the memory.
    """
    again = recomputes(base) and kept_tokens is not None
    if kept_tokens != 0 or not again:
        whole = pass_memory(base, recompute=False).longest(n_bytes)
        if kept_tokens is None or not again or whole < kept_tokens:
            return whole
    return pass_memory(base, recompute=True).longest(n_bytes)


def pass_memory(base: LoraModel, *, recompute: bool, offload: bool = False) -> PassMemory:
    """Measure a forward pass of a few rows; with `offload`, inputs of layers are stored elsewhere."""
    arithmetic = base.arithmetic
    rows = max(_ROWS, arithmetic.rows)
    if base.kernels is not None:
        return _of_own_kernels(base, recompute)
    inputs = 1 if offload else int(base.model.config.get_text_config().num_hidden_layers)
    whole = _for_each_row(base, rows, recompute, inputs)
    base.arithmetic = replace(arithmetic, long_rows=0, mlp_rows=rows)
    try:
        tiled = _for_each_row(base, rows, recompute, inputs)
    finally:
        base.arithmetic = arithmetic
    tile = min(arithmetic.mlp_rows, arithmetic.long_rows) * max(0, whole - tiled)
    heads = int(base.model.config.get_text_config().num_attention_heads)
    return PassMemory(whole, min(whole, tiled), arithmetic.long_rows, heads, tile)


def _of_own_kernels(base: LoraModel, recompute: bool) -> PassMemory:
    """Motet's kernels report their memory themselves; the head adds a block of logits."""
    assert base.kernels is not None
    weights = _adapter(base)
    few, many = (
        base.kernels.pass_bytes(_routing(base, rows, weights), rows, recompute=recompute)
        for rows in (base.block_size, 2 * base.block_size)
    )
    each = (many - few) // base.block_size
    logits = HEAD_ROWS * base.info.vocab_size * (4 + base.dtype.itemsize)
    own = each + 4 * _SUMS * base.info.hidden_size
    return PassMemory(own, own, 0, 0, logits + few - each * base.block_size)


def _adapter(base: LoraModel) -> AdapterWeights:
    layout = base.adapter_layout("all-linear", _RANK)
    return AdapterWeights.from_masters(layout, 1.0, torch.zeros(layout.size, device=base.device), base.dtype)


def _routing(base: LoraModel, rows: int, weights: AdapterWeights) -> TrainerRouting:
    gradients = weights.layout.matrices(torch.zeros(weights.layout.size, device=base.device))
    return TrainerRouting([TrainSegment(0, rows, weights, gradients)], base.device, base.products, backward=True)


def _for_each_row(base: LoraModel, rows: int, recompute: bool, inputs: int) -> int:
    """Bytes per row; with `recompute`, the inputs of `inputs` layers are in memory."""
    config, size = base.model.config.get_text_config(), base.dtype.itemsize
    kept, layers = _kept(base, rows) / rows, int(config.num_hidden_layers)
    scores = _SCORES * 4 * base.block_size * int(config.num_attention_heads)
    widest = 0
    if base.arithmetic.long_rows:  # in tiles, temporary memory is that of one tile
        widest = 2 * max(fused.frozen.shape[0] for fused in (layer.fused for layer in base.linears.values()))
    passing = scores + size * (widest + _SUMS * base.info.hidden_size)
    held = kept / layers + size * inputs * base.info.hidden_size if recompute else kept
    return int(held + passing)


def _kept(base: LoraModel, rows: int) -> int:
    """Bytes that a pass keeps for its backward pass, without the base's weights."""
    weights = _adapter(base)
    routing = _routing(base, rows, weights)
    weights_held = {each.untyped_storage().data_ptr() for each in (weights.flat, *base.model.parameters())}
    sizes: dict[int, int] = {}
    held: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in weights_held:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            held.append(tensor)  # keep a reference, so that its address is not reused
        return tensor

    places = torch.arange(rows, device=base.device)
    with base.routed(routing), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, _same):
        base.hidden(places % base.info.vocab_size, places, base.attention.packed([rows]))
    return sum(sizes.values())


def _same(tensor: Any) -> Any:
    return tensor
