"""The transformers decoders that Motet's own kernels compute, on CPUs and on cards, and where they keep weights and constants.

Legend: D model width, E rotated elements of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from decimal import Decimal, localcontext
from typing import Any

import torch
from torch import Tensor

from motet.model.attention import LayerCall
from motet.model.lora import LoraLinear
from motet.model.lora_model import LoraModel, head_width

FAMILIES = frozenset(
    "exaone4 gemma gemma2 gemma3_text granite llama ministral ministral3 mistral mixtral olmo2 olmo3 olmoe phi3 "
    "qwen2 qwen3 qwen3_moe qwen3_vl_text seed_oss smollm3 vaultgemma".split()
)
"""Supported families: values of `model_type`."""

GATES = ("silu", "gelu_pytorch_tanh")
"""Supported activation functions of MLPs, by the names of transformers."""

_MOST_FOLDED = 64
"""Largest number of query heads per key-value head."""

_ELSEWHERE = {
    "a mixture of experts of another kind": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "layers with a state": ("linear_num_value_heads", "mamba_d_state", "ssm_state_size", "conv_L_cache", "state_size"),
    "latent attention": ("kv_lora_rank",),
}
"""Unsupported features, and the configuration fields of bases that have them."""

_OTHERWISE = {
    "LayerNorm": ("cohere", "cohere2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2"),
    "rotation of neighbouring numbers": ("ernie4_5", "glm4", "helium"),
    "MLPs without a gate": ("apertus", "arcee", "nanochat"),
    "norms after rotation": ("hunyuan_v1_dense",),
    "embeddings for each layer": ("gemma3n_text", "gemma4_text"),
}
"""Unsupported features of dense bases, with their `model_type`s."""


def refusal_of(config: Any, block_size: int) -> str:
    """Why Motet's kernels cannot compute bases with this transformers configuration; empty if they can."""
    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        found = [what for what, fields in _ELSEWHERE.items() if any(getattr(config, each, None) for each in fields)]
        found += [what for what, kinds in _OTHERWISE.items() if config.model_type in kinds]
        return f"own kernels do not compute {config.model_type}" + f", which has {found[0]}" * bool(found)
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "own kernels need experts in every layer, and this base has them in some"
    if getattr(config, "clip_qkv", None):
        return "own kernels do not clip queries, keys and values"
    if gate_of(config) not in GATES:
        return f"own kernels have the gates {' and '.join(GATES)}, and this base has {gate_of(config)}"
    if (width := head_width(config)) % 16:
        return f"own kernels need heads of a multiple of 16 numbers, and these have {width}"
    if config.num_attention_heads > _MOST_FOLDED * config.num_key_value_heads:
        return f"own kernels take at most {_MOST_FOLDED} query heads for each head of keys"
    if getattr(config, "use_bidirectional_attention", False):
        return "own kernels do not compute attention to what comes after a token"
    if block_size % 16:
        return f"own kernels need KV blocks of a multiple of 16 tokens, and these have {block_size}"
    return ""


def gate_of(config: Any) -> str:
    """Name of the MLPs' activation function."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def linears_of(layer: Any) -> list[tuple[LoraLinear, ...]]:
    """The linear layers of a decoder layer, grouped by the plan's fused products."""
    attention, mlp = layer.self_attn, layer.mlp
    queries = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    gates = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    found = [tuple(getattr(attention, name) for name in queries), (attention.o_proj,)]
    if not hasattr(mlp, "experts"):
        found += [tuple(getattr(mlp, name) for name in gates), (mlp.down_proj,)]
    return found


def experts_of(layer: Any) -> tuple[Tensor, list[Tensor]]:
    """A layer's router [experts, D], and two weights for each expert: gate and up together, and down."""
    mlp = layer.mlp
    both = zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)
    return mlp.gate.weight, [weight for pair in both for weight in pair]


