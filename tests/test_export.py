"""An adapter and its base as one model: loads in `transformers` and says what the adapter said."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from motet.commands.export import drafted, export, find_converter, write_gguf
from motet.errors import AdapterError, BaseModelError, ConfigError
from motet.model.find import SMALL_BASE
from motet.types import ADAPTER_CONFIG
from tests import tiny_models as tiny
from tests.peft_files import close, peft_logits, randomise
from tests.peft_files import export as save

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that changes what the small base says."""
    directory = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(SMALL_BASE, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # A is PEFT's own
        peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    randomise(peft)
    peft.save_pretrained(str(directory))
    return directory


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.25)])
def test_a_merged_model_says_what_base_and_adapter_say(
    adapter: Path, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    export(adapter, None, tmp_path / "merged", dtype)
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


def test_a_converter_writes_a_gguf_file_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for llama.cpp's; its own was tried by hand."""
    (tmp_path / "sorted").mkdir()
    (tmp_path / "convert.py").write_text("import sys; open(sys.argv[3], 'w').write(' '.join(sys.argv[1:]))")
    (tmp_path / "fails.py").write_text("raise SystemExit('one line\\nBPE pre-tokenizer was not recognized')")
    (tmp_path / "convert.py").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_converter("convert.py") == find_converter(str(tmp_path / "convert.py")) == str(tmp_path / "convert.py")
    written = write_gguf(tmp_path / "sorted", str(tmp_path / "convert.py"))
    assert written == tmp_path / "sorted" / "sorted.gguf"
    assert written.read_text() == f"{tmp_path / 'sorted'} --outfile {written.with_name('.tmp-sorted.gguf')}"
    assert [file.name for file in (tmp_path / "sorted").iterdir()] == ["sorted.gguf"]
    with pytest.raises(ConfigError, match=r"there is no such file, here or on PATH; it is convert_hf_to_gguf\.py"):
        find_converter("absent.py")
    written.unlink()
    with pytest.raises(BaseModelError, match="says: BPE pre-tokenizer was not recognized"):
        write_gguf(tmp_path / "sorted", str(tmp_path / "fails.py"))


def test_nothing_stays_of_what_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new", tmp_path / "empty"):
        with contextlib.suppress(KeyboardInterrupt), drafted(target) as draft:
            (draft / "config.json").touch()
            assert [file.name for file in target.iterdir()] == [draft.name]
            raise KeyboardInterrupt
    assert [(item.name, list(item.iterdir())) for item in tmp_path.iterdir()] == [("empty", [])]


def test_what_cannot_be_merged_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(BaseModelError, match="is not empty; give a directory that is not there yet"):
        export(adapter, None, tmp_path / "taken", "auto")
    with pytest.raises(BaseModelError, match="Not a directory; give another directory as --to"):
        export(adapter, None, adapter / ADAPTER_CONFIG / "merged", "auto")
    with pytest.raises(BaseModelError, match="there is no directory"):
        export(adapter, "/not/there", tmp_path / "merged", "auto")
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    for file in adapter.iterdir():
        (nameless / file.name).write_bytes(file.read_bytes())
    config = json.loads((nameless / ADAPTER_CONFIG).read_text())
    (nameless / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": ""}))
    with pytest.raises(AdapterError, match="give --base"):
        export(nameless, None, tmp_path / "merged", "auto")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_products_of_experts_are_merged(name: str, tmp_path: Path) -> None:
    base, ids, targets = tiny.base(name), tiny.tokens(12), ["q_proj", "experts"]
    weights = tiny.adapter(base, rank=3, targets=targets)
    save(tmp_path / "adapter", base, weights, targets)
    export(tmp_path / "adapter", str(tiny.directory(name)), tmp_path / "merged", "auto")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert close(peft_logits(merged, ids), tiny.packed_logits(base, [(weights, ids)])[0], 1e-4)


@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl"])
def test_a_base_that_sees_images_keeps_what_it_sees_with(name: str, tmp_path: Path) -> None:
    base, ids = tiny.base(name), tiny.tokens(12)
    weights, source = tiny.adapter(base, rank=3), tmp_path / "base"
    shutil.copytree(tiny.directory(name), source)
    (source / "preprocessor_config.json").write_text('{"size": 28}')
    save(tmp_path / "adapter", base, weights, "all-linear")
    export(tmp_path / "adapter", str(source), tmp_path / "merged", "auto")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert close(peft_logits(merged, ids), tiny.packed_logits(base, [(weights, ids)])[0], 1e-4)
    stock, seen = tiny.stock(name).state_dict(), merged.state_dict()
    towers = [key for key in stock if "vision" in key or "visual" in key]
    assert towers
    assert all(torch.equal(stock[key], seen[key]) for key in towers)
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == '{"size": 28}'
