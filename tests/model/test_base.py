"""Any architecture is proved or refused: what loads computes what transformers computes, and rows keep to themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import AttentionInterface

from motet.core.errors import BaseModelError
from motet.model.arithmetic import Arithmetic
from motet.model.attention import motet_attention
from motet.model.experts import motet_experts
from motet.model.find import find_base
from motet.model.frozen_weight import FrozenWeight
from motet.model.load import load_base
from motet.model.lora import ExpertRun, FusedLinears
from motet.model.lora_model import LoraModel, wrap
from motet.model.proof import prove
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.tiny_models import assert_equals_stock

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "llama4")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", few([*tiny.DENSE, *tiny.HYBRID], "llama", "gemma2", "lfm2"))
def test_architecture_loads_exact_and_equals_stock(name, dtype):
    base = tiny.base(name, dtype)
    apart = ("PEFT loads none", "other rules than its tokenizer.json has")  # true of it, and told
    notes = tuple(note for note in base.info.notes if not any(words in note for words in apart))
    assert (base.dtype, base.info.exact, notes) == (DTYPES[dtype], True, ())
    assert_equals_stock(name, base, tiny.LENGTHS)  # sequences beyond the window and over several blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2"])  # every family: test_bases.py
def test_packed_equals_solo_equals_decoded_bitwise(name, dtype):
    base = tiny.base(name, dtype)
    sequences = [tiny.tokens(length) for length in tiny.LENGTHS]
    packed = tiny.packed_logits(base, [(None, ids) for ids in sequences])
    for ids, logits in zip(sequences, packed, strict=True):
        assert torch.equal(tiny.packed_logits(base, [(None, ids)])[0], logits)
    assert torch.equal(tiny.decoded_logits(base, sequences[0], prompt=19), packed[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hybrid_of_few_heads_and_experts_is_exact(dtype):
    assert tiny.base("qwen3_next_moe", dtype).info.inexact == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", few(MOE, "qwen3_moe", "llama4"))
def test_experts_are_exact_where_they_are_computed_here(name, dtype):
    base = tiny.base(name, dtype)
    # In bf16 the rounding of a router's logits may send a row to another expert.
    assert_equals_stock(name, base, tiny.LENGTHS, share=1.0 if dtype == "float32" else 0.9)
    assert ("target_modules names `experts`" if base.info.exact else "experts get no adapter") in base.info.notes[0]
    assert not any({"experts", "gate", "shared_expert_gate"} & set(path.split(".")) for path in base.linears)
    if name != "llama4":
        assert base.info.exact
        return
    assert not base.info.exact
    assert any("not bit-exact" in note for note in base.info.notes)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_however_many_choose_its_expert(dtype):
    """One to five rows on an expert, and all rows on one."""
    experts = tiny.base("qwen3_moe", dtype).decoder.get_submodule("layers.0.mlp.experts")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 64, generator=generator).to(DTYPES[dtype])
    share = torch.rand(24, 2, generator=generator)
    for others in (0, 1, 2, 3, 4, 23):
        top = torch.tensor([[3, 5]] * (1 + others) + [[7, 9]] * (23 - others))
        outcome = motet_experts(experts, rows, top, share)
        assert torch.equal(outcome[0], motet_experts(experts, rows[:1], top[:1], share[:1])[0])


class CountingRouting:
    """Applies the base and counts the rows of every adaptable layer."""

    expert_runs: Sequence[ExpertRun] = ()

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def linear(self, fused: FusedLinears, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.rows |= dict.fromkeys(fused.paths, x.shape[1])
        return tuple(fused.frozen(x).split(fused.sizes, -1))


@pytest.mark.parametrize("name", few([*tiny.DENSE, *MOE, *tiny.HYBRID], "llama", "opt", "qwen3_moe", "lfm2"))
def test_every_adaptable_layer_is_reached(name):
    """OPT and shared experts flatten the batch before their layers: an adapter there must not be silently idle."""
    base, counting = tiny.base(name), CountingRouting()
    tiny.packed_logits(base, [(None, tiny.tokens(12))], counting)
    assert counting.rows == dict.fromkeys(base.linears, 12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bloom", r"layers \[0, 1\] of 2 do not call the attention function .* \(they have BloomAttention\)"),
        ("falcon", "has no nn.Linear layer in its decoder, but FalconLinear, so there is nothing to adapt"),
        ("mamba", "MambaMixer calls mamba_inner_fn, mamba_selective_scan, .* which Motet does not support"),
        ("jetmoe", "does not run as Motet runs it: JetMoeAttention: view size is not compatible"),
        ("deepseek_v32", "does not run as Motet runs it: DeepseekV32Attention: 'NoneType' object is not subscriptable"),
        ("bert", "BertSelfAttention attends to later tokens, so it is not a causal language model"),
        ("codegen", "does not run in transformers itself: CodeGenAttention: The size of tensor a"),
        ("gpt2", "has no nn.Linear layer"),
    ],
)
def test_architecture_is_refused_with_the_reason(name, message):
    with pytest.raises(BaseModelError, match=f"{message}.*; take a base of another architecture$"):
        tiny.load(name)


@pytest.mark.parametrize("name", ["mistral3", "gemma3_seeing", "qwen3_vl"])
def test_a_base_that_sees_is_loaded_as_one_that_reads(name):
    """Without the memory of its tower, under the paths that it is served with."""
    base, stock = tiny.base(name), tiny.stock(name)
    towers = {path.rsplit(".", 1)[-1]: module for path, module in stock.model.named_children() if "vis" in path}
    (tower,) = towers.values()
    assert base.info.n_parameters == sum(each.numel() for each in {*stock.parameters()} - {*tower.parameters()})
    assert f"its {type(tower).__name__} is left out, and messages with images are refused" in base.info.notes[0]
    assert all(path.startswith("model.language_model.layers.") for path in base.linears)
    assert_equals_stock(name, base, tiny.LENGTHS)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_loading_leaves_the_random_state_alone(name):
    tiny.directory(name)
    before = torch.random.get_rng_state()
    tiny.load(name)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "limit", "word"), [("llama_dynamic", 256, "dynamic"), ("phi3_longrope", 64, "longrope")]
)
def test_batch_dependent_positions_are_limited(name, limit, word):
    base = tiny.load(name)
    assert base.info.max_positions == limit
    assert any(f"limited to {limit} tokens" in note and word in note for note in base.info.notes)
    assert_equals_stock(name, base, (60, 9))


def test_window_that_attention_is_not_told_of_limits_length():
    """Qwen2-MoE cuts its window in the mask alone: beyond 32 tokens our attention would see too much."""
    base = tiny.load("qwen2_moe_windowed")
    assert base.info.max_positions == 32
    assert any("limited to 32 tokens" in note for note in base.info.notes)
    assert_equals_stock("qwen2_moe_windowed", base, (32, 9))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/model", "there is no directory /nowhere/model"),
        ("./missing", "there is no directory missing"),
        ("/nowhere/model.gguf", r"there is no file /nowhere/model\.gguf"),
        (
            "not-on-any-hub/model",
            r"is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub; unset it, or run `hf",
        ),
    ],
)
def test_base_that_is_not_there(name, message):
    with pytest.raises(BaseModelError, match=message):
        load_base(name, device="cpu")


def test_a_directory_may_be_called_almost_as_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BaseModelError, match="did you mean 'smollm2'"):
        find_base("smollm3")
    (tmp_path / "smollm3").mkdir()
    (tmp_path / "smollm3" / "config.json").write_text("{}")
    assert find_base("smollm3") == ("smollm3", None)


def test_directory_without_config(tmp_path: Path):
    with pytest.raises(BaseModelError, match=r"has no config\.json"):
        load_base(str(tmp_path), device="cpu")


def test_directory_without_tokenizer(copy: Path):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BaseModelError, match=r"has no tokenizer; put tokenizer\.json"):
        load_base(str(copy), device="cpu")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A base that a test may spoil."""
    for file in tiny.directory("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def configure(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def test_damaged_weights(copy: Path):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BaseModelError, match="cannot be loaded"):
        load_base(str(copy), device="cpu")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"lacks weights .*: model\.layers\.1\.mlp\.up_proj\.weight; download all of its files again"),
        (
            torch.zeros(3, 4),
            r"in another shape: model\.layers\.1\.mlp\.up_proj\.weight; download all of its files again",
        ),
        (
            torch.full((96, 64), torch.nan),
            "transformers' own logits are not finite in float32; its weights are damaged",
        ),
    ],
    ids=["missing", "another shape", "not finite"],
)
def test_a_base_without_its_weights_is_refused(copy: Path, value: torch.Tensor | None, message: str):
    """They would be random numbers, others in every run."""
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    more = {} if value is None else {"model.layers.1.mlp.up_proj.weight": value}
    save_file(weights | more, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=message):
        load_base(str(copy), device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_hidden_layers": 3, "layer_types": None},
            r"lacks weights .*: model\.layers\.2\.\S+ and 8 more; download",
        ),
        ({"hidden_size": "big"}, "cannot be loaded: Validation error for field 'hidden_size'"),
        pytest.param(
            {"quantization_config": {"quant_method": "bitnet"}},
            r"is quantised \(bitnet\).* use the base that it was quantised from",
            marks=pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
        ),
    ],
    ids=["more layers", "no number", "quantised"],
)
def test_a_configuration_that_does_not_fit_is_told(copy: Path, fields: dict[str, Any], message: str):
    configure(copy, **fields)
    with pytest.raises(BaseModelError, match=message):
        load_base(str(copy), device="cpu")


