"""The backward pass of a training pass: what was not kept of a layer by the kernels of the forward pass, then its gradients.

No number of adapters changes the launches of a layer, and no sum depends on other sequences: a row's gradient is computed
from its own sequence (and those that share a prefix with it), and adapters' gradients are sums of whole numbers.

Legend: T packed rows, D model width, H query heads, E head width, K inputs, N outputs, W width of A, S columns of A x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.kernels.cuda.adapters import PARTS, TILE, AdapterTables
from motet.kernels.cuda.attention import CudaPass
from motet.kernels.cuda.attention_back import AttentionBack
from motet.kernels.cuda.decoder_shape import pieces_of
from motet.kernels.cuda.forward import (
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    DecoderForward,
    KeptLayer,
    LayerValues,
    lanes,
    options,
)
from motet.kernels.cuda.kernels.adapter_gradients import add_adapters_back, add_units, shrink_back
from motet.kernels.cuda.kernels.gates import gate_and_up_back
from motet.kernels.cuda.kernels.norms import norm_after_add_back, norm_before_add_back
from motet.kernels.cuda.kernels.rotary_back import rotate_back
from motet.kernels.cuda.launches import launch
from motet.kernels.cuda.layers import DecoderPlan, LayerPlan
from motet.kernels.cuda.products import Products
from motet.kernels.cuda.unit_tables import UnitTables
from motet.model.routing import TrainerRouting

_COLUMNS = 128
"""Columns of a program that adds adapters' part, or computes gates."""
_UNIT_ROWS = 64
"""Rows of a unit that are multiplied at a time, from its first row on."""
_UNIT_COLUMNS = 64
"""Columns of a program that adds units."""


@dataclass(frozen=True)
class _Inner:
    """A x of a product's rows and its gradient."""

    s_TS: Tensor
    """Columns as in `kernels.adapter_gradients`."""
    slope_TW: Tensor


