"""A base whose passes run in Motet's kernels, for both sampling and training.

Legend: T packed rows, N head rows, D model width, V vocabulary, E head width.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.kernels.cpu.attention import NativeAttention, NativePass
from motet.kernels.cpu.own_math import OwnMath
from motet.kernels.cpu.plan import (
    GATE_NUMBERS,
    LINEARS,
    TYPES,
    AdaptedRows,
    Layer,
    PackedAdapter,
    PackedLayout,
    Pass,
    Plan,
    Weight,
    back,
    forth,
    pack_all,
    room,
)
from motet.model.attention import AttentionBackend, AttentionPass
from motet.model.covered_decoder import (
    angles,
    attention_calls,
    embedding_scale,
    experts_of,
    gate_of,
    linears_of,
    norm_weight,
    norms_of,
    query_scales,
    rotates,
)
from motet.model.frozen_weight import FrozenWeight
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights, Routing
from motet.model.lora_model import LoraModel, head_width
from motet.model.routing import SamplerRouting, TrainerRouting

_ATTENTION_ROWS = 5
"""fp32 copies of one head's keys that each thread holds in attention's backward pass (csrc/attention_backward.cpp)."""

# --- the base ---------------------------------------------------------------------------------------------------------


class NativeBase:
    """Implements `Kernels` for one base: packs its weights and calls the library."""

    whole_sums = False

    def __init__(self, base: LoraModel, library: ctypes.CDLL, arithmetic: int) -> None:
        """`base` must be covered (see `motet.kernels.supported_bases`)."""
        self.base, self._library, self._arithmetic = base, library, arithmetic
        self.math = OwnMath(library, lambda: self.n_threads)
        self.attention: AttentionBackend = NativeAttention(base.block_size)
        self._memory: list[Any] = []
        self._weights: list[tuple[Weight, Callable[[], Tensor]]] = []
        self._layouts: dict[tuple[int, bool], PackedLayout] = {}
        self._adapters: dict[int, tuple[weakref.ref[AdapterWeights], PackedAdapter]] = {}
        self._pools: weakref.WeakKeyDictionary[KVCache, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self._backward = False
        self.threads = 0
        self.spare: Tensor | None = None
        """Buffer of the last training pass, for the next one."""
        self._plan = self._make()

    @property
    def n_threads(self) -> int:
        """Threads per call: `threads`, or torch's number if that is 0."""
        return self.threads or torch.get_num_threads()

    def prepare(self, threads: int) -> None:
        """See `Kernels`."""
        self.threads = threads
        self.pack_for_training()

    def read_keys_in_blocks(self, block_size: int) -> None:
        """Set the KV block size of passes without a cache."""
        self.attention = NativeAttention(block_size)

    # --- weights ------------------------------------------------------------------------------------------------------

    def _make(self) -> Plan:
        base = self.base
        decoder: Any = base.decoder
        config = base.model.config.get_text_config()
        calls = attention_calls(base)
        layers = (Layer * len(decoder.layers))()
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        angles_of = angles(decoder, config, base.info.max_positions, self.math.angles)
        for index, (layer, module) in enumerate(zip(layers, decoder.layers, strict=True)):
            for name, norm in norms_of(module).items():
                setattr(layer, name, None if norm is None else self._numbers(norm_weight(norm)))
            layer.window, layer.softcap = calls[index].window or 0, calls[index].softcap or 0.0
            layer.scale = calls[index].scaling
            if rotates(module.self_attn, config):
                layer.cosines, layer.sines = map(self._numbers, angles_of(index))
            for which, (linear, *_) in enumerate(linears_of(module)):
                self._places[linear.fused.leader] = (index * LINEARS + which, linear.fused.sizes)
                self._fill(layer.linears[which], linear.fused.frozen)
            if base.has_experts:
                self._fill_experts(layer, module)
        self._memory.append(layers)
        n_experts = layers[0].router.n
        scales = query_scales(config, base.info.max_positions)
        q_norm, width = norms_of(decoder.layers[0])["norm_q"], head_width(config)
        plan = Plan(
            n_layers=len(layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=width,
            inner=layers[0].linears[LINEARS - 1].k or experts_of(decoder.layers[0])[1][1].shape[1],
            vocabulary=base.head.shape[0],
            positions=base.info.max_positions,
            rotated=2 * angles_of(0)[0].shape[1],
            n_experts=n_experts,
            n_chosen=config.num_experts_per_tok if n_experts else 0,
            among_chosen=getattr(config, "norm_topk_prob", True),
            norms_whole=q_norm is not None and len(q_norm.weight) != width,
            type=TYPES[base.dtype],
            arithmetic=self._arithmetic,
            gate=GATE_NUMBERS[gate_of(config)],
            epsilon=config.rms_norm_eps,
            embedding_scale=embedding_scale(decoder, config),
            residual=getattr(config, "residual_multiplier", 1.0),
            layers=layers,
            norm_out=self._numbers(norm_weight(decoder.norm)),
            embedding=decoder.embed_tokens.weight.data_ptr(),
            query_scales=None if scales is None else self._numbers(scales),
        )
        self._fill(plan.head, base.head)
        return plan

    def _numbers(self, tensor: Tensor) -> int:
        """Address of an fp32 copy that lives as long as this object."""
        numbers = tensor.detach().float().contiguous()
        self._memory.append(numbers)
        return numbers.data_ptr()

    def _fill(self, weight: Weight, frozen: FrozenWeight) -> None:
        weight.bias = None if frozen.bias is None else self._numbers(frozen.bias)
        dense = frozen.dense()
        self._pack([weight], [dense])
        if type(frozen) is FrozenWeight and dense.dtype == self.base.dtype and dense.is_contiguous():
            weight.rows = dense.data_ptr()
            self._memory.append(dense)
        else:
            self._weights.append((weight, frozen.dense))

    def _pack(self, weights: Iterable[Weight], sources: Sequence[Tensor]) -> None:
        memory, addresses = pack_all(self._library, [forth(source) for source in sources], self.base.dtype)
        for weight, source, address in zip(weights, sources, addresses, strict=True):
            (weight.n, weight.k), weight.forward = source.shape, address
        self._memory.append(memory)

    def _fill_experts(self, layer: Layer, module: Any) -> None:
        router, matrices = experts_of(module)
        experts = (Weight * len(matrices))()
        self._pack([layer.router, *experts], [router, *matrices])
        self._weights += zip([layer.router, *experts], (each.detach for each in (router, *matrices)), strict=True)
        layer.experts = ctypes.addressof(experts)
        self._memory.append(experts)

    def pack_for_training(self) -> None:
        """Pack weights again in the order of backward passes, except those that are read from torch's tensors."""
        if self._backward:
            return
        for weight, weight_NK in self._weights:
            memory, (weight.back,) = pack_all(self._library, [back(weight_NK())], self.base.dtype)
            self._memory.append(memory)
        self._backward = True

    def packed(self, weights: AdapterWeights, *, backward: bool) -> PackedAdapter:
        """An adapter's matrices, packed for the kernels: once per version, and anew for each backward pass."""
        key = id(weights)
        if not backward and key in self._adapters:
            return self._adapters[key][1]
        layout = self._layouts.get((id(weights.layout), backward))
        if layout is None:
            layout = PackedLayout(self._library, weights.layout, self._places, self.base.dtype, backward=backward)
            self._layouts[id(weights.layout), backward] = layout
        packed = PackedAdapter(self._library, self._plan, weights, layout, self.n_threads)
        if not backward:
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

    def pass_bytes(self, routing: Routing, n_rows: int, *, recompute: bool) -> int:
        """See `Kernels`."""
        rows = torch.arange(n_rows)
        call = _OnePass(self, rows, rows, self.attention.packed([n_rows]), routing)  # type: ignore[arg-type]
        return call.n_bytes(recompute) + self.n_threads * n_rows * _ATTENTION_ROWS * 4 * int(self._plan.head_width)

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """Output of the head's product, [N, V], fp32."""
        plan = self._plan
        return self._rows(self._library.motet_head, hidden_ND, plan.vocabulary)

    def through_head(self, slope_NV: Tensor) -> Tensor:
        """Gradient with respect to hidden [N, D] from that with respect to `raw_logits(hidden)`."""
        self.pack_for_training()
        return self._rows(self._library.motet_head_back, slope_NV, self._plan.width)

    def steps(self, cache: KVCache) -> None:
        """Returns None: a CPU's steps run in turn."""

    def _rows(self, function: Any, rows: Tensor, n_outputs: int) -> Tensor:
        rows = rows.detach().float().contiguous()
        out = torch.empty(len(rows), n_outputs)
        _check(function(ctypes.byref(self._plan), rows.data_ptr(), len(rows), out.data_ptr(), self.n_threads))
        return out

    def pools(self, cache: KVCache) -> tuple[Any, Any]:
        """Two ctypes arrays with the addresses of each layer's keys and values."""
        known = self._pools.get(cache)
        if known is None:
            nothing = torch.empty(0, self._plan.kv_heads, self._plan.head_width, dtype=self.base.dtype)
            layers = [cache.layer(index, nothing, nothing) for index in range(self._plan.n_layers)]
            addresses = ctypes.c_void_p * len(layers)
            known = addresses(*(keys.data_ptr() for keys, _ in layers)), addresses(*(vs.data_ptr() for _, vs in layers))
            self._pools[cache] = known
        return known


class _OnePass:
    """One pass. Holds references to everything that its ctypes structures point to."""

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
            threads=own.n_threads,
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
        members: list[tuple[AdapterWeights, int, int, float, int | None, int | None]] = []
        if isinstance(routing, TrainerRouting):
            for segment in routing.segments:
                gradient = None if segment.gradients is None else _flat(segment.weights, segment.gradients)
                largest = None if segment.sums is None else segment.sums.largest.data_ptr()
                members.append((segment.weights, segment.start, segment.stop, segment.scaling, gradient, largest))
        elif isinstance(routing, SamplerRouting):
            members += [
                (weights, start, start + n, 1.0, None, None)
                for weights, start, n in routing.runs
                if weights is not None
            ]
        backward = any(gradient is not None for *_, gradient, _ in members)
        versions = {id(weights): weights for weights, *_ in members}
        packed = {key: self._own.packed(weights, backward=backward) for key, weights in versions.items()}
        self._adapters = packed  # keeps their matrices alive
        runs = (AdaptedRows * len(members))()
        for run, (weights, first, last, scaling, gradient, largest) in zip(runs, members, strict=True):
            run.first, run.last, run.scaling, run.gradient, run.largest = first, last, scaling, gradient, largest
            run.adapter = ctypes.pointer(packed[id(weights)].adapter)
        return runs

    def room(self) -> Tensor:
        """Buffer for the activations that the backward pass reads; with recomputation, the inputs of layers only."""
        own, layers = self._own, self._own.base.decoder.layers
        self._pass.recompute = int(layers[0].training)  # type: ignore[index,union-attr]
        n_bytes = own._library.motet_kept_bytes(ctypes.byref(own._plan), ctypes.byref(self._pass))
        spare, own.spare = own.spare, None
        return spare if spare is not None and n_bytes <= len(spare) <= 4 * n_bytes else room(n_bytes)

    def n_bytes(self, recompute: bool) -> int:
        """Bytes that a pass keeps for its backward pass, plus its scratch memory."""
        self._pass.recompute, self._pass.kept = int(recompute), 1  # any address but null
        library, plan, own = self._own._library, ctypes.byref(self._own._plan), ctypes.byref(self._pass)
        return int(library.motet_kept_bytes(plan, own) + library.motet_scratch_bytes(plan, own))

    def give_back(self, kept: Tensor) -> None:
        """Keep the buffer for the next pass, which would spend a tenth of its time on fresh pages."""
        self._own.spare = kept

    def forward(self, kept: Tensor | None = None) -> Tensor:
        """Final hidden states [T, D]."""
        own = self._own
        hidden_TD = torch.empty(self._n_rows, own._plan.width)
        self._pass.hidden, self._pass.kept = hidden_TD.data_ptr(), None if kept is None else kept.data_ptr()
        _check(own._library.motet_forward(ctypes.byref(own._plan), ctypes.byref(self._pass)))
        return hidden_TD

    def backward(self, kept: Tensor, grad_TD: Tensor) -> None:
        """Add the adapters' gradients to those of the routing."""
        own, grad_TD = self._own, grad_TD.float().contiguous()
        self._pass.kept = kept.data_ptr()
        _check(own._library.motet_backward(ctypes.byref(own._plan), ctypes.byref(self._pass), grad_TD.data_ptr()))


class _Hidden(torch.autograd.Function):
    """A pass whose backward pass adds the adapters' gradients to those of the routing."""

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
    """Address of the flat vector that contains an adapter's gradients."""
    first = weights.layout.fused[0]
    a = gradients[first.leader].a
    return int(a.data_ptr() - a.element_size() * first.offset)


def _check(fault: bytes | None) -> None:
    if fault:
        raise RuntimeError(f"native kernels: {fault.decode()}")
