"""A base whose passes run in this room's kernels on a GPU, for both sampling and training.

Legend: T packed rows, N head rows, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from motet.kernels.cuda.adapters import AdapterTables, Places, runs_of, widths_of
from motet.kernels.cuda.attention import CudaAttention, CudaPass
from motet.kernels.cuda.backward import DecoderBackward
from motet.kernels.cuda.decoder_shape import kept_bytes, passing_bytes
from motet.kernels.cuda.forward import DecoderForward, KeptLayer
from motet.kernels.cuda.layers import DecoderPlan
from motet.kernels.cuda.math import CudaMath
from motet.kernels.cuda.products import Products, ProductWeight
from motet.kernels.cuda.step import CudaSteps
from motet.model.accelerator import Recorder
from motet.model.attention import AttentionBackend, AttentionPass
from motet.model.kv_cache import KVCache
from motet.model.lora import Routing
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting


class CudaBase:
    """Implements `Kernels` for one base."""

    whole_sums = True

    def __init__(
        self,
        base: LoraModel,
        products_of: Callable[[Sequence[ProductWeight]], Products],
        recorder: Recorder | None = None,
    ) -> None:
        """`base` must be covered (see `motet.kernels.cuda.supported_bases`); `products_of` makes the products with its weights.

        `recorder` is the one with which ways to multiply were tried: steps are recorded on its stream.
        """
        self.base, self.plan, self.places = base, DecoderPlan.of(base), Places.of(base)
        self.products = products_of(self.plan.weights)
        self.math = CudaMath()
        self._recorder = recorder or Recorder(base.device)
        self.attention: AttentionBackend
        self.read_keys_in_blocks(base.block_size)

    def read_keys_in_blocks(self, block_size: int) -> None:
        """Set the KV block size of passes without a cache."""
        self.attention = CudaAttention(block_size, self.base.device)

    def prepare(self, threads: int) -> None:
        """Does nothing: the first backward pass needs no memory of its own."""

    def pass_bytes(self, routing: Routing, n_rows: int, *, recompute: bool) -> int:
        """See `Kernels`."""
        shape, widths = self.plan.shape, widths_of(self.places, (weights for weights, *_ in runs_of(routing)))
        row = kept_bytes(shape, widths, recompute=recompute) + passing_bytes(shape, widths, recompute=recompute)
        return n_rows * row

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attention: AttentionPass, routing: Routing) -> Tensor:
        """Final hidden states [T, D] of packed tokens, in the base's dtype; zeros for padding rows."""
        assert isinstance(attention, CudaPass)
        n_rows = len(attention.positions_T)
        if isinstance(routing, TrainerRouting) and routing.anchor.requires_grad and torch.is_grad_enabled():
            hidden: Tensor = _Hidden.apply(routing.anchor, self, token_ids_T[:n_rows], attention, routing)  # type: ignore[no-untyped-call]
        else:
            hidden = self.decode(token_ids_T[:n_rows], attention, self._tables(n_rows, routing))
        return pad(hidden, (0, 0, 0, len(token_ids_T) - n_rows))

    def _tables(self, n_rows: int, routing: Routing) -> AdapterTables:
        return AdapterTables.of(self.places, runs_of(routing), n_rows, self.base.device)

    def decode(
        self, token_ids_T: Tensor, attention: CudaPass, tables: AdapterTables, kept: list[KeptLayer] | None = None
    ) -> Tensor:
        """Final hidden states [T, D] by launches only, so that a graph can record them."""
        recompute = bool(self.base.decoder.layers[0].training)  # type: ignore[index,union-attr]
        return DecoderForward(self.plan, self.products, attention, tables, kept, recompute).hidden(token_ids_T)

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """Output of the head's product, [N, V], in the base's dtype."""
        head = self.plan.head
        raw_NV = hidden_ND.new_empty(len(hidden_ND), len(head.weight_NK))
        self.products.multiply(hidden_ND.detach().contiguous(), head, raw_NV)
        return raw_NV

    def through_head(self, slope_raw_NV: Tensor) -> Tensor:
        """Gradient with respect to hidden [N, D] from that with respect to `raw_logits(hidden)`."""
        return self.products.back(slope_raw_NV.to(self.base.dtype).contiguous(), self.plan.head)

    def steps(self, cache: KVCache) -> CudaSteps:
        """Decode steps that go from tokens to tokens."""
        return CudaSteps(self, cache, recorder=self._recorder.beside())


class _Hidden(torch.autograd.Function):
    """A pass whose backward pass adds the adapters' gradients to those of the routing."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, own: CudaBase, token_ids_T: Tensor, attention: CudaPass, routing: TrainerRouting
    ) -> Tensor:
        kept: list[KeptLayer] = []
        tables = own._tables(len(token_ids_T), routing)
        hidden_TD = own.decode(token_ids_T, attention, tables, kept)
        ctx.of = own, attention, tables, routing, kept
        return hidden_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, ...]:
        own, attention, tables, routing, kept = ctx.of
        backward = DecoderBackward.of(own.plan, own.products, attention, tables, routing)
        backward.run(kept, grad_TD)
        return (None,) * 5