def norms_of(layer: Any) -> dict[str, Any]:
    """The norms of a layer, by their names in the plan; None for those that it lacks."""

    def norm(name: str) -> Any:
        return getattr(layer, f"{name}_layernorm", None)

    after = norm("post_feedforward") is not None or norm("pre_feedforward") is not None
    return {
        "norm_in": norm("input"),
        "norm_attended": norm("post_attention") if after else None,
        "norm_mlp": norm("pre_feedforward") if after else norm("post_attention"),
        "norm_done": norm("post_feedforward"),
        "norm_q": getattr(layer.self_attn, "q_norm", None),
        "norm_k": getattr(layer.self_attn, "k_norm", None),
    }


@torch.no_grad()
def norm_weight(norm: Any) -> Tensor:
    """The factors of a norm, fp32. Some norms store them minus one."""
    weight: Tensor = norm.weight.float()
    shown: Tensor = norm(torch.ones(1, len(weight), device=weight.device))[0]
    return weight + (shown - weight).mean().round()


def embedding_scale(decoder: Any, config: Any) -> float:
    """Factor of the embeddings, rounded to their dtype."""
    table = decoder.embed_tokens
    scale = getattr(table, "embed_scale", getattr(config, "embedding_multiplier", 1.0))
    return float(torch.as_tensor(scale).to(table.weight.dtype))


def query_scales(config: Any, positions: int) -> Tensor | None:
    """Factor of Ministral 3's queries at each position, fp32 [positions]; None for models without it."""
    rotary = getattr(config, "rope_parameters", None) or {}
    beta = rotary.get("llama_4_scaling_beta")
    if not beta:
        return None
    passed_T = torch.arange(positions) // rotary["original_max_position_embeddings"]
    with localcontext(prec=40):  # exact logarithms, so that all processors round alike
        logarithms = [float(Decimal(1 + passed).ln()) for passed in range(int(passed_T[-1]) + 1)]
    return 1 + float(beta) * torch.tensor(logarithms, dtype=torch.float64).float()[passed_T]


def rotates(attention: Any, config: Any) -> bool:
    """Whether an attention layer applies rotary embeddings."""
    if config.model_type == "exaone4":
        return attention.sliding_window is None or bool(attention.is_sliding)
    return bool(getattr(attention, "use_rope", True))


def _angles_by_kind(decoder: Any) -> bool:
    """Whether layers of different kinds have different cosines and sines."""
    return "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters


def angle_bytes(decoder: Any, config: Any, positions: int) -> int:
    """Most bytes of the tables of `angles`; models that rotate a part of a head need less."""
    kinds = len(set(config.layer_types)) if _angles_by_kind(decoder) else 1
    return kinds * positions * head_width(config) * torch.float32.itemsize


def angles(
    decoder: Any, config: Any, positions: int, computed: Callable[[], AbstractContextManager[object]]
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function from a layer to its cosines and sines [positions, E / 2], made by the model's own rotary module.

    They are made in the context `computed()`.
    """
    by_kind = _angles_by_kind(decoder)
    made: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def of_layer(index: int) -> tuple[Tensor, Tensor]:
        kind = (config.layer_types[index],) if by_kind else ()
        if kind not in made:
            with torch.no_grad(), computed():
                fresh = type(decoder.rotary_emb)(decoder.rotary_emb.config)  # recomputes the frequencies too
                cosines, sines = fresh(torch.zeros(1, 1, 1), torch.arange(positions)[None], *kind)
            half = cosines.shape[-1] // 2
            made[kind] = cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
        return made[kind]

    return of_layer


def attention_calls(base: LoraModel) -> dict[int, LayerCall]:
    """The arguments of each layer's attention (window, scaling, softcap), recorded in a short pass."""
    tokens = torch.zeros(base.arithmetic.rows, dtype=torch.long, device=base.device)
    attention = base.attention.packed([len(tokens)])
    with torch.no_grad():
        base.hidden(tokens, torch.arange(len(tokens), device=base.device), attention)
    return {call.layer: call for call in attention.calls}