@dataclass
class DecoderBackward:
    """One pass. `run` adds the gradients."""

    plan: DecoderPlan
    products: Products
    attention: AttentionBack
    units: UnitTables | None
    forward: DecoderForward

    @classmethod
    def of(
        cls, plan: DecoderPlan, products: Products, attention: CudaPass, tables: AdapterTables, routing: TrainerRouting
    ) -> DecoderBackward:
        """The backward pass of a pass with these tables."""
        again = DecoderForward(plan, products, attention, replace(tables, apart=True, inner={}), [])
        return cls(
            plan,
            products,
            AttentionBack.of(attention, plan.head_width, plan.heads // plan.kv_heads),
            UnitTables.of(routing, attention),
            again,
        )

    @torch.no_grad()
    def run(self, kept: list[KeptLayer], slope_TD: Tensor) -> None:
        """Add the gradients of all adapters.

        Args:
            kept: as the forward pass filled it; emptied.
            slope_TD: of the final hidden states.
        """
        if self.units is None:
            kept.clear()
            return
        stream, added = self._norm(slope_TD.contiguous(), kept.pop().x_TD, self.plan.norm_out, None)
        while kept:
            stream, added = self._layer(len(kept) - 1, kept.pop(), stream, added)

    def _layer(self, index: int, kept: KeptLayer, stream_TD: Tensor, added_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a layer's input, from those of its output: of the residual stream, and of what is added to it."""
        layer = self.plan.layers[index]
        values, down = self.forward.again(index, kept)
        if down is not None:
            added_TD = self._norm_of_added(added_TD, down, layer.norm_done)
        slope, inner = self._back(index, DOWN, added_TD)
        both = self._gate(index, values, slope, inner)
        self._add_units(index, DOWN, values.gated_TI, added_TD, inner)
        slope = self._through(index, GATE_UP, values.middle_normed_TD, both)
        stream_TD, added_TD = self._norm(slope, values.middle_TD, layer.norm_mlp, stream_TD)
        if values.output_TD is not None:
            added_TD = self._norm_of_added(added_TD, values.output_TD, layer.norm_attended)
        slope = self._through(index, OUTPUT, values.attended_THE.flatten(1), added_TD)
        heads = self.attention.gradients(
            layer.call, values.query_THE, values.keys, values.values, values.attended_THE,
            slope.view_as(values.attended_THE),
        )  # fmt: skip
        slope = self._rotate(index, layer, values, heads)
        if index == 0:  # embeddings are frozen
            self._add_units(index, QKV, values.normed_TD, slope, self._shrink(index, QKV, slope))
            return stream_TD, added_TD
        slope = self._through(index, QKV, values.normed_TD, slope)
        return self._norm(slope, values.x_TD, layer.norm_in, stream_TD)

    # --- products and adapters ----------------------------------------------------------------------------------------

    def _through(self, index: int, which: int, x_TK: Tensor, slope_TN: Tensor) -> Tensor:
        """The gradient of a product's input [T, K], with the adapters' part; adds the gradients of A and B."""
        slope_TK, inner = self._back(index, which, slope_TN)
        self._add_units(index, which, x_TK, slope_TN, inner)
        width = slope_TK.shape[1]
        launch(
            add_adapters_back, (self._n_tiles, triton.cdiv(width, _COLUMNS)), slope_TK, inner.slope_TW,
            *self._tiles, *self._entries(index, which), K=width, BLOCK=_COLUMNS, ENTRY=3 + 2 * PARTS[which], **options(4),
        )  # fmt: skip
        return slope_TK

    def _back(self, index: int, which: int, slope_TN: Tensor) -> tuple[Tensor, _Inner]:
        """The frozen part of the gradient of a product's input [T, K]; and the gradient of A x."""
        inner = self._shrink(index, which, slope_TN)
        return self.products.back(slope_TN, self.plan.layers[index].products[which]), inner

    def _shrink(self, index: int, which: int, slope_TN: Tensor) -> _Inner:
        group = self.forward.tables.group(index, which)
        n_rows, s_width = len(slope_TN), group.width + TILE * PARTS[which]
        s_TS, slope_TW = slope_TN.new_empty(n_rows, s_width), slope_TN.new_empty(n_rows, group.width)
        parts = self._parts(which, slope_TN.shape[1], group.strides)
        sizes = parts["FIRST"], parts["REST"], *group.strides
        launch(
            shrink_back, (self._n_tiles, triton.cdiv(group.width, TILE)), slope_TN, s_TS, slope_TW,
            *self._tiles, group.entries_SC, group.inner, n_rows, group.width, s_width,
            **parts, ENTRY=3 + 2 * PARTS[which],
            PIECES=pieces_of(self.forward.tables.places.place(0, which).n_inputs), DEPTH=64,
            ALIGNED=all(n * slope_TN.element_size() % 16 == 0 for n in sizes), **options(4),
        )  # fmt: skip
        return _Inner(s_TS, slope_TW)

    def _add_units(self, index: int, which: int, x_TK: Tensor, slope_TN: Tensor, inner: _Inner) -> None:
        assert self.units is not None
        units, group = self.units, self.forward.tables.group(index, which)
        width, parts = x_TK.shape[1], self._parts(which, slope_TN.shape[1], group.strides)
        blocks = [width, parts["FIRST"], *[parts["REST"]] * (parts["PARTS"] - 1)]
        grid = (
            len(units.groups_G4), sum(triton.cdiv(each, _UNIT_COLUMNS) for each in blocks),
            triton.cdiv(group.width, TILE),
        )  # fmt: skip
        launch(
            add_units, grid, x_TK, slope_TN, inner.s_TS, inner.slope_TW, units.units_U2, units.groups_G4,
            group.entries_SC, units.places_C3, units.factors_C, group.width, inner.s_TS.shape[1], K=width, **parts,
            ENTRY=3 + 2 * PARTS[which], ROWS=_UNIT_ROWS, BLOCK=_UNIT_COLUMNS, **options(4),
        )  # fmt: skip

    def _parts(self, which: int, n_outputs: int, strides: tuple[int, ...]) -> dict[str, int]:
        """Constants about the columns of a product."""
        plan = self.plan
        first = plan.heads * plan.head_width if which == QKV else n_outputs // PARTS[which]
        rest = 0 if PARTS[which] == 1 else (n_outputs - first) // (PARTS[which] - 1)
        return {
            "FIRST": first, "REST": rest or first, "STRIDE_FIRST": strides[0], "STRIDE_REST": strides[-1],
            "PARTS": PARTS[which],
        }  # fmt: skip

    # --- between products ---------------------------------------------------------------------------------------------

    def _norm(self, slope: Tensor, x: Tensor, weight: Tensor | None, later: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of the residual stream x and of what was added to it, from those of its norm and of the later stream."""
        factor = self.plan.residual
        total = torch.empty_like(x)
        delta = total if factor == 1 else torch.empty_like(x)
        launch(
            norm_after_add_back, (len(x),), slope, x, self.plan.norm_out if weight is None else weight,
            slope if later is None else later, total, delta,
            FACTOR=factor, LATER=later is not None, NORM=weight is not None, **self._norm_options(),
        )  # fmt: skip
        return total, delta

    def _norm_of_added(self, slope: Tensor, added: Tensor, weight: Tensor | None) -> Tensor:
        out = torch.empty_like(added)
        launch(norm_before_add_back, (len(added),), slope, added, weight, out, **self._norm_options())
        return out

    def _norm_options(self) -> dict[str, Any]:
        width = self.plan.width
        return {"D": width, "BLOCK": lanes(width), "EPSILON": self.plan.epsilon, **options(8 if width > 1024 else 4)}

    def _gate(self, index: int, values: LayerValues, slope: Tensor, inner: _Inner) -> Tensor:
        both = torch.empty_like(values.both_TI)
        forward, width = self.forward, self.plan.inner
        block = min(_COLUMNS, lanes(width))
        stride = forward.tables.places.place(index, GATE_UP).parts[0].stride
        launch(
            gate_and_up_back, (self._n_tiles, triton.cdiv(width, block)), values.both_TI, slope, inner.slope_TW, both,
            *forward.adapters(index, GATE_UP), *self._entries(index, DOWN), WIDTH=width, TANH=self.plan.tanh,
            BLOCK=block, STRIDE=stride, AFTER=3 + 2 * PARTS[DOWN],
            **forward.adapter_options(GATE_UP, stride, width), **options(4),
        )  # fmt: skip
        return both

    def _rotate(
        self, index: int, layer: LayerPlan, values: LayerValues, heads: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """The gradient of the product of queries, keys and values, before its adapters."""
        out = torch.empty_like(values.qkv_TN)
        arguments, constants = self.forward.rotary_options(index, layer, heads[1])
        launch(
            rotate_back, (self._n_tiles, self.plan.heads + 2 * self.plan.kv_heads), values.qkv_TN, *heads, out,
            *arguments, **constants,
        )  # fmt: skip
        return out

    @property
    def _n_tiles(self) -> int:
        return len(self.forward.tables.tiles_N17)

    @property
    def _tiles(self) -> tuple[Tensor, Tensor]:
        return self.forward.tables.tiles_N17, self.forward.tables.n_tiles

    def _entries(self, index: int, which: int) -> tuple[Tensor, int]:
        group = self.forward.tables.group(index, which)
        return group.entries_SC, group.width
