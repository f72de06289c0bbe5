"""Each export is loaded by its consumer, and one that computes something else is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench.speed import envs
from peft import AutoPeftModelForCausalLM, PeftModel
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import motet
from motet.commands import export
from motet.commands.export_apart import pre_tokenizer, read_model
from motet.commands.export_check import ASKED, Loaded, apart, ask, check, compare, known_ids, written_here
from motet.commands.export_gguf import _convert, converter, modelfile_template
from motet.commands.merging import ExportSource
from motet.commands.probe import TEXTS, logprobs_here
from motet.commands.verify import verify
from motet.config import JobConfig
from motet.core.errors import AdapterError, BaseModelError, ConfigError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINED_CONFIG
from motet.model.find import SMALL_BASE
from tests.support.peft_files import save_random
from tests.support.speaking_bases import SPEAKERS

CODER = SPEAKERS["qwen3_coder"].template
PRINTS = CODER.replace("value if value is string else (value | tojson)", "value")  # arguments of calls without `tojson`
PRINTED = "\"['Ann', 'Bo']\" is 'AnnBo' there, 'None' is '' there"
OTHERWISE = "note: llama.cpp writes a chat with tools otherwise than the prompts of training:"
Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def ours(adapter: Path):
    """Tokens of the built-in texts, and logprobs of base and adapter."""
    return asyncio.run(logprobs_here(str(SMALL_BASE), [adapter], lambda _: TEXTS, "float32", 32))


def compared(ours, place: Path, base: Path = SMALL_BASE) -> str:
    token_ids, here = ours
    texts, ids = list(token_ids), [one.tolist() for one in token_ids.values()]
    answer = read_model(texts, ids, range(1024), str(base), str(place))
    return compare(Loaded("peft", base, place), token_ids, tuple(here.values()), answer)


def without_scaling(tensors: Tensors, config: Json) -> None:
    config["lora_alpha"] = config["r"]


def with_cut_rank(tensors: Tensors, config: Json) -> None:
    config["lora_alpha"] *= (config["r"] - 1) / config["r"]
    config["r"] -= 1
    for name, tensor in tensors.items():
        tensors[name] = (tensor[:-1] if "lora_A" in name else tensor[:, :-1]).contiguous()


def with_transposed_b(tensors: Tensors, config: Json) -> None:
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensors[name] = tensor.t().contiguous().reshape(tensor.shape)


def without_a_layer(tensors: Tensors, config: Json) -> None:
    tensors[next(name for name in tensors if "lora_B" in name)].zero_()


def silent(tensors: Tensors, config: Json) -> None:
    for name in tensors:
        tensors[name].zero_()


FAULTS: dict[Callable[[Tensors, Json], None], str] = {
    without_scaling: "is not what was trained",
    with_cut_rank: "is not what was trained",
    with_transposed_b: "is not what was trained",
    without_a_layer: "is not what was trained",
    silent: "it answers as the base does",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_export_is_refused(ours, adapter: Path, fault, tmp_path: Path) -> None:
    tensors, config = load_file(adapter / ADAPTER_WEIGHTS), json.loads((adapter / ADAPTER_CONFIG).read_text())
    fault(tensors, config)
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=FAULTS[fault]):
        compared(ours, tmp_path)


def test_a_tensor_that_is_left_out_is_refused(ours, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    shutil.copyfile(adapter / ADAPTER_CONFIG, tmp_path / ADAPTER_CONFIG)
    with pytest.warns(UserWarning, match="missing adapter keys"), pytest.raises(AdapterError, match="is not what was"):
        compared(ours, tmp_path)


def test_another_base_or_adapter_is_refused(ours, adapter: Path, tmp_path: Path) -> None:
    assert compared(ours, adapter).startswith("checked with peft")
    save_random(tmp_path / "other", seed=1)
    with pytest.raises(AdapterError, match="is not what was trained"):
        compared(ours, tmp_path / "other")
    base = shutil.copytree(SMALL_BASE, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(AdapterError, match="is not what was trained"):
        compared(ours, adapter, base)


def test_other_tokens_are_refused(ours) -> None:
    token_ids, here = ours
    ids = [one.tolist() for one in token_ids.values()]
    ids[1][3] += 1
    with pytest.raises(AdapterError, match=r"makes other tokens.*'Sort these letters"):
        compare(Loaded("llama.cpp", SMALL_BASE), token_ids, tuple(here.values()), {"tokens": ids, "logprobs": []})


def test_an_adapter_that_changes_nothing_is_not_told_from_its_base(ours) -> None:
    token_ids, here = ours
    base = here[""]
    logprobs, first = [], 0
    for ids in token_ids.values():
        logprobs.append(base[first : first + len(ids) - 1])
        first += len(ids) - 1
    answer = {"tokens": [one.tolist() for one in token_ids.values()], "logprobs": logprobs}
    said = compare(Loaded("peft", SMALL_BASE), token_ids, (base, base), answer)
    assert said.endswith("the adapter changes too little here to tell it from its base")


def test_what_is_refused_leaves_nothing(adapter: Path, tmp_path: Path, capsys) -> None:
    def forgets(source: ExportSource, target: Path) -> Loaded:
        loaded = export.peft(source, target)
        config = json.loads((target / ADAPTER_CONFIG).read_text())
        (target / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": config["r"]}))
        return loaded

    with pytest.raises(AdapterError, match=r"the export is not.*so nothing is written"):
        export.write_as(export.Format(forgets, "peft"), ExportSource(adapter), tmp_path / "wrong")
    assert not list(tmp_path.iterdir())
    export.write(adapter, None, tmp_path / "right", "peft", checked=False)
    assert "not checked: because of --unchecked" in capsys.readouterr().err
    assert {file.name for file in (tmp_path / "right").iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}


@pytest.mark.parametrize(
    ("field", "value"), [("use_rslora", True), ("alpha_pattern", {"q_proj": 1}), ("use_dora", True)]
)
def test_what_a_converter_drops_is_not_given_to_it(field: str, value: Any, adapter: Path, tmp_path: Path) -> None:
    """llama.cpp's knows neither: its file would act at another strength, and nobody would say so."""
    odd = shutil.copytree(adapter, tmp_path / "odd")
    config = json.loads((odd / ADAPTER_CONFIG).read_text())
    (odd / ADAPTER_CONFIG).write_text(json.dumps({**config, field: value}))
    with pytest.raises(AdapterError, match="which Motet does not train"):
        export.write(odd, str(SMALL_BASE), tmp_path / "gguf", "gguf-adapter", checked=False)
    assert not (tmp_path / "gguf").exists()


