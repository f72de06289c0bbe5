"""One frozen base model: transformers' own code, with LoRA-ready linear layers and Motet's attention.

The same module samples and trains, which is what makes the two agree. `motet.model.load` finds, loads, wraps and proves it.

Legend: T packed rows, D model width, N head rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from motet.errors import AdapterError, BaseModelError
from motet.model import attention
from motet.model.arithmetic import Arithmetic
from motet.model.kv_cache import KVCache
from motet.model.layout import AttentionLayout, Prefix, Span, cached_layout, least_rows, packed_layout
from motet.model.lora import AdapterLayout, LoraContext, LoraLinear, NoAdapters, Routing, make_layout, walk_linears
from motet.model.norm import speed_up_norms
from motet.model.packed import FrozenWeight, pack_all
from motet.model.tables import AttentionTables, cached_tables, packed_tables

Layout = AttentionLayout | AttentionTables
"""Which packed row attends to which keys, for torch's products or for kernels."""

_LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass
class BaseModel:
    """A proven base. Weights are frozen; `context` says which adapters the next forward pass uses."""

    name: str
    model: Any
    decoder: nn.Module
    head: nn.Module
    tokenizer: Any
    dtype: torch.dtype
    device: torch.device
    context: LoraContext
    linears: dict[str, LoraLinear]
    max_positions: int
    """Longest sequence the model's position encoding was made for."""
    block_size: int = 64
    """Keys that attention reads at a time, as in the proof."""
    notes: list[str] = field(default_factory=list)
    """What a person should know: excluded experts, exactness that does not hold."""
    inexact: str = ""
    """How rows were found to depend on their company; empty where they do not, bit for bit."""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    _layouts: dict[tuple[tuple[str, ...], int], AdapterLayout] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether rows were found independent of their company, bit for bit."""
        return not self.inexact

    @property
    def kernels(self) -> str:
        """What the libraries choose their products by, and with them the last bits: the CPU's instructions, or the GPU."""
        on_cpu = self.device.type == "cpu"
        return torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(self.device)

    @property
    def has_experts(self) -> bool:
        """Whether rows choose among experts."""
        return any("experts" in path for path, _ in self.model.named_parameters())

    @functools.cached_property
    def _head(self) -> FrozenWeight:
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return FrozenWeight(weight.detach(), getattr(self.head, "bias", None))

    @property
    def _query_rows(self) -> int:
        """Rows of queries that a product with a block of keys must have at least."""
        return least_rows(_least_head_width(self.model.config.get_text_config()) * self.block_size, self.dtype)

    @property
    def n_parameters(self) -> int:
        """Frozen parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def compute_with(self, arithmetic: Arithmetic) -> None:
        """From now on."""
        self.arithmetic = arithmetic
        for weight in self._frozen_weights():
            weight.tile = arithmetic.tile

    def compute_without(self, *what: str, because: Exception) -> None:
        """Go on the slower way (fields of `Arithmetic` that are switched off), and note why."""
        self.compute_with(replace(self.arithmetic, **dict.fromkeys(what, False)))
        reason = next(iter(str(because).strip().splitlines()), type(because).__name__)
        self.notes.append(f"slower than it could be, without {' and '.join(what)} (see engine.numerics): {reason}")

    def _frozen_weights(self) -> list[FrozenWeight]:
        families = {id(layer.siblings): layer.siblings.weight for layer in self.linears.values()}
        return [*families.values(), self._head]

    def pack_weights(self) -> None:
        """Keep a second copy of the frozen weights where products with it are faster and have the same bits."""
        pack_all(self._frozen_weights())

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._head.plain.shape[0])

    @contextlib.contextmanager
    def routed(self, routing: Routing | None) -> Iterator[None]:
        """Use these adapters for forward (and recomputing backward) passes inside the block."""
        self.context.routing = routing
        try:
            yield
        finally:
            self.context.routing = self.context.joint = None

    def pad(self, x_ND: Tensor) -> Tensor:
        """Repeat the last row until there are as many as a pass must have."""
        pad = -x_ND.shape[0] % self.arithmetic.rows
        return torch.cat([x_ND, x_ND[-1:].expand(pad, *x_ND.shape[1:])]) if pad else x_ND

    def packed_layout(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> Layout:
        """Layout of whole sequences, one after another, without a cache (training, scoring)."""
        if self.arithmetic.kernels:
            return packed_tables(lengths, self.device, prefixes)
        return packed_layout(lengths, self.block_size, self.device, prefixes, self._query_rows)

    def cached_layout(self, spans: Sequence[Span], cache: KVCache) -> Layout:
        """Layout of spans whose keys and values go to a cache (prefill and decode)."""
        if self.arithmetic.kernels:
            return cached_tables(spans, cache, self.device)
        return cached_layout(spans, cache, self.device, self.arithmetic.rows, self._query_rows)

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Final hidden states [T, D] of packed tokens."""
        output = self.decoder(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            layout=layout,
            return_dict=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V]; N must be a multiple of `arithmetic.rows` for exactness (see `pad`)."""
        return self.finish_logits(self.raw_logits(hidden_ND))

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """What the head's product gives, in the base's dtype [N, V]."""
        return self._head(hidden_ND)

    @functools.cached_property
    def _logit_changes(self) -> tuple[Any, Any, Any]:
        """What the model does to its logits: scale, divide, soft-cap; None where it does not."""
        config = self.model.config.get_text_config()
        scale, divide, cap = (getattr(config, name, None) for name in _LOGIT_CHANGES)
        return scale, divide, cap

    def finish_logits(self, raw_NV: Tensor) -> Tensor:
        """fp32 logits [N, V]: the model's own scale and soft-cap applied."""
        logits_NV = raw_NV.float()
        scale, divide, cap = self._logit_changes
        if scale is not None:
            logits_NV = logits_NV * scale
        if divide is not None:
            logits_NV = logits_NV / divide
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    def logits_slope(self, raw_NV: Tensor, slope_NV: Tensor) -> Tensor:
        """From a gradient with respect to `finish_logits(raw)` to one with respect to raw [N, V], perhaps still in fp32."""
        if self._logit_changes == (None, None, None):
            return slope_NV
        with torch.enable_grad():
            leaf = raw_NV.detach().requires_grad_()
            (slope_raw_NV,) = torch.autograd.grad(self.finish_logits(leaf), leaf, slope_NV)
        return slope_raw_NV

    def through_head(self, slope_raw_NV: Tensor) -> Tensor:
        """From a gradient with respect to `raw_logits(hidden)` to one with respect to hidden [N, D]."""
        return self._head.back(slope_raw_NV)

    @torch.no_grad()
    def fingerprint(self) -> str:
        """A digest of the logits of a few fixed tokens: equal only where every bit is."""
        tokens_T = self.pad(torch.arange(16, device=self.device) * 97 % self.vocab_size)
        positions_T = torch.arange(len(tokens_T), device=self.device)
        with self.routed(NoAdapters()):
            hidden_TD = self.hidden(tokens_T, positions_T, self.packed_layout([len(tokens_T)]))
        return hashlib.sha256(self.logits(hidden_TD).cpu().numpy().tobytes()).hexdigest()

    def adapter_layout(self, target_modules: str | Sequence[str], rank: int) -> AdapterLayout:
        """Layers that an adapter with these targets has.

        Raises:
            AdapterError: a target matches no layer; names the ones there are.
        """
        if target_modules == "all-linear":
            chosen = list(self.linears)
        else:
            targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
            known = sorted({path.rsplit(".", 1)[-1] for path in self.linears})
            for target in targets:
                if not any(_matches(path, target) for path in self.linears):
                    hint = difflib.get_close_matches(target, known, 1)
                    raise AdapterError(
                        f"target_modules names {target!r}, which matches no adaptable layer of {self.name}"
                        f"{f' (did you mean {hint[0]!r}?)' if hint else ''}; there are: all-linear, {', '.join(known)}"
                    )
            chosen = [path for path in self.linears if any(_matches(path, target) for target in targets)]
        known_layout = self._layouts.get((tuple(chosen), rank))
        if known_layout is not None:
            return known_layout
        shapes = {path: (self.linears[path].in_features, self.linears[path].out_features) for path in chosen}
        layout = make_layout(shapes, rank, [layer.siblings.paths for layer in self.linears.values()])
        return self._layouts.setdefault((tuple(chosen), rank), layout)


