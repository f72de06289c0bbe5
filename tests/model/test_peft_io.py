"""What Motet writes, `peft` reads, and the other way round; whatever is not a plain LoRA is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from motet.config import AdapterConfig
from motet.config.chain import shape_of, unlike
from motet.core.errors import AdapterError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from motet.model.load import load_base
from motet.model.peft_io import examine, read_adapter
from motet.runtime.reference import shape_of as reference_shape
from motet.training.torch_trainer import TorchTrainer
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.peft_files import close, export, load, peft_logits, randomise

pytestmark = pytest.mark.tier1

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
NAMES = (*tiny.DENSE, "mixtral")
ATTENTION = ["q_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj"]


@pytest.mark.parametrize("name", ["llama", "phi3", "minicpm3", "qwen2_moe"])  # every family: test_bases.py
def test_peft_computes_what_motet_exported(name, tmp_path):
    base, ids = tiny.base(name), tiny.tokens(37)
    weights = tiny.adapter(base, rank=4, alpha=10, seed=3)
    export(tmp_path, base, weights, "all-linear")
    peft = PeftModel.from_pretrained(tiny.stock(name), tmp_path)
    assert sum("lora_A" in key for key, _ in peft.named_parameters()) == len(base.linears), "no layer more, none fewer"
    ours, theirs = tiny.packed_logits(base, [(weights, ids)])[0], peft_logits(peft, ids)
    assert close(ours, theirs, 1e-5)
    assert not close(ours, tiny.packed_logits(base, [(None, ids)])[0], 1e-2), "the adapter has an effect"
    assert torch.equal(load(tmp_path, base).flat, weights.flat)


@pytest.mark.parametrize("name", few(NAMES, "llama", "phi3", "minicpm3"))
def test_motet_computes_what_peft_saved(name, tmp_path):
    base, ids = tiny.base(name), tiny.tokens(37)
    leaves = {path.rsplit(".", 1)[-1] for path in base.linears}
    config = LoraConfig(r=4, lora_alpha=6, target_modules=[leaf for leaf in ATTENTION if leaf in leaves])
    peft = get_peft_model(tiny.stock(name), config)
    randomise(peft)
    peft.save_pretrained(tmp_path)
    assert close(tiny.packed_logits(base, [(load(tmp_path, base), ids)])[0], peft_logits(peft, ids), 1e-5)


PARTIAL: dict[str, tuple[dict[str, Any], set[str]]] = {
    "pattern": ({"target_modules": r".*layers\.\d\.self_attn\.(q|v)_proj"}, {"q_proj", "v_proj"}),
    "layers": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, {"q_proj"}),
    "exclude": (
        {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*\.0\.self_attn\.o_proj"},
        {"q_proj", "o_proj"},
    ),
    "paths": ({"target_modules": ["model.layers.1.mlp.up_proj"]}, {"up_proj"}),
}


@pytest.mark.parametrize("kind", [*PARTIAL])
def test_targets_are_those_of_the_tensors(kind, tmp_path):
    """Told without the base, told by the base, and taken as a start and as a reference."""
    (fields, names), base, ids = PARTIAL[kind], tiny.base("llama"), tiny.tokens(20)
    peft = get_peft_model(tiny.stock("llama"), LoraConfig(r=2, lora_alpha=6, **fields))
    randomise(peft)
    peft.save_pretrained(tmp_path)
    layers = {
        name.partition(".lora_")[0].removeprefix("base_model.model.") for name in load_file(tmp_path / ADAPTER_WEIGHTS)
    }
    told, record = shape_of(tmp_path), examine(base, tmp_path)
    for targets in (told["target_modules"], record.target_modules, reference_shape(tmp_path).target_modules):
        assert {*base.info.adapted(targets)} == layers
    assert {path.rpartition(".")[2] for path in layers} == names
    trainer = TorchTrainer(base, slots=1)
    trainer.add_adapter("a", AdapterConfig(**told), 0)
    trainer.load_adapter("a", tmp_path, optimizer=False)
    assert close(tiny.packed_logits(base, [(load(tmp_path, base), ids)])[0], peft_logits(peft, ids), 1e-5)
    job = AdapterConfig(rank=2, alpha=6, target_modules=sorted(names))
    assert unlike(job, told) == ""
    assert "target_modules" in unlike(AdapterConfig(rank=2, alpha=6, target_modules=[*names, "k_proj"]), told)


@pytest.mark.parametrize(
    ("old", "new"),
    [("base_model.model.", ""), ("base_model.model.model.", "base_model.model."), (".weight", ".default.weight")],
)
def test_tensors_that_peft_names_otherwise_are_told_by_the_names(old, new, plain):
    def renamed(tensors):
        for name in list(tensors):
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    edit_tensors(plain, renamed)
    wrong = r"has other names of tensors than peft gives them: \S+ is base_model\.model\.model\.layers\.0\.\S+\.weight there"
    with pytest.raises(AdapterError, match=wrong):
        examine(tiny.base("llama"), plain)


def test_all_linear_of_peft_is_all_linear_of_motet(tmp_path):
    base, ids = tiny.base("llama"), tiny.tokens(20)
    peft = get_peft_model(tiny.stock("llama"), LoraConfig(r=2, lora_alpha=2, target_modules="all-linear"))
    randomise(peft)
    peft.save_pretrained(tmp_path)
    weights = load(tmp_path, base)
    assert len(weights.layout.places) == len(base.linears)
    assert close(tiny.packed_logits(base, [(weights, ids)])[0], peft_logits(peft, ids), 1e-5)


@pytest.mark.parametrize("targets", ["q_proj", ["q_proj", "up_proj"], ["layers.1.mlp.up_proj"]])
def test_targets_as_written_mean_the_same_to_peft(targets, tmp_path):
    base, ids = tiny.base("llama"), tiny.tokens(20)
    weights = tiny.adapter(base, rank=4, targets=targets)
    export(tmp_path, base, weights, targets)
    peft = PeftModel.from_pretrained(tiny.stock("llama"), tmp_path)
    assert close(tiny.packed_logits(base, [(weights, ids)])[0], peft_logits(peft, ids), 1e-5)
    assert torch.equal(load(tmp_path, base).flat, weights.flat)


@pytest.mark.soak
@pytest.mark.smollm2
def test_smollm2_with_peft(smollm2_dir, tmp_path):
    base = load_base("smollm2", dtype="float32", device="cpu", block_size=64)
    weights = tiny.adapter(base, rank=8, alpha=16, seed=1, scale=0.02)
    export(tmp_path, base, weights, "all-linear")
    ids = torch.tensor(base.info.tokenizer.encode("Motet: a piece for several voices, each with its own text. " * 4))
    stock = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, attn_implementation="eager")
    plain = peft_logits(stock, ids)
    theirs = peft_logits(PeftModel.from_pretrained(stock, tmp_path), ids)
    assert not close(theirs, plain, 1e-2)
    assert close(tiny.packed_logits(base, [(weights, ids)])[0], theirs, 1e-4)


def test_files_are_the_same_bytes_every_time(tmp_path):
    base = tiny.base("llama")
    weights = tiny.adapter(base)
    export(tmp_path / "a", base, weights, "all-linear")
    export(tmp_path / "b", base, weights, "all-linear")
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    config = json.loads((tmp_path / "a" / ADAPTER_CONFIG).read_text())
    assert list(config) == sorted(config)
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def test_half_precision_tensors_are_read_as_fp32(tmp_path):
    base = tiny.base("llama")
    weights = tiny.adapter(base)
    export(tmp_path, base, weights, "all-linear")
    save_file(
        {key: tensor.bfloat16() for key, tensor in load_file(tmp_path / ADAPTER_WEIGHTS).items()},
        tmp_path / ADAPTER_WEIGHTS,
    )
    assert torch.equal(load(tmp_path, base).flat, weights.flat.bfloat16().float())


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED_FIELDS: dict[str, tuple[Any, str]] = {
    "use_dora": (True, "DoRA"),
    "use_rslora": (True, "rank-stabilised"),
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "rank_pattern": ({"q_proj": 2}, "rank_pattern"),
    "alpha_pattern": ({"q_proj": 2}, "alpha_pattern"),
    "bias": ("all", "biases"),
    "lora_bias": (True, "lora_bias"),
    "trainable_token_indices": ([1], "trained tokens"),
    "layer_replication": ([[0, 2]], "layer replication"),
    "use_bdlora": ({"nblocks": 2}, "BD-LoRA"),
    "monteclora_config": ({"mc_samples": 2}, "MonteCLoRA"),
    "velora_config": ({"rank": 2}, "VeLoRA"),
    "kasa_config": ({"beta": 1}, "KaSA"),
    "init_lora_weights": ("pissa_niter_4", "pissa_niter_4"),
    "peft_type": ("IA3", "IA3 adapter"),
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A directory that loads."""
    base = tiny.base("llama")
    export(tmp_path / "plain", base, tiny.adapter(base, rank=4), "all-linear")
    assert load(tmp_path / "plain", base).layout.rank == 4
    return tmp_path / "plain"