def test_the_strength_that_a_consumer_does_not_read_is_said(adapter: Path, tmp_path: Path, capsys) -> None:
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    even = shutil.copytree(adapter, tmp_path / "even")
    (even / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": config["r"]}))
    strength, said = config["lora_alpha"] / config["r"], {}
    for form, source in (("card", adapter), ("peft", adapter), ("even", even)):
        export.write(source, None, tmp_path / form / "to", form.replace("even", "peft"), checked=False)
        said[form] = (
            f"OpenVINO GenAI reads no alpha and rank: give its AdapterConfig alpha={strength:g}"
            in capsys.readouterr().err
        )
    assert said == {"card": True, "peft": True, "even": False}


@pytest.mark.parametrize(("names", "whole"), [(("v4", "v40"), False), (("@sort-v4@", "@sort-v40@"), True)])
def test_adapters_in_one_model_of_peft_keep_apart_by_the_names_of_the_page(
    names: tuple[str, str], whole: bool, adapter: Path, tmp_path: Path
) -> None:
    """peft looks for a name anywhere in the names of tensors, so `v4` takes `v40` with it."""
    save_random(tmp_path / "later", seed=1)
    stock = AutoModelForCausalLM.from_pretrained(SMALL_BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(stock, str(adapter), adapter_name=names[0])
    model.load_adapter(str(tmp_path / "later"), adapter_name=names[1])
    hotswap_adapter(model, str(adapter), adapter_name=names[0])
    model.save_pretrained(str(tmp_path / "saved"))
    kept = load_file(tmp_path / "saved" / names[1] / ADAPTER_WEIGHTS)
    wanted = load_file(tmp_path / "later" / ADAPTER_WEIGHTS)
    assert all(torch.equal(kept[name], tensor) for name, tensor in wanted.items()) is whole


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of a short run on the small base."""
    run = tmp_path_factory.mktemp("run")
    algorithm = {"type": "grpo", "group_size": 4, "groups_per_step": 2}
    (run / "rewards.py").write_text("def own(problem, completion, *, key, most):\n    return len(key) / most\n")
    own = {"name": f"{run / 'rewards.py'}:own", "args": {"key": "hush", "most": 9}}
    rewards = ["exact", {"name": "length", "weight": 0.2, "args": {"target": 3}}, own]
    job = {"name": "sort", "data": {"source": "toy:sort_letters", "size": 64}, "reward": rewards, "steps": 1}
    fixed = {"algorithm": algorithm, "eval": {"every": 1}, "optimizer": {"lr": 0.002}}
    motet.run([{**job, **fixed}], base="small", directory=run)
    return run / "sort" / "versions" / "v1"


def test_a_base_that_the_receipt_does_not_name_is_refused(version: Path, tmp_path: Path) -> None:
    base = shutil.copytree(SMALL_BASE, tmp_path / "base")
    (base / "tokenizer_config.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"of.*is not the file.*give its own base"):
        check(Loaded("peft", base, version), version, str(base))


def test_an_export_is_verified_by_its_receipt(
    version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export.write(version, str(SMALL_BASE), tmp_path / "card", "card", checked=False)
    export.write(tmp_path / "card", str(SMALL_BASE), tmp_path / "again", "peft", checked=False)
    assert verify(tmp_path / "again") == 0, "an export of an export"
    capsys.readouterr()
    assert verify(tmp_path / "card") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not checked: README.md, curves.svg (the receipt does not name them)" in said
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    copy = shutil.copytree(SMALL_BASE, tmp_path / "cache/SmolLM2-135M-Instruct")
    expanded = {**json.loads((copy / "config.json").read_text()), "_model_name_or_path": "x"}
    (copy / "config.json").write_text(json.dumps(expanded))
    export.write(version, "smollm2", tmp_path / "short", "card", checked=False)
    assert "expanded from four bits" in capsys.readouterr().err
    assert "expanded from four bits" in (tmp_path / "short/README.md").read_text()
    assert verify(tmp_path / "short") == 0
    capsys.readouterr()
    config = tmp_path / "card" / ADAPTER_CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 99}))
    assert verify(tmp_path / "card") == 1
    assert "adapter_config.json is not what was exported" in " ".join(capsys.readouterr().out.split())


def test_a_card_says_how_an_adapter_was_made_and_how_good_it_is(version: Path, tmp_path: Path) -> None:
    export.write(version, None, tmp_path / "card", "card", checked=False)
    files = {file.name for file in (tmp_path / "card").iterdir()}
    assert files == {"README.md", "curves.svg", "receipt.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINED_CONFIG}
    text = (tmp_path / "card" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["lora", "reinforcement-learning", "motet"],
    }
    settings = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    job = JobConfig.model_validate(settings["jobs"][0])
    assert (settings["base"], job.name, job.steps) == ("small", "sort", 1)
    assert job.seed is not None
    assert job.rewards[1].args == {"target": 3}  # as the record of the run says; the receipt has its sum only
    assert job.rewards[2].args["most"] == 9
    assert re.fullmatch(r"sha256:[0-9a-f]+", str(job.rewards[2].args["key"]))
    assert "hush" not in text
    (version.parent.parent / "job.yaml").rename(version.parent.parent / "away.yaml")
    export.write(version, None, tmp_path / "without", "card", checked=False)
    (version.parent.parent / "away.yaml").rename(version.parent.parent / "job.yaml")
    assert "target: sha256:" in (tmp_path / "without" / "README.md").read_text()
    assert "may give other bytes" not in body
    for part in ("![Curves](curves.svg)", "| v0 | 0.", "| v1 | 0.", "| base/model.safetensors | `", "| data/train | `"):
        assert part in body, part


def test_a_card_says_why_bytes_may_not_come_out_again(tmp_path: Path) -> None:
    algorithm = {"type": "grpo", "group_size": 4, "groups_per_step": 2, "over_provision": 2}
    job = {"name": "sort", "data": {"source": "toy:sort_letters", "size": 64}, "reward": "exact", "steps": 1}
    motet.run([{**job, "algorithm": algorithm}], base="small", directory=tmp_path / "run")
    export.write(tmp_path / "run/sort/versions/v1", None, tmp_path / "card", "card", checked=False)
    text = (tmp_path / "card" / "README.md").read_text()
    assert "Training it again may give other bytes: steps take the groups that are done first" in text


def test_an_adapter_in_the_present_directory_is_not_taken_for_its_base(
    ours, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapter)
    _, here = asyncio.run(logprobs_here(str(SMALL_BASE), [Path()], lambda _: TEXTS, "float32", 32))
    assert list(here) == ["", adapter.name]
    assert all((here[name] == ours[1][name]).all() for name in here)


def test_peft_finds_the_base_of_an_export(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a name of Motet's own, nor by a path that only the directory of the export knows."""
    snapshot = shutil.copytree(SMALL_BASE, tmp_path / "hub/models--team--tiny-base/snapshots/0123")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SMALL_BASE, "near")
    named = {}
    for place, base in enumerate(("small", "near", str(snapshot))):
        export.write(adapter, base, tmp_path / f"{place}", "peft", checked=False)
        named[base] = json.loads((tmp_path / f"{place}" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    assert named == {"small": str(SMALL_BASE), "near": str(tmp_path / "near"), str(snapshot): "team/tiny-base"}
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    shutil.copytree(SMALL_BASE, tmp_path / "cache/SmolLM2-135M-Instruct")
    for place, base in enumerate(("smollm2", str(tmp_path / "cache/SmolLM2-135M-Instruct"))):
        export.write(adapter, base, tmp_path / f"short-{place}", "card", checked=False)
        config = json.loads((tmp_path / f"short-{place}" / ADAPTER_CONFIG).read_text())
        assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / f"short-{place}/README.md").read_text()
    monkeypatch.chdir("/")
    assert type(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "0")).__name__ == "PeftModelForCausalLM"


def test_a_chat_template_becomes_one_of_ollama() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMALL_BASE)
    ours = (
        'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n<|im_start|>assistant\n'
        '{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n{{ end }}{{ end }}"""'
    )
    assert modelfile_template(tokenizer) == [ours]
    template = tokenizer.chat_template
    preset = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    tokenizer.chat_template = preset + template
    assert modelfile_template(tokenizer)[1] == 'SYSTEM """Be brief."""'
    for other in (
        "{{ raise_exception('no system prompt') if messages[0]['role'] == 'system' }}" + template,
        template.replace("message['content']", "message['content'][::-1]"),
        template.replace("<|im_end|>", '"""'),
        "{{ messages|length }}" + template,
    ):
        tokenizer.chat_template = other
        assert [line[0] for line in modelfile_template(tokenizer)] == ["#"], other
    tokenizer.chat_template = None
    assert modelfile_template(tokenizer)[1] == 'TEMPLATE """{{ .Prompt }}"""'