def test_a_base_with_code_of_its_own_names_the_option_that_trusts_it(copy: Path):
    configure(
        copy, model_type="of_its_own", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    )
    (copy / "code.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(BaseModelError, match=r"Python code.*--trust-remote-code to"):
        load_base(str(copy), device="cpu")


@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a CUDA device")
def test_cuda_without_cuda():
    with pytest.raises(BaseModelError, match=r"torch sees no CUDA.*use `cpu` or `auto`"):
        load_base("small", device="cuda")


# --- the proof refuses what is wrong ----------------------------------------------------------------------------------


def attention_with_fault(fault: str) -> Any:
    """Motet's attention function with one mistake."""

    def wrong(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        if fault == "window":
            options["sliding_window"] = None
        if fault == "softcap":
            options["softcap"] = None
        output, nothing = motet_attention(module, query, key, value, mask, **options)
        if fault.startswith("leak"):  # what an additive mask does: a little of every row reaches every other
            output = output + float(fault.split()[1]) * value.mean()
        return output, nothing

    return wrong


def prove_with(name: str, wrapper: Any, arithmetic: Arithmetic | None = None) -> LoraModel:
    model = tiny.stock(name).requires_grad_(False)
    device = torch.device("cpu")
    return prove(lambda: wrapper(wrap(name, model, None, device)), model, name, tiny.BLOCK, arithmetic)


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, "window") for name in tiny.WINDOWED]
    + [("gemma2", "softcap"), ("llama", "leak 1e-1"), ("qwen3", "leak 1e-1")],
)
def test_proof_refuses_wrong_attention(name, fault):
    def wrapper(base: LoraModel) -> LoraModel:
        AttentionInterface.register("motet_wrong", attention_with_fault(fault))
        base.model.set_attn_implementation("motet_wrong")
        return base

    with pytest.raises(BaseModelError, match=r"differs? from transformers' own"):
        prove_with(name, wrapper)


