"""A pass through a decoder by this room's kernels: the same launches for sampling and training.

A layer is: norm with residual add; queries, keys and values; rotary with norms and cache; attention; output; norm; gate
and up; gate; down. Adapters add the launch of `add_adapters` after output and down; everywhere else they are added where
the product is read. What is summed beside products (norms) is one kernel in all passes.

Legend: T packed rows, D model width, H query heads, K KV heads, E head width, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.kernels.cuda.adapters import PARTS, AdapterTables
from motet.kernels.cuda.attention import CudaPass
from motet.kernels.cuda.decoder_shape import pieces_of
from motet.kernels.cuda.kernels.adapters import add_adapters
from motet.kernels.cuda.kernels.embedding import embed
from motet.kernels.cuda.kernels.gates import gate_and_up
from motet.kernels.cuda.kernels.norms import norm_after_add, norm_before_add
from motet.kernels.cuda.kernels.rotary import rotate_and_write
from motet.kernels.cuda.launches import launch
from motet.kernels.cuda.layers import DecoderPlan, LayerPlan
from motet.kernels.cuda.product_backends import shrink
from motet.kernels.cuda.products import Products

QKV, OUTPUT, GATE_UP, DOWN = range(len(PARTS))
_COLUMNS = 256
"""Columns of a program that adds adapters, or computes gates."""


@dataclass(frozen=True)
class LayerValues:
    """What the backward pass of a layer reads. Products are without their adapters where a kernel adds these later."""

    x_TD: Tensor
    """The layer's input."""
    normed_TD: Tensor
    qkv_TN: Tensor
    query_THE: Tensor
    keys: Tensor
    values: Tensor
    attended_THE: Tensor
    output_TD: Tensor | None
    """What attention adds to the residual stream, before a norm; None if it has none."""
    middle_TD: Tensor
    """The residual stream between attention and MLP."""
    middle_normed_TD: Tensor
    both_TI: Tensor
    gated_TI: Tensor


@dataclass(frozen=True)
class KeptLayer:
    """What a pass keeps of a layer for its gradient."""

    x_TD: Tensor
    """The layer's input."""
    products: KeptProducts | None = None
    """None if they are computed again."""