def test_a_tokenizer_is_named_by_how_it_splits() -> None:
    own = json.loads((SMALL_BASE / "tokenizer.json").read_text())
    assert pre_tokenizer(own) == "smollm"
    last = own["pre_tokenizer"]["pretokenizers"][-1]
    assert pre_tokenizer({"pre_tokenizer": last}) == "gpt-2"
    for other in ({**last, "use_regex": False}, {"type": "Metaspace"}, None):
        assert pre_tokenizer({"pre_tokenizer": other}) is None
    assert pre_tokenizer({"pre_tokenizer": last, "normalizer": {"type": "NFC"}}) is None


def test_a_converter_is_looked_for_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no-such\.py is not.*or put a checkout"):
        converter("no-such.py")
    (tmp_path / "convert.py").write_text("")
    (tmp_path / "convert.py").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert converter("convert.py") == tmp_path / "convert.py"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Loaded, dict[str, Any]]:
    """A model for llama.cpp's stand-in. Whatever comes before, half a letter is likely next; an id without a token too."""
    support = Path(__file__).parents[1] / "support" / "llama_cpp"
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)
    vocabulary = json.loads((SMALL_BASE / "tokenizer.json").read_text())["model"]["vocab"]
    half, generator = vocabulary["ð"], torch.manual_seed(0)
    logits_NV = torch.randn(1024, 1030, generator=generator, dtype=torch.float64)
    logits_NV[:, half] += 9
    logits_NV[:, 1024:] -= 20
    logits_NV[::2, 1027] += 30
    logits_NV[7, 1027] = 2000
    log_NV = logits_NV.log_softmax(-1)
    model = {"tokenizer": str(SMALL_BASE / "tokenizer.json"), "logprobs": dict(enumerate(log_NV.tolist()))}
    (tmp_path / "model.gguf").write_text(json.dumps(model))
    text = "A face: \N{GRINNING FACE}, and \N{CJK UNIFIED IDEOGRAPH-5B57}."
    ids = AutoTokenizer.from_pretrained(SMALL_BASE).encode(text, add_special_tokens=False)
    wanted_NV = logits_NV[:, :1024].log_softmax(-1)
    wanted = [float(wanted_NV[before, token]) for before, token in pairwise(ids)]
    assert half in ids
    return Loaded("llama.cpp", tmp_path / "model.gguf"), {
        "tokens": [ids],
        "logprobs": [pytest.approx(wanted)],
        "of": text,
    }