def test_leak_below_the_tolerance_costs_exactness():
    def wrapper(base: LoraModel) -> LoraModel:
        AttentionInterface.register("motet_wrong", attention_with_fault("leak 1e-5"))
        base.model.set_attn_implementation("motet_wrong")
        return base

    base = prove_with("llama", wrapper)
    assert not base.info.exact
    assert "sequences packed together differ from each alone" in base.info.notes[0]


@pytest.mark.parametrize(("arithmetic", "many"), [(Arithmetic(), 64), (Arithmetic(rows=32, tile=32), 200)])
def test_a_pass_of_many_rows_that_differs_costs_exactness(arithmetic, many):
    """As a library's does that takes another kernel for them."""

    def wrapper(base: LoraModel) -> LoraModel:
        first = base.decoder.get_submodule("layers.0")
        first.register_forward_hook(lambda _, __, output: output * 1.0001 if output.shape[-2] > many else output)
        return base

    base = prove_with("llama", wrapper, arithmetic)
    assert "sequences packed together differ from each alone" in base.info.inexact
    assert base.info.notes == (base.info.inexact,)


class CutByRows(FrozenWeight):
    """Another kernel for as many rows as only training has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0001 if x.shape[-2] > 500 else 1)


def test_a_product_of_many_rows_that_differs_costs_exactness():
    def wrapper(base: LoraModel) -> LoraModel:
        fused = next(layer.fused for path, layer in base.linears.items() if path.endswith("o_proj"))
        fused.frozen = CutByRows(fused.frozen.weight, None)
        return base

    assert "products of many rows have other bits than products of few" in prove_with("llama", wrapper).info.inexact


def test_a_base_that_cannot_be_trained_is_refused_when_it_is_loaded():
    def fail(*_: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("no gradient comes through here\nmore of this")

    def wrapper(base: LoraModel) -> LoraModel:
        base.decoder.get_submodule("layers.1").register_forward_hook(fail)
        return base

    with pytest.raises(BaseModelError, match=r"cannot be trained:.*through here; take"):
        prove_with("llama", wrapper)


def as_a(kind: type[LoraModel], base: LoraModel) -> LoraModel:
    return kind(**{field.name: getattr(base, field.name) for field in fields(base) if field.init})


class Moody(FrozenWeight):
    """A weight whose products of many rows differ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found * 1.0001 if x.shape[-2] > 64 else found


