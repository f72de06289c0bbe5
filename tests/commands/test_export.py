"""An adapter and its base as one model: loads in `transformers` and says what the adapter said."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from motet.commands.export import drafted, write
from motet.commands.merging import restated
from motet.core.errors import AdapterError, BaseModelError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from motet.model.find import SMALL_BASE
from motet.model.load import load_base
from tests.support import tiny_models as tiny
from tests.support.peft_files import close, peft_logits
from tests.support.peft_files import export as save
from tests.support.quantised_files import write_float8, write_mxfp4, write_nf4
from tests.support.small_disk import small_disk


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.25)])
def test_a_merged_model_says_what_base_and_adapter_say(
    adapter: Path, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    write(adapter, None, tmp_path / "merged", "merged", dtype, checked=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert str(merged.dtype) == f"torch.{dtype}"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = torch.tensor(tokenizer.encode("A motet has several voices, each with a text of its own."))
    stock = AutoModelForCausalLM.from_pretrained(SMALL_BASE, dtype=torch.float32)
    plain = peft_logits(stock, ids)
    expected = peft_logits(PeftModel.from_pretrained(stock, adapter), ids)
    gap = (peft_logits(merged, ids) - expected).abs().max()
    assert gap < tolerance
    assert (plain - expected).abs().max() > 4 * tolerance, "the adapter has an effect"


def test_nothing_stays_of_what_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new", tmp_path / "empty"):
        with contextlib.suppress(KeyboardInterrupt), drafted(target) as draft:
            (draft / "config.json").touch()
            assert [file.name for file in target.iterdir()] == [draft.name]
            raise KeyboardInterrupt
    assert [(item.name, list(item.iterdir())) for item in tmp_path.iterdir()] == [("empty", [])]


def test_a_full_disk_is_said_to_be_full(adapter: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(OSError, match="No space left") as full:
            write(adapter, None, disk / "merged", "merged", checked=False)
        assert full.value.errno == errno.ENOSPC
        assert not [*disk.iterdir()]


def test_what_cannot_be_merged_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(BaseModelError, match=r"is not empty; give a.*is not there yet"):
        write(adapter, None, tmp_path / "taken", "merged", "auto", checked=False)
    with pytest.raises(BaseModelError, match=r"Not a directory; give.*directory as --to"):
        write(adapter, None, adapter / ADAPTER_CONFIG / "merged", "merged", "auto", checked=False)
    with pytest.raises(BaseModelError, match="there is no directory"):
        write(adapter, "/not/there", tmp_path / "merged", "merged", "auto", checked=False)
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    for file in adapter.iterdir():
        (nameless / file.name).write_bytes(file.read_bytes())
    config = json.loads((nameless / ADAPTER_CONFIG).read_text())
    (nameless / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": ""}))
    with pytest.raises(AdapterError, match="give --base"):
        write(nameless, None, tmp_path / "merged", "merged", "auto", checked=False)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "model.embed_tokens.lora_embedding_A",
            "leave embeddings out of its training, or merge it with `merge_and_unload`",
        ),
        ("lm_head.weight", "only LoRA on linear layers and experts is merged here"),
        ("lm_head.lora_A.weight", r"is damaged: it has no tensor base_model.model.lm_head.lora_B.weight"),
    ],
)
def test_tensors_that_are_no_product_are_refused_before_a_base_is_looked_for(
    adapter: Path, name: str, why: str, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "foreign")
    weights = tmp_path / "foreign" / ADAPTER_WEIGHTS
    save_file({**load_file(weights), f"base_model.model.{name}": torch.ones(4, 4)}, weights)
    with pytest.raises(AdapterError, match=why):
        write(tmp_path / "foreign", "/not/there", tmp_path / "merged", "merged", "auto", checked=False)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_products_of_experts_are_merged(name: str, tmp_path: Path) -> None:
    base, ids, targets = tiny.base(name), tiny.tokens(12), ["q_proj", "experts"]
    weights = tiny.adapter(base, rank=3, targets=targets)
    save(tmp_path / "adapter", base, weights, targets)
    write(tmp_path / "adapter", str(tiny.directory(name)), tmp_path / "merged", "merged", checked=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert close(peft_logits(merged, ids), tiny.packed_logits(base, [(weights, ids)])[0], 1e-4)


@pytest.mark.parametrize(
    ("quantise", "targets"), [(write_nf4, ["q_proj"]), (write_float8, ["q_proj"]), (write_mxfp4, ["q_proj", "experts"])]
)
def test_a_quantised_base_is_merged_as_the_numbers_that_it_stands_for(
    quantise: Callable[[Path], None], targets: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "base"
    source.mkdir()
    quantise(source)
    base, ids = load_base(str(source), dtype="float32", base_format="unpacked"), tiny.tokens(12)
    weights = tiny.adapter(base, rank=3, targets=targets)
    save(tmp_path / "adapter", base, weights, targets)
    write(tmp_path / "adapter", str(source), tmp_path / "merged", "merged", "float32", checked=False)
    options: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **options)
    assert not any(loaded[1].values())
    assert close(peft_logits(loaded[0], ids), tiny.packed_logits(base, [(weights, ids)])[0], 1e-4)


OLD_WORDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float32"},
    "qwen3": {"rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "own": {"a": [1]}},
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "torch_dtype": "float32",
        "cache_implementation": "hybrid",
    },
}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", [*OLD_WORDS])
def test_a_merged_model_says_what_its_base_says_in_the_same_words(name: str, dtype: str, tmp_path: Path) -> None:
    source, merged, base = tmp_path / "base", tmp_path / "merged", tiny.base(name)
    shutil.copytree(tiny.directory(name), source)
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"transformers_version": "4.57.3", **OLD_WORDS[name]}
    if "torch_dtype" in config:
        del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.6, "own": 1}')
    save(tmp_path / "adapter", base, tiny.adapter(base, rank=3), "all-linear")
    write(tmp_path / "adapter", str(source), merged, "merged", dtype, checked=False)
    told = json.loads((merged / "config.json").read_text())
    weights_are = "float32" if dtype == "auto" else dtype
    dtypes = {key: weights_are for key in ("dtype", "torch_dtype") if key in config}
    wanted = {**config, **dtypes, "transformers_version": told["transformers_version"]}
    assert {key: told[key] for key in wanted} == wanted
    loaded, own = (AutoConfig.from_pretrained(place).to_dict() for place in (merged, source))
    same = [key for key in own if key not in ("dtype", "transformers_version", "_name_or_path", "torch_dtype")]
    assert {key: loaded[key] for key in same} == {key: own[key] for key in same}
    generation = json.loads((merged / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"], generation["own"]) == ([2], 0.6, 1)


@pytest.mark.parametrize(
    ("turned", "older"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}),
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_a_merged_model_of_a_base_in_new_words_says_the_older_ones(
    turned: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    """Readers of the older words alone would take 10,000 for the missing base, in silence."""
    name = "stablelm" if "partial_rotary_factor" in turned else "llama"
    config = {**json.loads((tiny.directory("llama") / "config.json").read_text()), "rope_parameters": turned}
    told = restated({"rope_parameters": turned}, config, None)
    assert {
        key: told.get(key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factor") if key in told
    } == older
    for place, whole in (("own", config), ("told", {**config, **told})):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps({**whole, "model_type": name}))
    own, loaded = (AutoConfig.from_pretrained(tmp_path / place).rope_parameters for place in ("own", "told"))
    assert loaded == own
    assert "rope_theta" not in restated({}, {"rope_parameters": {"full_attention": turned}}, None)


@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl"])
def test_a_base_that_sees_images_keeps_what_it_sees_with(name: str, tmp_path: Path) -> None:
    base, ids = tiny.base(name), tiny.tokens(12)
    weights, source = tiny.adapter(base, rank=3), tmp_path / "base"
    shutil.copytree(tiny.directory(name), source)
    (source / "preprocessor_config.json").write_text('{"size": 28}')
    save(tmp_path / "adapter", base, weights, "all-linear")
    write(tmp_path / "adapter", str(source), tmp_path / "merged", "merged", checked=False)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert close(peft_logits(merged, ids), tiny.packed_logits(base, [(weights, ids)])[0], 1e-4)
    stock, seen = tiny.stock(name).state_dict(), merged.state_dict()
    towers = [key for key in stock if "vision" in key or "visual" in key]
    assert towers
    assert all(torch.equal(stock[key], seen[key]) for key in towers)
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == '{"size": 28}'