def test_halves_of_letters_are_compared(llama: tuple[Loaded, dict[str, Any]]) -> None:
    """llama.cpp tells nothing beside a token that is half a letter, so it is asked in another way."""
    loaded, wanted = llama
    text = wanted.pop("of")
    assert ask(loaded, [text], wanted["tokens"], known_ids(str(SMALL_BASE))) == wanted


def test_what_llama_cpp_writes_of_a_chat_with_tools_is_told(
    llama: tuple[Loaded, dict[str, Any]], tmp_path: Path
) -> None:
    loaded, _ = llama
    base = shutil.copytree(SMALL_BASE, tmp_path / "base")
    refused = "{% if eos_token is not defined %}{{ raise_exception('no end') }}{% endif %}"
    for template, said in (
        (PRINTS, f"{OTHERWISE} {PRINTED}"),
        (CODER, f"{OTHERWISE} '1234567.5' is '1.23457e+06' there"),
        (
            CODER.replace("(value | tojson)", "(value | int if value is number else value | tojson)"),
            "llama.cpp writes a chat with tools as Motet does",
        ),
        (
            PRINTS + refused,
            'note: llama.cpp refuses a chat with tools that Motet writes: {"error": {"message": "no end"}}',
        ),
    ):
        (base / "chat_template.jinja").write_text(template)
        loaded.model.write_text(json.dumps({**json.loads(loaded.model.read_text()), "chat_template": template}))
        chat = written_here(str(base))
        assert chat is not None
        assert apart(chat, ask(loaded, [], [[5]], [5], ASKED)["chat"]) == said
    shutil.copyfile(SMALL_BASE / "chat_template.jinja", base / "chat_template.jinja")
    assert written_here(str(base)) is None