class WithMoodyWeights(LoraModel):
    def compute_with(self, arithmetic: Arithmetic) -> None:
        super().compute_with(arithmetic)
        for layer in self.linears.values():
            layer.fused.frozen.__class__ = Moody


def test_the_weights_that_jobs_multiply_with_are_proved():
    """Fused, in tiles: not the linear layers that they were made of."""
    base = prove_with("llama", lambda base: as_a(WithMoodyWeights, base), Arithmetic(rows=16, tile=16))
    assert "sequences packed together differ from each alone" in base.info.inexact


class WithoutFinalCap(LoraModel):
    """A base that forgets the model's final soft-cap."""

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_ND, self.head.weight).float()


def test_proof_refuses_a_forgotten_final_cap():
    with pytest.raises(BaseModelError, match=r"differs? from transformers' own"):
        prove_with("gemma2", lambda base: as_a(WithoutFinalCap, base))


def test_proof_accepts_what_is_right():
    assert prove_with("gemma2", lambda base: base).info.exact


class Halved(nn.Linear):
    """Multiplies with another matrix than its weight, as quantised layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight / 2)


def test_a_layer_that_multiplies_in_a_way_of_its_own_stays_as_it_is():
    model = tiny.stock("llama").requires_grad_(False)
    model.model.layers[1].mlp.down_proj.__class__ = Halved
    base = prove(lambda: wrap("llama", model, None, torch.device("cpu")), model, "llama", tiny.BLOCK)
    assert "model.layers.1.mlp.down_proj" not in base.linears
    assert "model.layers.0.mlp.down_proj" in base.linears
    assert base.info.notes == ("Halved layers get no adapter, because they multiply in their own way",)


@pytest.mark.parametrize("arithmetic", [Arithmetic(), Arithmetic(rows=16, tile=16)], ids=["four rows", "tiles"])
def test_layers_that_see_other_rows_get_no_adapter(arithmetic):
    class OneByOne(nn.Module):
        """Calls a layer for one row at a time, as a router sends rows to experts."""

        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.linear(row[None]) for row in x[0]])[None]

    def wrapper(base: LoraModel) -> LoraModel:
        layer = base.decoder.get_submodule("layers.1.mlp")
        layer.down_proj = OneByOne(layer.down_proj)
        return base

    base = prove_with("llama", wrapper, arithmetic)
    assert "model.layers.1.mlp.down_proj" not in base.linears
    assert "model.layers.0.mlp.down_proj" in base.linears
    assert any("1 layers get no adapter" in note and "down_proj" in note for note in base.info.notes)


@pytest.mark.parametrize(("name", "differs"), [("qwen2", True), ("llama", False)])
def test_a_tokenizer_whose_rules_are_replaced_is_told(name: str, differs: bool, tmp_path: Path) -> None:
    """This file joins digits, and transformers splits them for one of these types of models."""
    source = tmp_path / name
    shutil.copytree(tiny.directory(name), source)
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    joins = Tokenizer(BPE(letters | {"31": 256}, [("3", "1")]))
    joins.pre_tokenizer, joins.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    joins.save(str(source / "tokenizer.json"))
    notes = [note for note in load_base(str(source), dtype="float32").info.notes if "tokenizer.json" in note]
    assert len(notes) == differs
    if differs:
        assert "as model_type is qwen2" in notes[0]