def edit_config(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / ADAPTER_CONFIG).read_text()) | fields
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / ADAPTER_WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / ADAPTER_WEIGHTS)


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_other_kinds_of_adapter_are_refused_by_name(field, plain):
    value, named = REFUSED_FIELDS[field]
    edit_config(plain, **{field: value})
    with pytest.raises(AdapterError, match=named):
        read_adapter(plain)


@pytest.mark.parametrize("init", ["pissa", "olora", "loftq", "corda", "lora_ga"])
def test_initialisations_that_change_the_base_are_refused(init, plain):
    edit_config(plain, init_lora_weights=init)
    with pytest.raises(AdapterError, match=f"{init}.*changes the base"):
        read_adapter(plain)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "orthogonal"])
def test_initialisations_that_leave_the_base_alone_are_read(init, plain):
    edit_config(plain, init_lora_weights=init)
    assert read_adapter(plain).rank == 4


def test_what_peft_itself_writes_is_refused_where_it_is_not_plain(tmp_path):
    get_peft_model(tiny.stock("llama"), LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "dora"
    )
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    get_peft_model(tiny.stock("llama"), ia3).save_pretrained(tmp_path / "ia3")
    olora = LoraConfig(r=2, init_lora_weights="olora", target_modules=["q_proj"])
    get_peft_model(tiny.stock("llama"), olora).save_pretrained(tmp_path / "olora")
    for kind, named in {"dora": "DoRA", "ia3": "IA3", "olora": "olora"}.items():
        with pytest.raises(AdapterError, match=named):
            read_adapter(tmp_path / kind)


