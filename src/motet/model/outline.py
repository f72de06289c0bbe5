"""The size of a base from its config.json alone: parameters, layers, keys and values; no weight is read or made.

The model is built on torch's device `meta` and wrapped as for training, so its layers are those that an engine would have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from motet.core.errors import BaseModelError
from motet.model.checkpoint import empty_model
from motet.model.covered_decoder import linears_of, norms_of, refusal_of
from motet.model.find import find_files
from motet.model.lora_model import LoraModel, wrap
from motet.model.packed_forms import Float8Blocks, Form, Nf4Blocks

_BLOCK = 64
"""Tokens of a KV block, by default."""
_INSTEAD = "run `motet check` with the whole base, which measures it"
_OTHER_CACHES = frozenset(
    {"gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_bigcode", "falcon_h1", "nemotron_h"}
)
"""Architectures whose keys and values have other sizes than their configurations name."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "num_experts_per_token")
_INNER = ("moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True)
class BaseOutline:
    """Sizes of a base; bytes are those in bfloat16."""

    model_type: str
    n_parameters: int
    layers: int
    hidden_size: int
    inner: int
    """Inputs of an MLP's last product for one token, over all experts that it uses."""
    max_positions: int
    linear_shapes: tuple[tuple[int, int], ...]
    """Outputs and inputs of each linear layer of the decoder, without experts and the head."""
    head: int
    """Parameters of the product that gives logits."""
    experts: int
    """Parameters of all routed experts; 0 without."""
    expert_share: float
    """Part of the experts that one token uses."""
    kv_bytes_per_token: int
    state_bytes: int
    """Bytes of the states of layers without attention for one sequence."""
    base: LoraModel
    """The wrapped model, without weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return 2 * self.n_parameters

    @property
    def covered(self) -> bool:
        """Whether Motet's own kernels can compute such a base."""
        return not refusal_of(self.base.model.config, _BLOCK)

    @property
    def fused_shapes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the fused products of one layer of a covered base."""
        decoder: Any = self.base.decoder
        families = linears_of(decoder.layers[0])
        return tuple((sum(linear.out_features for linear in family), family[0].in_features) for family in families)

    @property
    def norms_of_added(self) -> int:
        """Norms, in a layer of a covered base, of what it adds to the residual stream."""
        decoder: Any = self.base.decoder
        norms = norms_of(decoder.layers[0])
        return sum(norms[name] is not None for name in ("norm_attended", "norm_done"))

    @property
    def active(self) -> float:
        """Parameters of the products that one token needs, with the head."""
        return sum(n_out * n_in for n_out, n_in in self.linear_shapes) + self.head + self.experts * self.expert_share

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a decoding pass of so many rows reads, each once."""
        used = 1 - (1 - self.expert_share) ** rows if self.experts else 0.0
        return 2 * (sum(n_out * n_in for n_out, n_in in self.linear_shapes) + self.head + self.experts * used)

    def packed_bytes(self, bits: int) -> int | None:
        """Bytes of all weights with linear layers in fp8 blocks or nf4; None where they cannot stay packed."""
        if self.experts:
            return None
        rest = self.weight_bytes - 2 * sum(n_out * n_in for n_out, n_in in self.linear_shapes)
        return rest + sum(_bytes(_form(bits, n_in), n_out, n_in) for n_out, n_in in self.linear_shapes)

    def adapter_size(self, targets: str | Sequence[str], rank: int) -> int:
        """Parameters of an adapter, with alignment."""
        return self.base.adapter_layout(targets, rank).size


def outline(name: str) -> BaseOutline:
    """Read the configuration of a base: a config.json, a directory with one, or a hub id.

    Raises:
        BaseModelError: there is no such configuration, or Motet does not know the sizes of such a base.
    """
    path = Path(os.path.expanduser(name))
    source = str(path) if path.suffix == ".json" else find_files(name)[0]
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # configurations fail in many ways
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise BaseModelError(
            f"the configuration of {name!r} cannot be read: {reason}; give a config.json, a directory with one, or a hub id"
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        model = empty_model(config).to(torch.bfloat16)
        base = wrap(name, model, None, torch.device("cpu"))
    except BaseModelError:
        raise
    except Exception as error:  # model code of any kind
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise BaseModelError(f"{name!r} ({config.model_type}) cannot be a base: {reason}") from error
    return _outline(name, base, model)


def _outline(name: str, base: LoraModel, model: Any) -> BaseOutline:
    config = model.config.get_text_config()
    if config.model_type in _OTHER_CACHES:
        raise BaseModelError(f"the memory of {name!r} ({config.model_type}) cannot be forecast yet; {_INSTEAD}")
    experts = sum(weight.numel() for path, weight in model.named_parameters() if ".experts." in path)
    share = _first(config, _CHOSEN) / _first(config, _EXPERTS) if experts else 0.0
    inner = _first(config, _INNER) * (_first(config, _CHOSEN) if experts else 1)
    linears = tuple((layer.out_features, layer.in_features) for layer in base.linears.values())
    kv, state = _caches(name, config)
    return BaseOutline(
        model_type=config.model_type,
        n_parameters=base.info.n_parameters,
        layers=int(config.num_hidden_layers),
        hidden_size=base.info.hidden_size,
        inner=inner,
        max_positions=base.info.max_positions,
        linear_shapes=linears,
        head=base.head.shape[0] * base.head.shape[1],
        experts=experts,
        expert_share=share,
        kv_bytes_per_token=kv,
        state_bytes=state,
        base=base,
    )


def _first(config: Any, names: Sequence[str]) -> int:
    found = (getattr(config, name, None) for name in names)
    number = next((value for value in found if isinstance(value, int) and value > 0), None)
    if number is None:
        raise BaseModelError(
            f"{config.model_type} names none of {', '.join(names)}, so its size is unknown; {_INSTEAD}"
        )
    return number


def _caches(name: str, config: Any) -> tuple[int, int]:
    """Bytes of one token's keys and values, and of one sequence's states, over all layers in bfloat16."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    states = [kind for kind in kinds if kind == "linear_attention"]
    if other := sorted({kind for kind in kinds if "attention" not in kind}):
        raise BaseModelError(
            f"the states of layers of kind {', '.join(other)} in {name!r} are unknown here; {_INSTEAD}"
        )
    heads = int(config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):  # latent attention keeps expanded heads
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        grouped = (
            getattr(config, "num_key_value_heads", None) if hasattr(type(config)(), "num_key_value_heads") else None
        )
        width = 2 * (grouped or heads) * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * width * (len(kinds) - len(states)), len(states) * _delta_state(name, config) if states else 0


def _delta_state(name: str, config: Any) -> int:
    """Bytes of one layer of the gated delta rule: the state and the tail of the convolution, in float32."""
    try:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        tail = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    except AttributeError as error:
        raise BaseModelError(f"the states of {name!r} ({config.model_type}) are unknown here; {_INSTEAD}") from error
    return int(4 * (values * config.linear_key_head_dim + tail))


def _form(bits: int, n_in: int) -> Form:
    return Float8Blocks((128, 128)) if bits == 8 else Nf4Blocks(n_in, nested=True)


def _bytes(form: Form, n_out: int, n_in: int) -> int:
    shapes = form.tensors(n_out, n_in).values()
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)