@dataclass(frozen=True)
class KeptProducts:
    """What norms and gates do not give: the fields of `LayerValues` of these names, and those of the adapters."""

    qkv_TN: Tensor
    query_THE: Tensor
    keys: Tensor
    values: Tensor
    attended_THE: Tensor
    output_TD: Tensor | None
    """None if it is added without a norm, and `done_TD` likewise."""
    middle_TD: Tensor
    both_TI: Tensor
    done_TD: Tensor | None
    """What the MLP adds to the residual stream, before a norm."""
    tables: AdapterTables
    """Those whose memory has the layer's products with A."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        own = [each for each in vars(self).values() if isinstance(each, Tensor)]
        return own + list(self.tables.inner.values())


@dataclass
class DecoderForward:
    """One pass. `hidden` computes it. Rows in no tile are padding: what they get is undefined."""

    plan: DecoderPlan
    products: Products
    attention: CudaPass
    tables: AdapterTables
    kept: list[KeptLayer] | None = None
    """With a list, what the gradient of every layer needs is appended to it, and at last the last norm's input."""
    recompute: bool = True
    """Whether `kept` gets the inputs of layers alone."""
    _nothing: tuple[Tensor, Tensor] | None = None
    _zeros: Tensor | None = None
    x: Tensor = field(init=False)
    """The residual stream [T, D]."""
    _delta: Tensor | None = None
    """What is still to be added to it."""

    def hidden(self, tokens_T: Tensor) -> Tensor:
        """Final hidden states [T, D]."""
        plan = self.plan
        width, n_rows = plan.width, len(tokens_T)
        self.x = plan.embedding.new_empty(n_rows, width)
        block = min(1024, lanes(width))
        launch(
            embed, (n_rows, triton.cdiv(width, block)), tokens_T, plan.embedding, self.x,
            SCALE=plan.embedding_scale, D=width, BLOCK=block, **options(4),
        )  # fmt: skip
        for index, layer in enumerate(plan.layers):
            self._layer(index, layer)
        hidden = self._normed(plan.norm_out)
        if self.kept is not None:
            self.kept.append(KeptLayer(self.x))
        return hidden

    def _layer(self, index: int, layer: LayerPlan) -> None:
        if self.kept is not None and not self.recompute:
            self.tables = replace(self.tables, apart=True, inner={})
        values = self._to_gate(index, layer)
        done = self._product(index, layer, DOWN, values.gated_TI)
        self._add(index, DOWN, done, layer.norm_done)
        if self.kept is not None:
            self.kept.append(KeptLayer(values.x_TD, None if self.recompute else self._products(layer, values, done)))

    def _products(self, layer: LayerPlan, values: LayerValues, done: Tensor) -> KeptProducts:
        return KeptProducts(
            values.qkv_TN, values.query_THE, values.keys, values.values, values.attended_THE,
            values.output_TD, values.middle_TD, values.both_TI, None if layer.norm_done is None else done, self.tables,
        )  # fmt: skip

    def again(self, index: int, kept: KeptLayer) -> tuple[LayerValues, Tensor | None]:
        """What a layer computed, with the same bits, and what its MLP adds if that has a norm.

        The list `kept` of this pass must not be None.
        """
        layer = self.plan.layers[index]
        self._begin_at(kept.x_TD, added=index > 0 and self.plan.layers[index - 1].norm_done is None)
        if (products := kept.products) is not None:
            self.tables = products.tables
            normed, x = self._normed(layer.norm_in), self.x
            self._begin_at(products.middle_TD, added=layer.norm_attended is None)
            middle_normed = self._normed(layer.norm_mlp)
            gated = products.both_TI.new_empty(len(x), self.plan.inner)
            self._gate(index, products.both_TI, gated)
            return LayerValues(
                x, normed, products.qkv_TN, products.query_THE, products.keys, products.values, products.attended_THE,
                products.output_TD, self.x, middle_normed, products.both_TI, gated,
            ), products.done_TD  # fmt: skip
        values = self._to_gate(index, layer)
        if layer.norm_done is not None:
            added = self._product(index, layer, DOWN, values.gated_TI)
            self._add_adapters(index, DOWN, added)
            return values, added
        if self.tables.adapted:
            shrink(values.gated_TI, (self.tables, self.tables.group(index, DOWN)))
        return values, None

    def _to_gate(self, index: int, layer: LayerPlan) -> LayerValues:
        plan, n_rows = self.plan, len(self.x)
        y = self._normed(layer.norm_in)
        x = self.x
        qkv = self._product(index, layer, QKV, y)
        query = qkv.new_empty(n_rows, plan.heads, plan.head_width)
        key_like = qkv.new_empty(0, plan.kv_heads, plan.head_width)
        keys, values = self.attention.pools(index, key_like, key_like)
        self._rotate(index, layer, qkv, query, keys, values)
        attended = torch.empty_like(query)
        self.attention.attend_into(layer.call, query, keys, values, attended)
        output = self._product(index, layer, OUTPUT, attended.flatten(1))
        self._add(index, OUTPUT, output, layer.norm_attended)
        normed = self._normed(layer.norm_mlp)
        middle = self.x
        both = self._product(index, layer, GATE_UP, normed)
        gated = both.new_empty(n_rows, plan.inner)
        self._gate(index, both, gated)
        before_norm = None if layer.norm_attended is None else output
        return LayerValues(x, y, qkv, query, keys, values, attended, before_norm, middle, normed, both, gated)

    def _begin_at(self, x_TD: Tensor, *, added: bool) -> None:
        """Continue with this residual stream; what was `added` by the next norm's kernel is added by it again, as −0."""
        self.x, self._delta = x_TD, None
        if added:
            if self._zeros is None:
                self._zeros = torch.full_like(x_TD, -0.0)  # which changes no bit
            self._delta = self._zeros

    def _sum(self) -> Tensor:
        """Where the next residual stream is written: over this one, unless that is kept."""
        return self.x if self.kept is None else torch.empty_like(self.x)

    def _normed(self, weight: Tensor | None) -> Tensor:
        """Add what is to be added to the residual stream; returns its norm, or without one the stream itself."""
        plan, delta = self.plan, self._delta
        if weight is None:
            assert delta is None
            return self.x
        y, x_out = torch.empty_like(self.x), self.x if delta is None else self._sum()
        launch(
            norm_after_add, (len(y),), self.x, self.x if delta is None else delta, x_out, weight, y,
            ADD=delta is not None, **self._norm_options(plan.residual),
        )  # fmt: skip
        self.x, self._delta = x_out, None
        return y

    def _add(self, index: int, which: int, delta: Tensor, norm: Tensor | None) -> None:
        """Add a product's output to the residual stream, with its adapters; what has no norm is added by the next norm."""
        self._add_adapters(index, which, delta)
        if norm is None:
            self._delta = delta
            return
        x_out = self._sum()
        launch(norm_before_add, (len(delta),), self.x, delta, x_out, norm, **self._norm_options(self.plan.residual))
        self.x = x_out

    def _add_adapters(self, index: int, which: int, y: Tensor) -> None:
        if self.tables.adapted:
            width = y.shape[1]
            launch(
                add_adapters, (self._n_tiles, triton.cdiv(width, _COLUMNS)), y, *self.adapters(index, which),
                N=width, BLOCK=_COLUMNS, **self.adapter_options(which, width), **options(4),
            )  # fmt: skip

    def _product(self, index: int, layer: LayerPlan, which: int, x_TK: Tensor) -> Tensor:
        weight = layer.products[which]
        y = x_TK.new_empty(len(x_TK), len(weight.weight_NK))
        adapters = (self.tables, self.tables.group(index, which)) if self.tables.adapted else None
        self.products.multiply(x_TK, weight, y, adapters)
        return y

    def _rotate(self, index: int, layer: LayerPlan, qkv: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> None:
        arguments, constants = self.rotary_options(index, layer, keys)
        grid = self._n_tiles, self.plan.heads + 2 * self.plan.kv_heads
        launch(rotate_and_write, grid, qkv, query, keys, values, *arguments, **constants)

    def rotary_options(self, index: int, layer: LayerPlan, keys: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the rotation of queries and keys takes, forward and backward."""
        plan, attention = self.plan, self.attention
        half = plan.rotated // 2
        rest = plan.head_width - plan.rotated
        numbers = self._unused[1]
        q_part, k_part, _ = self.tables.places.place(index, QKV).parts

        def given(tensor: Tensor | None) -> Tensor:
            return numbers if tensor is None else tensor

        arguments = (
            attention.positions_T, attention.places_T, given(layer.cosines), given(layer.sines),
            given(plan.query_scales), given(layer.norm_q), given(layer.norm_k), *self.adapters(index, QKV),
        )  # fmt: skip
        return arguments, {
            "H": plan.heads, "K": plan.kv_heads, "E": plan.head_width, "HALF": half, "BLOCK": lanes(half),
            "REST": rest, "BLOCK_REST": lanes(rest), "ROTATES": layer.cosines is not None,
            "SCALED": plan.query_scales is not None, "NORM": plan.norms_span, "EPSILON": plan.epsilon,
            "KV_BLOCK": keys.shape[2], "STRIDE_Q": q_part.stride, "STRIDE_K": k_part.stride,
            **self.adapter_options(QKV, q_part.stride, k_part.stride, half, plan.head_width), **options(2),
        }  # fmt: skip

    def _gate(self, index: int, both: Tensor, gated: Tensor) -> None:
        stride = self.tables.places.place(index, GATE_UP).parts[0].stride
        width = self.plan.inner
        block = min(_COLUMNS, lanes(width))
        launch(
            gate_and_up, (self._n_tiles, triton.cdiv(width, block)), both, gated, *self.adapters(index, GATE_UP),
            WIDTH=width, TANH=self.plan.tanh, BLOCK=block, STRIDE=stride,
            **self.adapter_options(GATE_UP, stride, width), **options(4),
        )  # fmt: skip

    @property
    def _n_tiles(self) -> int:
        return len(self.tables.tiles_N17)

    @property
    def _unused(self) -> tuple[Tensor, Tensor]:
        """Memory for arguments that a launch does not read: int64 and fp32."""
        if self._nothing is None:
            device = self.tables.tiles_N17.device
            self._nothing = (
                torch.zeros(16, dtype=torch.int64, device=device),
                torch.zeros(16, dtype=torch.float32, device=device),
            )
        return self._nothing

    def adapters(self, index: int, which: int) -> tuple[Any, ...]:
        """Arguments of kernels that add adapters: tiles, entries and products with A."""
        tables = self.tables
        entries, inner, width = *self._unused, 0
        if tables.adapted:
            group = tables.group(index, which)
            entries, inner, width = group.entries_SC, group.inner, group.width
        return tables.tiles_N17, tables.n_tiles, entries, inner, tables.n_rows, width

    def adapter_options(self, which: int, *elements: int) -> dict[str, Any]:
        """Constants of these kernels; loads of B are aligned if 16 bytes divide all these offsets in elements."""
        itemsize = self.x.element_size()
        return {
            "ENTRY": 3 + 2 * PARTS[which],
            "PIECES": pieces_of(self.tables.places.place(0, which).n_inputs),
            "ALIGNED": all(n * itemsize % 16 == 0 for n in elements),
        }

    def _norm_options(self, factor: float) -> dict[str, Any]:
        width, epsilon = self.plan.width, self.plan.epsilon
        return {
            "D": width, "BLOCK": lanes(width), "EPSILON": epsilon, "FACTOR": factor, **options(8 if width > 1024 else 4)
        }  # fmt: skip


def lanes(n: int) -> int:
    """A power of two that is at least n, and at least 16."""
    return max(16, int(triton.next_power_of_2(n)))


def options(warps: int) -> dict[str, Any]:
    """How a kernel is compiled whose program keeps nothing in flight."""
    return {"num_warps": warps, "num_stages": 1}
