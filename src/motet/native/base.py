"""A base whose passes own kernels compute, for sampling and training alike.

Legend: T packed rows, N head rows, D model width, V vocabulary, E head width.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.model.attention import AttentionBackend, AttentionPass, LayerCall, Prefix, Span
from motet.model.frozen_weight import FrozenWeight
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights, Routing
from motet.model.lora_model import LoraModel
from motet.model.routing import SamplerRouting, TrainerRouting
from motet.native.own_math import OwnMath
from motet.native.plan import (
    LINEARS,
    TYPES,
    AdaptedRows,
    Calls,
    Layer,
    PackedAdapter,
    Pass,
    Plan,
    Weight,
    back,
    forth,
    pack_all,
    room,
)

# --- which rows attend to which keys ----------------------------------------------------------------------------------


@dataclass
class NativePass:
    """An `AttentionPass` of rows whose attention the kernels compute with all else."""

    spans: list[tuple[int, int, int, int]]
    """First row, rows, position of the first, and which table of blocks."""
    writes: list[tuple[int, int, int, int]]
    """The same of rows whose keys and values go to those blocks."""
    tables: list[NDArray[np.int32]]
    n_blocks: int
    block_size: int
    cache: KVCache | None = None
    """Where the blocks are; None where they are this pass's own."""
    calls: list[LayerCall] = field(default_factory=list)

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Never called: no module of torch runs in such a pass."""
        raise AssertionError("kernels compute this pass")


class NativeAttention:
    """The `AttentionBackend` of a base that own kernels compute."""

    fixed_shapes = True
    reads_past_end = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> NativePass:
        """A pass over whole sequences; keys and values of a prefix are copied to the blocks of each that has it."""
        spans, writes, tables = [], [], []
        row = n_blocks = 0
        for index, length in enumerate(lengths):
            prefix = prefixes[index] if prefixes else None
            position = 0
            for first, own in () if prefix is None else prefix.stretches:
                writes.append((first, own, position, index))
                position += own
            spans.append((row, length, position, index))
            writes.append(spans[-1])
            needed = -(-(position + length) // self._block_size)
            tables.append(np.arange(n_blocks, n_blocks + needed, dtype=np.int32))
            row, n_blocks = row + length, n_blocks + needed
        return NativePass(spans, writes, tables, n_blocks, self._block_size)

    def cached(self, spans: Sequence[Span], cache: KVCache) -> NativePass:
        """A pass over spans whose keys and values go to a cache."""
        placed, row = [], 0
        for index, span in enumerate(spans):
            placed.append((row, span.length, span.start, index))
            row += span.length
        tables = [np.array(span.blocks, np.int32) for span in spans]
        return NativePass(placed, placed, tables, cache.n_blocks + 2, cache.block_size, cache)

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> None:
        """Nothing is recorded on a CPU."""
        return


# --- the base ---------------------------------------------------------------------------------------------------------


class NativeBase:
    """The `Kernels` of a base: its weights, packed, and the calls."""

    def __init__(self, base: LoraModel, library: Calls, arithmetic: int) -> None:
        """`base` must be covered (see `motet.native.cover`)."""
        self.base, self._library, self._arithmetic = base, library, arithmetic
        self.math = OwnMath(library.library)
        self.attention: AttentionBackend = NativeAttention(base.block_size)
        self._memory: list[Any] = []
        self._weights: list[tuple[Weight, FrozenWeight]] = []
        self._adapters: dict[int, tuple[weakref.ref[AdapterWeights], PackedAdapter]] = {}
        self._pools: weakref.WeakKeyDictionary[KVCache, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self._backward = False
        self.spare: Tensor | None = None
        """Memory of the pass before."""
        self._plan = self._make()

    def read_keys_in_blocks(self, block_size: int) -> None:
        """Choose the KV blocks of passes without a cache."""
        self.attention = NativeAttention(block_size)

    # --- weights ------------------------------------------------------------------------------------------------------

    def _make(self) -> Plan:
        base = self.base
        decoder: Any = base.decoder
        config = base.model.config.get_text_config()
        calls = _calls(base)
        layers = (Layer * len(decoder.layers))()
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        for index, (layer, module) in enumerate(zip(layers, decoder.layers, strict=True)):
            attention = module.self_attn
            norms = {
                "norm_in": module.input_layernorm,
                "norm_mlp": module.post_attention_layernorm,
                "norm_q": getattr(attention, "q_norm", None),
                "norm_k": getattr(attention, "k_norm", None),
            }
            for name, norm in norms.items():
                setattr(layer, name, None if norm is None else self._numbers(norm.weight))
            layer.window = calls[index].window or 0
            leaders = (attention.q_proj, attention.o_proj, module.mlp.gate_proj, module.mlp.down_proj)
            for which, linear in enumerate(leaders):
                self._places[linear.fused.leader] = (index * LINEARS + which, linear.fused.sizes)
                self._fill(layer.linears[which], linear.fused.frozen)
        with self.math.angles():
            cosines, sines = _angles(decoder, base.info.max_positions)
        width = cosines.shape[1] * 2
        self._memory.append(layers)
        plan = Plan(
            n_layers=len(layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=width,
            inner=config.intermediate_size,
            vocabulary=base.head.shape[0],
            positions=len(cosines),
            type=TYPES[base.dtype],
            arithmetic=self._arithmetic,
            epsilon=decoder.norm.variance_epsilon,
            scale=calls[0].scaling,
            layers=layers,
            norm_out=self._numbers(decoder.norm.weight),
            embedding=decoder.embed_tokens.weight.data_ptr(),
            cosines=self._numbers(cosines),
            sines=self._numbers(sines),
        )
        self._fill(plan.head, base.head)
        return plan

    def _numbers(self, tensor: Tensor) -> int:
        """The address of a copy in fp32."""
        numbers = tensor.detach().float().contiguous()
        self._memory.append(numbers)
        return numbers.data_ptr()

    def _fill(self, weight: Weight, frozen: FrozenWeight) -> None:
        weight.n, weight.k = frozen.shape
        weight.bias = None if frozen.bias is None else self._numbers(frozen.bias)
        memory, (weight.forward,) = pack_all(self._library, [forth(frozen.dense())], self.base.dtype)
        self._memory.append(memory)
        self._weights.append((weight, frozen))

    def pack_for_training(self) -> None:
        """Pack weights a second time, as gradients read them."""
        if self._backward:
            return
        for weight, frozen in self._weights:
            memory, (weight.back,) = pack_all(self._library, [back(frozen.dense())], self.base.dtype)
            self._memory.append(memory)
        self._backward = True

    def packed(self, weights: AdapterWeights, *, backward: bool) -> PackedAdapter:
        """An adapter's matrices as the kernels read them, packed once for each version."""
        known = self._adapters.get(id(weights))
        if known is not None and (known[1].backward or not backward):
            return known[1]
        packed = PackedAdapter.of(self._library, weights, self._places, backward=backward)
        key = id(weights)
        self._adapters[key] = weakref.ref(weights, lambda _: self._adapters.pop(key, None)), packed
        return packed

    # --- passes -------------------------------------------------------------------------------------------------------

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attention: AttentionPass, routing: Routing) -> Tensor:
        """Final hidden states [T, D] of packed tokens, fp32."""
        assert isinstance(attention, NativePass)
        call = _OnePass(self, token_ids_T, positions_T, attention, routing)
        if isinstance(routing, TrainerRouting) and routing.anchor.requires_grad and torch.is_grad_enabled():
            self.pack_for_training()
            hidden: Tensor = _Hidden.apply(routing.anchor, call)  # type: ignore[no-untyped-call]
            return hidden
        return call.forward()

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """What the head's product gives [N, V], fp32."""
        plan = self._plan
        return self._rows(self._library.head, hidden_ND, plan.vocabulary)

    def through_head(self, slope_NV: Tensor) -> Tensor:
        """From a gradient with respect to `raw_logits(hidden)` to one with respect to hidden [N, D]."""
        self.pack_for_training()
        return self._rows(self._library.head_back, slope_NV, self._plan.width)

    def _rows(self, function: Any, rows: Tensor, n_outputs: int) -> Tensor:
        rows = rows.detach().float().contiguous()
        out = torch.empty(len(rows), n_outputs)
        _check(function(ctypes.byref(self._plan), rows.data_ptr(), len(rows), out.data_ptr(), torch.get_num_threads()))
        return out

    def pools(self, cache: KVCache) -> tuple[Any, Any]:
        """Addresses of each layer's keys and values."""
        known = self._pools.get(cache)
        if known is None:
            nothing = torch.empty(0, self._plan.kv_heads, self._plan.head_width, dtype=self.base.dtype)
            layers = [cache.layer(index, nothing, nothing) for index in range(self._plan.n_layers)]
            addresses = ctypes.c_void_p * len(layers)
            known = addresses(*(keys.data_ptr() for keys, _ in layers)), addresses(*(vs.data_ptr() for _, vs in layers))
            self._pools[cache] = known
        return known


