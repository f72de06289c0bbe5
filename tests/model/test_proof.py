"""The proof at load: right bases lie within the noise of rounding, wrong ones at least three times beyond what is accepted.

A gap is accepted if logits and every part of every layer lie within their limits, so the worst of them tells how far
beyond a wrong base lies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from motet.core.errors import BaseModelError
from motet.model.exactness import packed_logits
from motet.model.layer_comparison import LayerVerdict, compare_layers
from motet.model.lora import NoAdapters
from motet.model.lora_model import LoraModel, wrap
from motet.model.proof import REASON, prove
from motet.model.reference_model import Stock
from motet.model.tolerance import CAP, FLOOR, MULTIPLE, LogitsVerdict, accepted, gap, judge
from tests.support import tiny_models as tiny
from tests.support.cases import few

pytestmark = pytest.mark.tier1

CPU = torch.device("cpu")
HEAD = 16
BEYOND = 3

# --- random bases -------------------------------------------------------------------------------------------------------


def random_model(family: str, layers: int, spread: float, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """A stock model; `spread` is the standard deviation of its weights, and norms are not all ones."""
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": HEAD, "max_position_embeddings": 256}
    config = getattr(transformers, f"{family}Config")(**shape, **heads, **options)
    generator = torch.Generator().manual_seed(layers)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise if parameter.dim() > 1 else parameter + 10 * spread * torch.sign(noise))
    return model.requires_grad_(False)


@dataclass
class Found:
    """What the proof measures."""

    noise: float
    logits: LogitsVerdict
    layers: LayerVerdict

    @property
    def beyond(self) -> float:
        """The worst gap, as a multiple of what is accepted: more of logits, where fp32 judged all layers."""
        most = self.logits.accepted
        if not self.logits.close:
            most = max(REASON * most, MULTIPLE * self.noise)
        return max(self.logits.gap / most, self.layers.excess)


@torch.no_grad()
def measured(model: Any, damage: Callable[[LoraModel], None] = lambda base: None) -> Found:
    stock = Stock(model)
    base = wrap("random", model, None, CPU)
    base.block_size, base.noise = tiny.BLOCK, stock.noise
    damage(base)
    with base.routed(NoAdapters()), stock.routers.of(base.model).replayed():
        logits = judge(base, torch.cat(packed_logits(base, stock.sequences)[0]), torch.cat(stock.logits))
        layers = compare_layers(base, stock, thorough=not logits.close)
    assert layers is not None
    return Found(stock.noise, logits, layers)


# --- wrong models ---------------------------------------------------------------------------------------------------------


def middle(base: LoraModel) -> Any:
    layers = base.decoder.get_submodule("layers")
    return layers[len(layers) // 2]  # type: ignore[index, arg-type]


def frozen_copy(weight: torch.Tensor) -> nn.Parameter:
    """The base's own: its other weights are the stock model's."""
    return nn.Parameter(weight, requires_grad=False)


def skips_a_layer(base: LoraModel) -> None:
    middle(base).forward = lambda states, *_, **__: states


def skips_an_mlp(base: LoraModel) -> None:
    middle(base).mlp.forward = torch.zeros_like


def forgets_a_scale(base: LoraModel) -> None:
    middle(base).self_attn.scaling = 1.0


def has_another_rope(base: LoraModel) -> None:
    decoder: Any = base.decoder
    decoder.rotary_emb.inv_freq = decoder.rotary_emb.inv_freq * 1.25


def swaps_heads(base: LoraModel) -> None:
    """Two heads of the queries of one layer."""
    frozen = middle(base).self_attn.q_proj.fused.frozen
    first, second, third, rest = frozen.weight.split([HEAD, HEAD, HEAD, len(frozen.weight) - 3 * HEAD])
    frozen.weight = frozen_copy(torch.cat([third, second, first, rest]))


def forgets_a_norm(base: LoraModel) -> None:
    middle(base).input_layernorm.forward = lambda states: states


def forgets_a_norms_weight(base: LoraModel) -> None:
    norm = middle(base).post_attention_layernorm
    norm.weight = frozen_copy(torch.ones_like(norm.weight))


def forgets_the_last_norms_weight(base: LoraModel) -> None:
    norm: Any = base.decoder.norm
    norm.weight = frozen_copy(torch.ones_like(norm.weight))


def takes_another_activation(base: LoraModel) -> None:
    middle(base).mlp.act_fn = nn.GELU()


def ignores_a_window(base: LoraModel) -> None:
    base.model.config.sliding_window = None


def forgets_a_bias(base: LoraModel) -> None:
    frozen = middle(base).self_attn.v_proj.fused.frozen
    frozen.bias = frozen_copy(torch.zeros_like(frozen.bias))


def forgets_the_residuals_scale(base: LoraModel) -> None:
    middle(base).residual_multiplier = 1.0


WRONG = {
    "Llama": (
        skips_a_layer,
        skips_an_mlp,
        forgets_a_scale,
        has_another_rope,
        swaps_heads,
        forgets_a_norm,
        forgets_a_norms_weight,
        forgets_the_last_norms_weight,
        takes_another_activation,
    ),
    "Mistral": (ignores_a_window,),
    "Qwen2": (forgets_a_bias,),
    "Granite": (forgets_the_residuals_scale,),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 20},
    "Granite": {"residual_multiplier": 0.7},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
DEPTHS = (2, 8, 16, 32)


def base_of(family: str, layers: int, spread: float = 0.1, dtype: torch.dtype = torch.bfloat16) -> Any:
    return random_model(family, layers, spread, dtype, **OPTIONS.get(family, {}))


@pytest.mark.parametrize(
    ("family", "layers"),
    few([(family, layers) for family in (*WRONG, "Mixtral") for layers in DEPTHS], *[(each, 2) for each in WRONG]),
)
@pytest.mark.parametrize("spread", few([0.02, 0.1, 0.2], 0.1))
def test_right_bases_lie_within_what_is_accepted(family: str, layers: int, spread: float) -> None:
    assert measured(base_of(family, layers, spread)).beyond < 1


@pytest.mark.parametrize(
    ("family", "layers", "fault"),
    few(
        [(family, layers, fault) for family, faults in WRONG.items() for fault in faults for layers in DEPTHS],
        *[(family, 2, fault) for family, faults in WRONG.items() for fault in faults],
    ),
)
def test_wrong_bases_lie_three_times_beyond(family: str, layers: int, fault: Callable[[LoraModel], None]) -> None:
    found = measured(base_of(family, layers), fault)
    print(family, layers, fault.__name__, found)
    assert found.beyond >= BEYOND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_is_judged_with_the_stock_models_experts(dtype: torch.dtype) -> None:
    assert measured(base_of("Mixtral", 2, dtype=dtype)).beyond < 1
    assert measured(base_of("Mixtral", 2, dtype=dtype), forgets_a_norms_weight).beyond >= BEYOND


# --- what the proof says ----------------------------------------------------------------------------------------------------


def proved(model: Any, damage: Callable[[LoraModel], None] = lambda base: None, **options: Any) -> LoraModel:
    def wrapped() -> LoraModel:
        base = wrap("random", model, None, CPU)
        damage(base)
        return base

    return prove(wrapped, model, "random", tiny.BLOCK, **options)


@pytest.mark.parametrize(
    ("family", "layers"), few([("Granite", 8), ("Granite", 32), ("Llama", 16), ("Llama", 32)], ("Granite", 8))
)
def test_a_right_base_whose_noise_is_large_is_let_in(family: str, layers: int) -> None:
    """Rounding changes the stock model's logits by more than 5 % of their size; of 32 layers of Granite by 80 %."""
    base = proved(base_of(family, layers))
    assert base.noise > 0.05
    assert {weight.dtype for weight in base.model.parameters()} == {torch.bfloat16}, "fp32 judged, and is gone"


