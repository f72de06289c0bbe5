"""Tiny models with random weights, one per architecture that matters, saved to disk as a person would have them.

Weights are drawn large (0.2 where models start at 0.02), norms and biases too, so that a mistake anywhere moves the logits.
Sliding windows are 20 tokens (within the proof's 22) and KV blocks 16, so sequences of 37 and more cross both.
"""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from motet.kernels.supported_bases import compute_with
from motet.model.attention import Span
from motet.model.find import SMALL_BASE
from motet.model.kv_cache import KVCache
from motet.model.load import load_base
from motet.model.lora import AdapterLayout, AdapterWeights, NoAdapters, Routing, initial_weights
from motet.model.lora_model import LoraModel
from motet.model.routing import AdapterStacks
from tests.support import native_calls
from tests.support import tiny_models as tiny

VOCABULARY = 276
"""The small base's special tokens, 256 bytes and first merges."""
BLOCK = 16
WINDOW = 20
LENGTHS = (70, 9, 37, 48)
"""Shorter than a block, across several, a whole number of blocks; three of them longer than the window."""

_NEAR = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Largest difference of logits from transformers' own, as a share of the largest logit."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
_DELTA_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip

# as many experts as fill vectors of the CPU: at the end of a tensor a router's sigmoid has other bits
_ROUTED = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_MOE}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ALTERNATING = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_long": (
        "LlamaConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32768,
        },
    ),
    "llama": ("LlamaConfig", {}),
    "llama_biased": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2_linear": ("Qwen2Config", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama_deep": ("LlamaConfig", {"num_hidden_layers": 10}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3_wide": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": WINDOW}),
    "gemma3_mixed": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 16, "num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.3, "activation_function": "relu"}),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 4, "shared_expert_intermediate_size": 48, **_MOE}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 16, "head_dim": 16, **_MOE, "num_experts_per_tok": 4}),
    "qwen3_moe_wide": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "hidden_size": 512, "head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1024},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_ROUTED, **_LATENT},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 128,
            "floor_scale": 100,
        },
    ),
    "qwen2_moe_windowed": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 32,
            "max_window_layers": 1,
            **_MOE,
        },
    ),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "router_jitter_noise": 0.1, "input_jitter_noise": 0.1}),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_5": ("Qwen3_5TextConfig", {"num_hidden_layers": 3, "head_dim": 16, "layer_types": _DELTA_LAYERS, **_DELTA}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "layer_types": _DELTA_LAYERS,
            "mlp_only_layers": [0, 1, 2],
            **_DELTA,
        },
    ),
    "qwen3_next_moe": (  # neither its heads, its experts nor their width fill vectors of the CPU
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "layer_types": _DELTA_LAYERS,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 5,
            "shared_expert_intermediate_size": 36,
            **_MOE,
            "moe_intermediate_size": 36,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {"num_hidden_layers": 3, "layer_types": _DELTA_LAYERS, **_DELTA, "linear_value_head_dim": 16},
    ),
    "bamba": (
        "BambaConfig",
        {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16},
    ),
    "granite_h": (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "ctrl": ("CTRLConfig", {"n_layer": 2, "n_head": 4, "n_embd": 64, "dff": 96}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4_moe": ("Glm4MoeConfig", {"head_dim": 16, **_ROUTED}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_ROUTED, **_LATENT}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "exaone4": ("Exaone4Config", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW, "logit_scale": 0.3, "layer_types": _ALTERNATING}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "ministral": ("MinistralConfig", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {}),
    "phi": ("PhiConfig", {}),
    "deepseek_v2": ("DeepseekV2Config", {**_ROUTED, **_LATENT}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 256}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "nanochat": ("NanoChatConfig", {}),
    "youtu": ("YoutuConfig", _LATENT),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 16, "sliding_window": WINDOW}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW}),
    # Wrapped together with a tower that sees:
    "mistral3": (
        "Mistral3Config",
        {"text_config": {"model_type": "ministral3", "head_dim": 16}, "vision_config": _TOWER},
    ),
    "gemma3_seeing": (
        "Gemma3Config",
        {
            "text_config": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {"head_dim": 16},
            "vision_config": {
                **_TOWER,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    # Refused, each for a reason of its own:
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "gptj": ("GPTJConfig", {"n_layer": 2, "n_head": 4, "n_embd": 64, "rotary_dim": 16, "n_positions": 256}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 8,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
    "deepseek_v32": ("DeepseekV32Config", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **_MOE, **_LATENT}),
    "bert": ("BertConfig", {}),
    "codegen": ("CodeGenConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 64}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "llama_dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "phi3_longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
DENSE = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "granite", "cohere", "opt", "minicpm3", "gemma3n",
    "gemma4",
)  # fmt: skip
"""Architectures on which everything holds, bit for bit."""
HYBRID_IN_PEFT = ("lfm2", "qwen3_5", "falcon_h1", "granite_h", "nemotron_h")
HYBRID = (*HYBRID_IN_PEFT, "qwen3_next", "olmo_hybrid", "bamba")
"""Those with layers that keep a state. PEFT takes the dense layers of Qwen3-Next for experts."""
WINDOWED = ("gemma2", "gemma3", "mistral")

_disk = tempfile.TemporaryDirectory(prefix="motet-tiny-")
atexit.register(_disk.cleanup)


@functools.cache
def directory(name: str) -> Path:
    """A model directory as `save_pretrained` writes it, with a tokenizer; weights are a function of the name."""
    config_class, options = CONFIGS[name]
    wrapped = {**options, "text_config": {**_SHAPE, **options.get("text_config", {})}}
    config = getattr(transformers, config_class)(**(wrapped if "text_config" in options else {**_SHAPE, **options}))
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _kind(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    place = Path(_disk.name) / name
    model.save_pretrained(place)
    _save_tokenizer(place)
    return place


def _kind(config: Any) -> Any:
    wraps = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if wraps else transformers.AutoModelForCausalLM


def _save_tokenizer(place: Path) -> None:
    tokenizer = json.loads((SMALL_BASE / "tokenizer.json").read_text())
    vocabulary = {piece: index for piece, index in tokenizer["model"]["vocab"].items() if index < VOCABULARY}
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in tokenizer["model"]["merges"]]
    tokenizer["model"] |= {"vocab": vocabulary, "merges": [pair for pair in pairs if "".join(pair) in vocabulary]}
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        (place / file).write_text((SMALL_BASE / file).read_text())


def load(name: str, dtype: str = "float32", device: str = "cpu") -> LoraModel:
    """A base of its own, for tests that change it; `llama/native` is one that own kernels compute."""
    name, _, kernels = name.partition("/")
    with torch.inference_mode(False):  # a test may ask for it inside, and the proof takes gradients
        model = load_base(str(directory(name)), dtype=dtype, device=device, block_size=BLOCK)
        if kernels:
            native_calls.directory()
            compute_with(model, "native" if kernels == "native" else "native-dpbf16")
    return model


@functools.cache
def base(name: str, dtype: str = "float32") -> LoraModel:
    """A base that tests share and leave as it is."""
    return load(name, dtype)


def stock(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same model as transformers loads it, with its own eager attention."""
    kind = _kind(transformers.AutoConfig.from_pretrained(directory(name)))
    return kind.from_pretrained(directory(name), dtype=dtype, attn_implementation="eager").eval()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [T]."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


Packed = list[tuple[AdapterWeights | None, torch.Tensor]]
"""Sequences with the adapter of each; those of one adapter lie together."""


@torch.no_grad()
def packed_logits(model: LoraModel, packed: Packed, routing: Routing | None = None) -> list[torch.Tensor]:
    """fp32 logits [T, V] of each sequence, all in one pass as the sampler routes it."""
    lengths = [len(ids) for _, ids in packed]
    ids = model.pad(torch.cat([ids for _, ids in packed]).to(model.device))
    pad = len(ids) - sum(lengths)
    spans = [*lengths, pad] if pad else lengths
    positions = torch.cat([torch.arange(length, device=model.device) for length in spans])
    runs: list[tuple[AdapterWeights | None, int, int]] = []
    for (weights, _), length in zip(packed, lengths, strict=True):
        start = sum(run[2] for run in runs)
        if runs and runs[-1][0] is weights:
            runs[-1] = (weights, runs[-1][1], runs[-1][2] + length)
        else:
            runs.append((weights, start, length))
    with model.routed(routing or AdapterStacks(model.products).routing(runs, model.device)):
        hidden = model.hidden(ids, positions, model.attention.packed(spans))
    return list(model.logits(hidden).split(spans))[: len(lengths)]


@torch.no_grad()
def decoded_logits(model: LoraModel, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """fp32 logits [T, V] of a sequence read as a prompt and then token by token through the KV cache."""
    cache = KVCache(-(-len(ids) // BLOCK), BLOCK, model.device)
    blocks, slot = cache.take(cache.n_blocks), cache.states.take()
    found, start = [], 0
    for length in [prompt] + [1] * (len(ids) - prompt):
        attention = model.attention.cached([Span(start, length, blocks, slot)], cache)
        positions = model.pad(torch.arange(start, start + length))
        with model.routed(NoAdapters()):
            hidden = model.hidden(model.pad(ids[start : start + length]), positions, attention)
        found.append(model.logits(hidden)[:length])
        start += length
    return torch.cat(found)


def adapter(
    model: LoraModel,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | list[str] = "all-linear",
    seed: int = 0,
    scale: float = 0.1,
) -> AdapterWeights:
    """An adapter whose B is random too, as after training."""
    layout, masters = adapter_masters(model, rank=rank, targets=targets, seed=seed, scale=scale)
    return AdapterWeights.from_masters(layout, alpha / rank, masters, model.dtype)


def adapter_masters(
    model: LoraModel, *, rank: int = 8, targets: str | list[str] = "all-linear", seed: int = 0, scale: float = 0.1
) -> tuple[AdapterLayout, torch.Tensor]:
    """What a trainer would hold of such an adapter, in fp32."""
    layout = model.adapter_layout(targets, rank)
    masters = initial_weights(layout, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in layout.views(masters).values():
        b.copy_(torch.randn(b.shape, generator=generator) * scale)
    return layout, masters.to(model.device)


@torch.no_grad()
def assert_equals_stock(name: str, base: LoraModel, lengths: tuple[int, ...], share: float = 1.0) -> None:
    sequences = [tiny.tokens(length) for length in lengths]
    model = tiny.stock(name, base.dtype)
    stock = [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
    ours = tiny.packed_logits(base, [(None, ids) for ids in sequences])
    largest = max(float(logits.abs().max()) for logits in stock)
    gaps_T = (torch.cat(ours) - torch.cat(stock)).abs().amax(-1)
    near = float((gaps_T <= _NEAR[base.dtype] * largest).float().mean())
    assert near >= share, f"{near:.2%} of the rows are near, the largest gap is {gaps_T.max():.3g} of {largest:.3g}"
