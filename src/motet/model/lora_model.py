"""One frozen base model: transformers' own code, with LoRA-ready linear layers and Motet's attention.

The same module samples and trains, so that both agree. `motet.model.load` finds, loads, wraps and proves a base.

Legend: T packed rows, D model width, N head rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from motet.core.errors import BaseModelError
from motet.core.model_info import ModelInfo
from motet.core.token_ids import TokenIds
from motet.model import attention
from motet.model.accelerator import processor_of, reason_of
from motet.model.arithmetic import Arithmetic
from motet.model.attention import AttentionBackend, AttentionPass, attention_backend
from motet.model.device_steps import DeviceSteps
from motet.model.distribution import LogitChanges, MathKernels
from motet.model.experts import adaptable_experts, compute_experts, has_experts
from motet.model.frozen_weight import FrozenWeight, reorder_all
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterLayout, LoraContext, LoraLinear, NoAdapters, Routing, make_layout, walk_linears
from motet.model.lora_products import LoraProducts, products_backend
from motet.model.mixers import StatefulBackend, replace_mixers
from motet.model.packed import PackedLinear, frozen_weight, n_hidden
from motet.model.text_only import decoder_of

if TYPE_CHECKING:
    from motet.model.shards import Shards


class Kernels(Protocol):
    """Motet's own kernels, which compute a base's passes instead of torch modules, for sampling and training."""

    attention: AttentionBackend
    whole_sums: bool  # whether gradients of adapters may be added as whole numbers (`UnitSums`)

    @property
    def math(self) -> MathKernels | None:
        """Functions other than passes, such as drawing tokens and AdamW; None if torch computes them."""
        ...

    def read_keys_in_blocks(self, block_size: int) -> None:
        """Choose the attention backend for KV blocks of this many tokens."""
        ...

    def prepare(self, threads: int) -> None:
        """Use `threads` threads (0 for torch's number), and allocate the memory of the first backward pass now."""
        ...

    def pass_bytes(self, routing: Routing, n_rows: int, *, recompute: bool) -> int:
        """Bytes that a forward and backward pass over one sequence needs; runs nothing."""
        ...

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attention: AttentionPass, routing: Routing) -> Tensor:
        """Final hidden states [T, D] of packed tokens; its backward pass adds the gradients of the routing's adapters."""
        ...

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """Output of the head's product, [N, V]."""
        ...

    def through_head(self, slope_raw_NV: Tensor) -> Tensor:
        """Gradient with respect to hidden [N, D] from that of `raw_logits(hidden)`."""
        ...

    def steps(self, cache: KVCache) -> DeviceSteps | None:
        """Decode steps that go from tokens to tokens on the device; None if these kernels have none."""
        ...