def test_missing_and_damaged_files(plain, tmp_path):
    with pytest.raises(AdapterError, match=r"there is no directory .*nowhere"):
        read_adapter(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterError, match=rf"has no {ADAPTER_CONFIG}"):
        read_adapter(tmp_path / "empty")
    (plain / ADAPTER_WEIGHTS).write_bytes((plain / ADAPTER_WEIGHTS).read_bytes()[:-10])
    with pytest.raises(AdapterError, match=rf"{ADAPTER_WEIGHTS} is damaged"):
        read_adapter(plain)
    (plain / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=rf"has no {ADAPTER_WEIGHTS}$"):
        read_adapter(plain)
    (plain / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(AdapterError, match=r"a pickle is not read;.*it as safetensors"):
        read_adapter(plain)


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_config_that_is_not_an_object(text, plain):
    (plain / ADAPTER_CONFIG).write_text(text)
    with pytest.raises(AdapterError, match=r"is not JSON|is not a JSON object"):
        read_adapter(plain)


@pytest.mark.parametrize(
    "fields",
    [{"r": 0}, {"r": "x"}, {"r": None}, {"lora_alpha": "y"}, {"lora_alpha": None}, {"lora_alpha": float("nan")}],
)
def test_numbers_that_are_none(fields, plain):
    edit_config(plain, **fields)
    with pytest.raises(AdapterError, match=r"r=.* and lora_alpha=.*"):
        read_adapter(plain)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SHAPE = r"has shape \(4, 63\), the base needs \(4, 64\)"
TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(FIRST), f"has no tensor {FIRST}"),
    "unexpected": (lambda tensors: tensors.update(stranger=torch.ones(1)), "nothing asks for: stranger"),
    "shape": (lambda tensors: tensors.update({FIRST: torch.ones(4, 63)}), f"{FIRST} {SHAPE}"),
    "nan": (lambda tensors: tensors[FIRST].view(-1)[5].fill_(float("nan")), f"{FIRST} has values that are not finite"),
    "inf": (lambda tensors: tensors[FIRST].view(-1)[5].fill_(float("inf")), f"{FIRST} has values that are not finite"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_are_named(fault, plain):
    edit, message = TENSOR_FAULTS[fault]
    edit_tensors(plain, edit)
    with pytest.raises(AdapterError, match=message):
        load(plain, tiny.base("llama"))


def test_adapter_of_another_base(tmp_path):
    base = tiny.base("llama")
    export(tmp_path, base, tiny.adapter(base), "all-linear")
    edit_tensors(
        tmp_path,
        lambda tensors: [tensors.update({key.replace("layers", "blocks"): tensors.pop(key)}) for key in list(tensors)],
    )
    with pytest.raises(AdapterError, match=r"28 tensors fits.*llama; it was.*llama$"):
        load(tmp_path, base)


def test_tensors_that_do_not_fit_come_with_the_base_they_were_trained_on(plain):
    edit_config(plain, base_model_name_or_path="some/other-base")
    for fault in ("missing", "unexpected", "shape"):
        edit, message = TENSOR_FAULTS[fault]
        before = (plain / ADAPTER_WEIGHTS).read_bytes()
        edit_tensors(plain, edit)
        with pytest.raises(AdapterError, match=f"{message}.*it was trained on some/other-base"):
            load(plain, tiny.base("llama"))
        (plain / ADAPTER_WEIGHTS).write_bytes(before)


def test_start_from_a_directory_checks_rank_alpha_and_targets(plain):
    base = tiny.base("llama")

    def start(**shape: Any) -> None:
        trainer = TorchTrainer(base, slots=1)
        trainer.add_adapter("a", AdapterConfig(**{"rank": 4, "alpha": 16, **shape}), 0)
        trainer.load_adapter("a", plain, optimizer=False)
        assert torch.equal(trainer.weights("a").flat, load(plain, base).flat)

    start()
    with pytest.raises(AdapterError, match=r"has rank 4, the job.*adapter\.rank to 4"):
        start(rank=8)
    with pytest.raises(AdapterError, match=r"has alpha 16, the.*adapter\.alpha to 16"):
        start(alpha=4)
    with pytest.raises(AdapterError, match=r"that nothing asks for:.*mlp\.down_proj"):
        start(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


def test_a_file_of_more_tensors_than_any_adapter_has_is_not_loaded(plain):
    """However little each takes: two megabytes name so many, and what loads them keeps an object for each."""
    entries = ",".join(
        f'"{number:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(2**17 + 1)
    )
    text = f"{{{entries}}}".encode()
    (plain / ADAPTER_WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(AdapterError, match="names more than 131072 tensors"):
        read_adapter(plain)


@pytest.mark.parametrize(
    ("n", "words"), [(5000, "names 5000 tensors, and no adapter of .* has more than 4096"), (9, "none")]
)
def test_a_file_of_more_tensors_than_the_base_can_have_is_not_read(tmp_path, n, words):
    save_file({f"{number}": torch.zeros(0) for number in range(n)}, tmp_path / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=words):
        examine(tiny.base("llama"), tmp_path)