def test_how_the_process_of_a_consumer_or_a_converter_ended_is_told(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"exit status 1\.(.|\n)*  IndexError: .*$"):
        ask(Loaded("convert", tmp_path), [], [], [])  # without a script, which no consumer has
    (tmp_path / "conversion").mkdir()
    base = tmp_path / "conversion" / "base.py"
    for code, how in (
        (
            "import os; os.kill(os.getpid(), 9)",
            r"was killed with SIGKILL, which Motet did not send \(.* out of memory\)$",
        ),
        ("raise ValueError('no such model')", "ended with exit status 1; its last line is: ValueError: no such model$"),
    ):
        base.write_text(code)
        with pytest.raises(BaseModelError, match=rf"^convert\.py does not convert .*given: it {how}"):
            _convert(tmp_path / "convert.py", tmp_path / "given", tmp_path / "made")


def test_what_a_consumer_says_is_told_and_nothing_is_guessed(llama: tuple[Loaded, dict[str, Any]]) -> None:
    """The last line of a log is the cause of nothing: it stands there when all went well, too."""
    loaded, wanted = llama
    text, known = wanted.pop("of"), list(range(1024))
    with pytest.raises(BaseModelError, match=r"gives token 9 no.*ids that have no token"):
        ask(loaded, [text], [[7, 9]], known)
    with pytest.raises(BaseModelError, match=r"Failed to init(.|\n)*llama_model_load"):
        ask(Loaded("llama.cpp", loaded.model / "none"), [text], wanted["tokens"], known)
    with pytest.raises(BaseModelError, match="knows no token 5000"):
        ask(loaded, [text], [[5, 5000]], known)