@dataclass
class LoraModel:
    """The loaded base. Weights are frozen; `context` selects the adapters of the next forward pass."""

    info: ModelInfo
    """`revise` replaces it: during loading, and if graphs fail later."""
    model: Any
    decoder: nn.Module
    head: FrozenWeight
    dtype: torch.dtype
    device: torch.device
    context: LoraContext
    linears: dict[str, LoraLinear]
    experts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Experts, inputs and outputs of the adaptable projections, by path."""
    block_size: int = 64
    """Keys that attention reads at a time, as in the proof."""
    stateful: frozenset[int] = frozenset()
    """Layers that keep a state instead of keys and values (see `motet.model.mixers`)."""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    noise: float = 0.0
    """Gap between transformers' own logits by two ways of computing them (`judge.gap`), as the proof measured it."""
    shards: Shards | None = None
    """Distribution of the weights over ranks; None if this process has all of them."""
    kernels: Kernels | None = None
    """Own kernels for passes; None if torch computes them."""
    attention: AttentionBackend = field(init=False)
    products: LoraProducts = field(init=False)
    _layouts: dict[tuple[tuple[str, ...], int], AdapterLayout] = field(default_factory=dict)

    def revise(self, note: str = "", **facts: Any) -> None:
        """Update facts in `info`, and add a note for users."""
        notes = (*self.info.notes, note) if note else self.info.notes
        self.info = replace(self.info, notes=notes, **facts)

    @property
    def math(self) -> MathKernels | None:
        """Math functions of own kernels; None with torch."""
        return None if self.kernels is None else self.kernels.math

    def agreed(self, verdict: bool) -> bool:
        """Whether the ranks of a base in shards all say yes; they call this together."""
        return verdict if self.shards is None else self.shards.experts.agreed(verdict)

    @property
    def towers(self) -> tuple[str, ...]:
        """Classes of the model's other parts (such as vision towers) that were not loaded."""
        return tuple(getattr(self.model, "towers", ()))

    @property
    def quantised(self) -> str | None:
        """Quantisation method of its files; None if they are not quantised."""
        return getattr(self.model, "quantised_as", None)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return has_experts(self.model)

    def __post_init__(self) -> None:
        self.compute_with(self.arithmetic)

    def compute_with(self, arithmetic: Arithmetic) -> None:
        """Use the backends of an arithmetic for all later passes."""
        self.arithmetic = self.context.arithmetic = arithmetic
        self.products = products_backend(arithmetic, self.device, self.dtype)
        self.read_keys_in_blocks(self.block_size)
        for weight in self._frozen_weights():
            weight.compute_with(arithmetic)

    def read_keys_in_blocks(self, block_size: int) -> None:
        """Choose the attention backend for KV blocks of this many tokens."""
        self.block_size = block_size
        if self.kernels is not None:
            self.kernels.read_keys_in_blocks(block_size)
            self.attention = self.kernels.attention
            return
        width = head_width(self.model.config.get_text_config())
        self.attention = attention_backend(self.arithmetic, self.device, self.dtype, width=width, block_size=block_size)
        if self.stateful:
            kernels = self.arithmetic.attention == "triton"
            self.attention = StatefulBackend(self.attention, self.device, kernels=kernels)

    def compute_slower(self, slower: Arithmetic, without: str, because: Exception) -> None:
        """Switch to a slower arithmetic after a failed test; the reason becomes a note."""
        self.compute_with(slower)
        self.revise(f"slower than it could be, without {without}: {reason_of(because)}")

    def _frozen_weights(self) -> list[FrozenWeight]:
        fused = {layer.fused.leader: layer.fused.frozen for layer in self.linears.values()}
        return [*fused.values(), self.head]

    def reorder_weights(self) -> None:
        """On a CPU, create a reordered second copy of frozen bfloat16 weights if its products have the same bits."""
        reorder_all(self._frozen_weights())

    @contextlib.contextmanager
    def routed(self, routing: Routing) -> Iterator[None]:
        """Use these adapters for forward passes and recomputation in the block; other threads wait for its end."""
        with self.context.one_pass:
            self.context.routing = routing
            try:
                with contextlib.nullcontext() if self.shards is None else self.shards.gathered():
                    yield
            finally:
                self.context.routing, self.context.joint = NoAdapters(), None

    @contextlib.contextmanager
    def aside(self, routing: Routing) -> Iterator[None]:
        """Disable adapters between two pieces of a pass inside `routed`, so that other passes can run."""
        self.context.routing = NoAdapters()
        self.context.one_pass.release()  # the pass may never go on
        try:
            yield
        finally:
            self.context.one_pass.acquire()
            self.context.routing, self.context.joint = routing, None

    def pad(self, x_ND: Tensor) -> Tensor:
        """Repeat the last row until the number of rows is a multiple of `arithmetic.rows`."""
        pad = -x_ND.shape[0] % self.arithmetic.rows
        return torch.cat([x_ND, x_ND[-1:].expand(pad, *x_ND.shape[1:])]) if pad else x_ND

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, attention: AttentionPass) -> Tensor:
        """Final hidden states [T, D] of packed tokens."""
        if self.kernels is not None:
            return self.kernels.hidden(token_ids_T, positions_T, attention, self.context.routing)
        output = self.decoder(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            attention_pass=attention,
            return_dict=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V]; N must be a multiple of `arithmetic.rows` for exactness (see `pad`)."""
        return self.finish_logits(self.raw_logits(hidden_ND))

    def raw_logits(self, hidden_ND: Tensor) -> Tensor:
        """Output [N, V] of the head's product, in the base's dtype or in fp32."""
        if self.kernels is not None:
            return self.kernels.raw_logits(hidden_ND)
        raw_NV: Tensor = self.head(hidden_ND)
        return raw_NV

    @functools.cached_property
    def changes(self) -> LogitChanges:
        """What the model changes in its head's products."""
        return LogitChanges(self.model.config.get_text_config(), self.info.without_token)

    def finish_logits(self, raw_NV: Tensor) -> Tensor:
        """fp32 logits [N, V]; see `LogitChanges.finish`."""
        return self.changes.finish(raw_NV) if self.math is None else self.math.finish(raw_NV, self.changes)

    def logits_slope(self, raw_NV: Tensor, slope_NV: Tensor) -> Tensor:
        """Gradient with respect to raw [N, V] from that of `finish_logits(raw)`; may be in fp32."""
        return self.changes.slope(raw_NV, slope_NV)

    def through_head(self, slope_raw_NV: Tensor) -> Tensor:
        """Gradient with respect to hidden [N, D] from that of `raw_logits(hidden)`."""
        if self.kernels is not None:
            return self.kernels.through_head(slope_raw_NV)
        return self.head.back(slope_raw_NV)

    @torch.no_grad()
    def fingerprint(self) -> str:
        """SHA-256 of the logits of fixed tokens; equal only if every bit is equal."""
        tokens_T = self.pad(torch.arange(16, device=self.device) * 97 % self.info.vocab_size)
        positions_T = torch.arange(len(tokens_T), device=self.device)
        with self.routed(NoAdapters()):
            hidden_TD = self.hidden(tokens_T, positions_T, self.attention.packed([len(tokens_T)]))
            logits_TV = self.logits(hidden_TD)
        return hashlib.sha256(logits_TV.cpu().numpy().tobytes()).hexdigest()

    def adapter_layout(self, target_modules: str | Sequence[str], rank: int) -> AdapterLayout:
        """The layout of an adapter with these targets.

        Raises:
            AdapterError: a target matches no layer; the message lists the layers.
        """
        chosen = self.info.adapted(target_modules)
        known_layout = self._layouts.get((chosen, rank))
        if known_layout is not None:
            return known_layout
        linears = {path: self.linears[path] for path in chosen if path in self.linears}
        layout = make_layout(
            {path: (layer.in_features, layer.out_features) for path, layer in linears.items()},
            rank,
            [layer.fused.paths for layer in self.linears.values()],
            {path: self.experts[path] for path in chosen if path not in linears},
        )
        return self._layouts.setdefault((chosen, rank), layout)