class _OnePass:
    """One pass: what its structures point to lives as long as it does."""

    def __init__(
        self, own: NativeBase, token_ids_T: Tensor, positions_T: Tensor, attention: NativePass, routing: Routing
    ) -> None:
        same = token_ids_T.dtype == positions_T.dtype == torch.int64 and len(token_ids_T) == len(positions_T)
        if not same:
            raise ValueError("token ids and positions are int64, one for each row")
        self._own = own
        starts = np.cumsum([0, *map(len, attention.tables)])
        blocks = np.concatenate([*attention.tables, np.zeros(1, np.int32)])
        places = blocks.ctypes.data + 4 * starts

        def placed(stretches: list[tuple[int, int, int, int]]) -> NDArray[np.int64]:
            rows = [(row, n, start, places[at], len(attention.tables[at])) for row, n, start, at in stretches]
            return np.array(rows, np.int64)

        spans = placed(attention.spans)
        writes = spans if attention.writes is attention.spans else placed(attention.writes)
        runs = self._runs(routing)
        self._memory = (token_ids_T.contiguous(), positions_T.contiguous(), blocks, spans, writes)
        self._n_rows = len(token_ids_T)
        pools: Any = (None, None) if attention.cache is None else own.pools(attention.cache)
        self._pass = Pass(
            n_rows=self._n_rows,
            n_spans=len(spans),
            n_writes=len(writes),
            n_runs=len(runs),
            threads=torch.get_num_threads(),
            tokens=self._memory[0].data_ptr(),
            positions=self._memory[1].data_ptr(),
            spans=spans.ctypes.data,
            writes=writes.ctypes.data,
            runs=runs,
            keys=ctypes.cast(pools[0], ctypes.c_void_p),
            values=ctypes.cast(pools[1], ctypes.c_void_p),
            n_blocks=attention.n_blocks,
            block=attention.block_size,
        )

    def _runs(self, routing: Routing) -> Any:
        members: list[tuple[AdapterWeights, int, int, float, int | None]] = []
        if isinstance(routing, TrainerRouting):
            for one in routing.segments:
                gradient = None if one.gradients is None else _flat(one.weights, one.gradients)
                members.append((one.weights, one.start, one.stop, one.scaling, gradient))
        elif isinstance(routing, SamplerRouting):
            members += [
                (weights, start, start + n, 1.0, None) for weights, start, n in routing.runs if weights is not None
            ]
        backward = any(gradient is not None for *_, gradient in members)
        packed = [self._own.packed(weights, backward=backward) for weights, *_ in members]
        self._adapters = packed  # their matrices stay while they are used
        runs = (AdaptedRows * len(members))()
        for run, own, (_, first, last, scaling, gradient) in zip(runs, packed, members, strict=True):
            run.first, run.last, run.scaling, run.gradient = first, last, scaling, gradient
            run.adapter = ctypes.pointer(own.adapter)
        return runs

    def room(self) -> Tensor:
        """Memory for what the backward pass reads; the inputs of layers alone where they are computed again."""
        own, layers = self._own, self._own.base.decoder.layers
        self._pass.recompute = int(layers[0].training)  # type: ignore[index,union-attr]
        n_bytes = own._library.kept_bytes(ctypes.byref(own._plan), ctypes.byref(self._pass))
        spare, own.spare = own.spare, None
        return spare if spare is not None and n_bytes <= len(spare) <= 4 * n_bytes else room(n_bytes)

    def give_back(self, kept: Tensor) -> None:
        """Let the next pass have the memory: fresh pages would take a tenth of its time."""
        self._own.spare = kept

    def forward(self, kept: Tensor | None = None) -> Tensor:
        """Final hidden states [T, D]."""
        own = self._own
        hidden_TD = torch.empty(self._n_rows, own._plan.width)
        self._pass.hidden, self._pass.kept = hidden_TD.data_ptr(), None if kept is None else kept.data_ptr()
        _check(own._library.forward(ctypes.byref(own._plan), ctypes.byref(self._pass)))
        return hidden_TD

    def backward(self, kept: Tensor, grad_TD: Tensor) -> None:
        """Add the gradients of the adapters."""
        own, grad_TD = self._own, grad_TD.float().contiguous()
        self._pass.kept = kept.data_ptr()
        _check(own._library.backward(ctypes.byref(own._plan), ctypes.byref(self._pass), grad_TD.data_ptr()))