def _least_head_width(config: Any) -> int:
    layers = getattr(config, "per_layer_config", None) or [config]  # Gemma 4's full attention has wider heads
    return min(
        int(getattr(one, "head_dim", None) or config.hidden_size // config.num_attention_heads) for one in layers
    )


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith("." + target)


def _remove_dropout(model: nn.Module) -> None:
    """Recomputing puts layers in training mode; dropout, a number that a layer keeps, must stay out."""
    for module in model.modules():
        for field_name, value in vars(module).items():
            if "drop" in field_name and isinstance(value, float):
                setattr(module, field_name, 0.0)


def wrap(name: str, model: Any, tokenizer: Any, device: torch.device) -> BaseModel:
    """Replace the decoder's linear layers and attention; nothing else of the model changes."""
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.motet_attention)
    model.set_attn_implementation(attention.NAME)
    decoder = model.get_decoder()
    if decoder is model:  # some do not say where it is
        decoder = model.model
    context = LoraContext()
    linears: dict[str, LoraLinear] = {}
    prefix = next((path for path, module in model.named_modules() if module is decoder), "")
    for path, linear in list(walk_linears(decoder)):
        full = f"{prefix}.{path}" if prefix else path
        parent, _, leaf = path.rpartition(".")
        wrapped = LoraLinear(linear, full, context)
        setattr(decoder.get_submodule(parent) if parent else decoder, leaf, wrapped)
        linears[full] = wrapped
    if not linears:
        raise BaseModelError(
            f"{name} has no nn.Linear layer in its decoder, so there is nothing to adapt; {attention.INSTEAD}"
        )
    _remove_dropout(model)
    speed_up_norms(decoder)
    base = BaseModel(
        name=name,
        model=model,
        decoder=decoder,
        head=model.get_output_embeddings(),
        tokenizer=tokenizer,
        dtype=next(iter(linears.values())).weight.dtype,
        device=device,
        context=context,
        linears=linears,
        max_positions=int(model.config.get_text_config().max_position_embeddings),
    )
    if base.has_experts:
        base.notes.append("mixture of experts: routers and routed experts get no adapter, they stay as they are")
    return base
