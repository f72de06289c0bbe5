"""A base is proved before it is used: Motet's attention must reproduce the stock model, or the model is refused.

Checked on two short random sequences: one attention call per layer, logits equal to transformers' own eager attention within
tolerance, and packed, cached and solo passes equal bit for bit (where they are not, `exact` is False and a note says so).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from motet.errors import BaseModelError
from motet.model.base import BaseModel, pad_rows
from motet.model.kv_cache import KVCache
from motet.model.layout import Span, cached_layout, packed_layout, round_up
from motet.model.lora import Siblings, join

LENGTHS = (9, 22)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Largest difference of logits, as a share of the largest logit."""


def prove(
    wrapper: Callable[[], BaseModel], model: Any, name: str, device: torch.device, block_size: int, *, pack: bool = True
) -> BaseModel:
    """Wrap a stock eager model and prove that it still computes the same.

    Raises:
        BaseModelError: with the check that failed.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [torch.randint(0, vocabulary, (length,), generator=generator).to(device) for length in LENGTHS]
    with torch.no_grad():
        stock = [model(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]
        try:
            base = wrapper()
            base.block_size = block_size
            watch = _Watch()
            with base.routed(watch):
                packed, calls = _packed_logits(base, sequences, block_size)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise BaseModelError(f"{name}: the model does not work with Motet's attention: {error}") from error
        _check_calls(name, [layer for layer, _ in calls], int(model.config.get_text_config().num_hidden_layers))
        _check_logits(name, packed, stock, base.dtype)
        _leave_out(base, watch)
        watch.join(base)
        if pack:
            base.pack_weights()
        _limit_to_window(base, dict(calls))
        _check_exactness(base, sequences, packed, block_size)
    return base


class _Watch:
    """A routing that adds nothing and notes what adapters need to know.

    That is: which layers see exactly the rows of the batch, and which of them read the same input, one after another.
    """

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}
        self._families: list[tuple[Tensor, list[str]]] = []

    def linear(self, siblings: Siblings, x: Tensor) -> tuple[Tensor, ...]:
        """Apply the base to x [1, T, K] → [1, T, N]."""
        path = siblings.leader
        self.rows.setdefault(path, set()).add(x.shape[-2])
        if self._families and self._families[-1][0] is x:
            self._families[-1][1].append(path)
        else:
            self._families.append((x, [path]))
        return (siblings.weight(x),)

    def join(self, base: BaseModel) -> None:
        """Make siblings of the layers that read the same input, where each is called once."""
        calls = [path for _, paths in self._families for path in paths]
        for _, paths in self._families:
            if all(path in base.linears and calls.count(path) == 1 for path in paths):
                join([base.linears[path] for path in paths])


def _leave_out(base: BaseModel, watch: _Watch) -> None:
    """An adapter on a layer that is passed over, or that sees other rows, would be silently idle or wrong."""
    unfit = [path for path in base.linears if watch.rows.get(path) != {round_up(sum(LENGTHS), 4)}]
    for path in unfit:
        del base.linears[path]
    if unfit:
        names = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in unfit}))
        base.notes.append(
            f"{len(unfit)} layers get no adapter, because the model does not call them row by row: {names}"
        )


def _limit_to_window(base: BaseModel, windows: dict[int, int | None]) -> None:
    """Some models cut attention in their mask alone (Llama 4's chunks): untold, only shorter sequences are right."""
    config = base.model.config.get_text_config()
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None)
    expected = [index for index, kind in enumerate(kinds or []) if kind in ("sliding_attention", "chunked_attention")]
    told = [window for window in windows.values() if window]
    ignored = any(not windows.get(index) for index in expected) if kinds else not told
    found = [int(limit) for limit in limits if limit]
    if found and ignored and min(found) < base.max_positions:
        base.max_positions = min(found)
        base.notes.append(
            f"sequences are limited to {base.max_positions} tokens, the model's attention window: its layers do not tell their "
            "attention function of it"
        )


def _packed_logits(
    base: BaseModel, sequences: list[Tensor], block_size: int
) -> tuple[list[Tensor], list[tuple[int, int | None]]]:
    lengths = [len(sequence) for sequence in sequences]
    pad = round_up(sum(lengths), 4) - sum(lengths)
    tokens = torch.cat([*sequences, torch.zeros(pad, dtype=torch.long, device=base.device)])
    spans = [*lengths, pad] if pad else lengths
    positions = torch.cat([torch.arange(length, device=base.device) for length in spans])
    layout = packed_layout(spans, block_size, base.device)
    hidden = base.hidden(tokens, positions, layout)
    return list(base.logits(hidden).split(spans))[: len(lengths)], layout.calls


def _check_calls(name: str, calls: list[int], n_layers: int) -> None:
    if sorted(calls) != list(range(n_layers)):
        missing = sorted(set(range(n_layers)) - set(calls))
        raise BaseModelError(
            f"{name}: layers {missing or sorted(calls)} of {n_layers} do not call their attention exactly once (linear "
            "attention, state-space or shared layers); Motet would compute them wrongly, so this base is refused"
        )


def _check_logits(name: str, packed: list[Tensor], stock: list[Tensor], dtype: torch.dtype) -> None:
    largest = max(float(logits.abs().max()) for logits in stock)
    gap = max(float((ours - theirs).abs().max()) for ours, theirs in zip(packed, stock, strict=True))
    if not gap <= TOLERANCE[dtype] * largest:
        raise BaseModelError(
            f"{name}: logits differ from transformers' own by {gap:.3g} (largest logit {largest:.3g}); there is something in "
            "this architecture that Motet does not understand, so this base is refused"
        )


def _check_exactness(base: BaseModel, sequences: list[Tensor], packed: list[Tensor], block_size: int) -> None:
    solo = [_packed_logits(base, [sequence], block_size)[0][0] for sequence in sequences]
    alone = all(torch.equal(one, other) for one, other in zip(solo, packed, strict=True))
    decoded = torch.equal(_decoded_logits(base, sequences[1], block_size), packed[1])
    base.exact = alone and decoded
    if not base.exact:
        what = (
            "sequences packed together differ from each alone"
            if not alone
            else "decoding differs from the full forward pass"
        )
        base.notes.append(
            f"not bit-exact on this device in {str(base.dtype).removeprefix('torch.')}: {what}; jobs run, but their bytes may "
            "depend on their neighbours"
        )


def _decoded_logits(base: BaseModel, sequence: Tensor, block_size: int) -> Tensor:
    """Logits [T, V] of a sequence read as a prompt of 12 tokens and then token by token through the KV cache."""
    n_blocks = -(-len(sequence) // block_size)
    cache = KVCache(n_blocks, block_size, base.device)
    blocks = cache.take(n_blocks)
    logits, start = [], 0
    for length in [12] + [1] * (len(sequence) - 12):
        layout = cached_layout([Span(start, length, blocks)], cache, base.device)
        tokens = pad_rows(sequence[start : start + length])
        positions = pad_rows(torch.arange(start, start + length, device=base.device))
        logits.append(base.logits(base.hidden(tokens, positions, layout))[:length])
        start += length
    return torch.cat(logits)