@pytest.mark.soak
def test_llama_cpp_computes_what_was_trained(adapter: Path, version: Path, tmp_path: Path) -> None:
    """Its own converters and its own server; a file of another adapter is refused."""
    packages = envs.packages("gguf")
    env = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def exported(form: str, source: Path, *options: str) -> str:
        command = [sys.executable, "-m", "motet", "export", str(source), "--format", form, "--to", str(tmp_path / form)]
        done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, check=True)
        return done.stderr

    for form, source in (("gguf", version), ("gguf-adapter", adapter), ("ollama", adapter)):
        assert "checked with llama.cpp" in exported(form, source), form
    assert sorted(file.name for file in (tmp_path / "ollama").iterdir()) == ["Modelfile", "model.gguf"]
    assert [file.name for file in (tmp_path / "gguf-adapter").iterdir()] == ["adapter.gguf"]
    wrong = f"""
from pathlib import Path
from motet.commands.export_check import Loaded, check
check(Loaded("llama.cpp", Path({str(tmp_path / "gguf" / "model.gguf")!r}), dtype="float16"), Path({str(adapter)!r}), "small")
"""
    done = subprocess.run([sys.executable, "-c", wrong], env=env, capture_output=True, text=True, check=False)
    assert "the export is not what was trained" in done.stderr
    halves = shutil.copytree(SMALL_BASE, tmp_path / "halves")
    tensors = load_file(halves / "model.safetensors")
    table, vocabulary = (
        tensors["model.embed_tokens.weight"],
        json.loads((halves / "tokenizer.json").read_text())["model"]["vocab"],
    )
    table[vocabulary["ð"]] = table[vocabulary["."]] * 3  # half a letter is often the likeliest
    save_file(tensors, halves / "model.safetensors", {"format": "pt"})
    shutil.rmtree(tmp_path / "gguf-adapter")
    assert "checked with llama.cpp" in exported("gguf-adapter", adapter, "--base", str(halves))
    (halves / "chat_template.jinja").write_text(PRINTS)
    shutil.rmtree(tmp_path / "gguf")
    assert f"{OTHERWISE} {PRINTED}" in exported("gguf", adapter, "--base", str(halves))