def test_what_logits_hide_is_found_in_the_layer() -> None:
    """Beside 8 layers, this is within the noise of logits."""
    with pytest.raises(BaseModelError, match=r"random: mlp of layer.*on the same input"):
        proved(base_of("Llama", 8), takes_another_activation)


def test_the_stock_models_weights_are_let_go_before_they_are_fused() -> None:
    model = base_of("Llama", 2)
    own = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    seen: list[bool] = []

    def leaves(base: LoraModel) -> bool:
        seen.append(own() is None)
        return False

    proved(model, leaves=leaves)
    assert seen == [True]


# --- the judge -----------------------------------------------------------------------------------------------------------


def test_the_accepted_gap_is_a_multiple_of_the_noise_between_a_floor_and_a_cap() -> None:
    for dtype, floor in FLOOR.items():
        assert accepted(0.0, dtype) == floor
        assert accepted(0.04, dtype) == MULTIPLE * 0.04
        assert accepted(0.9, dtype) == CAP


@pytest.mark.parametrize("where", [(3, slice(None)), (slice(None), 5)], ids=["token", "id"])
def test_one_wrong_token_or_id_counts_in_full(where: Any) -> None:
    right = torch.randn(31, 400, generator=torch.Generator().manual_seed(0))
    wrong = right.clone()
    wrong[where] += 1.0
    assert gap(wrong, right) > 0.9
    assert gap(right, right) == 0.0


def test_nan_is_never_close() -> None:
    base = tiny.base("llama")
    right = torch.randn(31, base.info.vocab_size, generator=torch.Generator().manual_seed(0))
    wrong = right.clone()
    wrong[2, 3] = torch.nan
    assert judge(base, right, right).close
    assert not judge(base, wrong, right).close