def head_width(config: Any) -> int:
    """Elements of an attention head; of the narrowest, if layers differ."""
    layers = getattr(config, "per_layer_config", None) or [config]  # Gemma 4's full attention has wider heads
    return min(
        int(getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads) for layer in layers
    )


def _remove_dropout(model: nn.Module) -> None:
    """Remove dropout: recomputation enables training mode in layers."""
    for module in model.modules():
        for field_name, value in vars(module).items():
            if "drop" in field_name and isinstance(value, float):
                setattr(module, field_name, 0.0)


def wrap(name: str, model: Any, tokenizer: Any, device: torch.device, *, shards: bool = False) -> LoraModel:
    """Replace the decoder's linear layers, attention and experts; the rest of the model is unchanged.

    On a GPU, experts are replaced only with `shards`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.motet_attention)
    model.set_attn_implementation(attention.NAME)
    context = LoraContext()
    if device.type == "cpu" or shards:
        compute_experts(model, context)
    decoder = decoder_of(model)
    linears: dict[str, LoraLinear] = {}
    prefix = next((path for path, module in model.named_modules() if module is decoder), "")
    peculiar = set()
    for path, linear in list(walk_linears(decoder)):
        if type(linear) not in (nn.Linear, PackedLinear):  # its product may use more than its weight
            peculiar.add(type(linear).__name__)
            continue
        full = f"{prefix}.{path}" if prefix else path
        parent, _, leaf = path.rpartition(".")
        wrapped = LoraLinear(linear, full, context)
        setattr(decoder.get_submodule(parent) if parent else decoder, leaf, wrapped)
        linears[full] = wrapped
    if not linears:
        raise BaseModelError(
            f"{name} has no nn.Linear layer in its decoder{', but ' * bool(peculiar)}{' and '.join(sorted(peculiar))}, so "
            f"there is nothing to adapt; {attention.INSTEAD}"
        )
    stateful = replace_mixers(decoder)
    _remove_dropout(model)
    dtype, head = next(iter(linears.values())).fused.frozen.dtype, _freeze_head(model)
    info = _info(name, model, tokenizer, device, dtype, head, tuple(linears))
    experts = adaptable_experts(model) if device.type == "cpu" else {}
    base = LoraModel(info, model, decoder, head, dtype, device, context, linears, experts, stateful=stateful)
    base.revise(experts=tuple(experts), experts_idle=_why_idle(base))
    if peculiar:
        base.revise(f"{' and '.join(sorted(peculiar))} layers get no adapter, because they multiply in their own way")
    if n_absent := len(info.without_token):
        base.revise(
            f"{n_absent} of {info.vocab_size} rows of its head have no token in its tokenizer: none is ever sampled"
        )
    if base.has_experts:
        base.revise(
            "mixture of experts: routers get no adapter; routed experts get one if target_modules names `experts`"
            if experts
            else "mixture of experts: routers and routed experts get no adapter"
        )
    return base


def _why_idle(base: LoraModel) -> str:
    """Why adapters on experts are impossible; empty if they are possible."""
    if base.experts:
        return ""
    if not base.has_experts:
        return "it has no experts"
    if base.device.type != "cpu":
        return "adapters on experts are supported on CPUs only"
    return "its class computes experts in its own way"


def _freeze_head(model: Any) -> FrozenWeight:
    head = model.get_output_embeddings()
    frozen = frozen_weight(head)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, frozen)
    return frozen


def _info(
    name: str,
    model: Any,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    head: FrozenWeight,
    linears: tuple[str, ...],
) -> ModelInfo:
    config, vocabulary = model.config.get_text_config(), TokenIds.of(tokenizer, head.shape[0])
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return ModelInfo(
        name=name,
        tokenizer=tokenizer,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        processor=processor_of(device),
        n_parameters=sum(parameter.numel() for parameter in model.parameters()) + n_hidden(model),
        vocab_size=vocabulary.size,
        max_positions=int(config.max_position_embeddings),
        hidden_size=config.hidden_size,
        model_type=config.model_type,
        kv_bytes_per_token=0,
        state_bytes=0,
        eos_token_ids=tuple(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]),
        linears=linears,
        without_token=tuple(sorted(vocabulary.without)),
    )