class _Hidden(torch.autograd.Function):
    """A pass whose backward pass adds the gradients of adapters where their routing says."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _OnePass) -> Tensor:
        ctx.call, kept = call, call.room()
        ctx.save_for_backward(kept)
        return call.forward(kept)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, None]:
        (kept,) = ctx.saved_tensors
        ctx.call.backward(kept, grad_TD)
        ctx.call.give_back(kept)
        return None, None


def _flat(weights: AdapterWeights, gradients: dict[str, Any]) -> int:
    """Where the vector begins whose parts an adapter's gradients are."""
    first = weights.layout.fused[0]
    return int(gradients[first.leader].a.data_ptr()) - 4 * first.offset


def _check(fault: bytes | None) -> None:
    if fault:
        raise RuntimeError(f"native kernels: {fault.decode()}")


def _calls(base: LoraModel) -> dict[int, LayerCall]:
    """What each layer asks of its attention."""
    tokens = torch.zeros(base.arithmetic.rows, dtype=torch.long)
    attention = base.attention.packed([len(tokens)])
    with torch.no_grad():
        base.hidden(tokens, torch.arange(len(tokens)), attention)
    return {call.layer: call for call in attention.calls}


def _angles(decoder: Any, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, E / 2], as the model itself makes them."""
    places = torch.arange(positions)[None]
    with torch.no_grad():
        fresh = type(decoder.rotary_emb)(decoder.rotary_emb.config)  # its frequencies too
        cosines, sines = fresh(torch.zeros(1, 1, 1), places)
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
