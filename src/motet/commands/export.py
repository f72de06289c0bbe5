"""`motet export`: the formats in which an adapter is written. To add one, write a function and a line in `FORMATS`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from motet.commands import export_gguf
from motet.commands.answers import say, say_untrained
from motet.commands.export_card import write_card
from motet.commands.export_check import Loaded, check, missing
from motet.commands.merging import ExportSource, merge
from motet.core.errors import AdapterError, BaseModelError, ConfigError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINED_CONFIG
from motet.runtime.receipts import RECEIPT


@dataclass(frozen=True)
class Format:
    """A format of `motet export`."""

    write: Callable[[ExportSource, Path], Loaded | None]
    """Writes the files into an empty directory; returns what the consumer is to load."""
    consumer: str | None = None
    """What loads it again, a key of `export_check.PACKAGES`; None where nothing here does."""
    whole: bool = False
    """Whether it is a whole model, whose weights have a type."""


def merged(source: ExportSource, target: Path) -> Loaded:
    """Base and adapter as one model directory."""
    return Loaded("transformers", target, dtype=merge(source, target, source.dtype))


def peft(source: ExportSource, target: Path) -> Loaded:
    """The adapter's own files, and its receipt where it has one."""
    if source.caveat:
        say(f"note: {source.caveat} On the hub's own, the adapter computes slightly different logprobs.", aside=True)
    if (strength := source.weights.scale) != 1:
        say(f"note: OpenVINO GenAI reads no alpha and rank: give its AdapterConfig alpha={strength:g}", aside=True)
    config = {
        **json.loads((source.adapter / ADAPTER_CONFIG).read_text("utf-8")),
        "base_model_name_or_path": source.loads_as,
    }
    (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    if (source.adapter / RECEIPT).is_file():  # which has the sum of the file with the base's name in the run
        trained = source.adapter / TRAINED_CONFIG  # of an export
        shutil.copyfile(trained if trained.is_file() else source.adapter / ADAPTER_CONFIG, target / TRAINED_CONFIG)
    for name in (ADAPTER_WEIGHTS, RECEIPT):
        if (source.adapter / name).is_file():
            shutil.copyfile(source.adapter / name, target / name)
    return Loaded("peft", Path(source.files), target)


def card(source: ExportSource, target: Path) -> Loaded:
    """The same with a model card: a directory that can be put on a hub as it is."""
    loaded = peft(source, target)
    write_card(source, target)
    return loaded


def split_experts(source: ExportSource, target: Path) -> None:
    """An adapter on experts as vLLM reads it, expert by expert.

    Raises:
        AdapterError: it cannot be read, or has nothing on experts.
        BaseModelError: the base is not there, or its experts cannot be apart.
    """
    from transformers import AutoConfig

    from motet.model.expert_files import apart, names_apart
    from motet.model.peft_io import save_tensors

    weights, adapter = source.weights, source.adapter
    model_type = AutoConfig.from_pretrained(source.files).get_text_config().model_type
    names = names_apart(model_type)
    if names is None:
        raise BaseModelError(
            f"checkpoints of {source.base} ({model_type}) do not store experts one by one; give a server the adapter "
            "unchanged"
        )
    tensors = apart(weights.tensors, weights.rank, weights.target_modules, names)
    if tensors.keys() == weights.tensors.keys():
        raise AdapterError(f"{adapter} has no weights on experts; give a server the adapter unchanged")
    config = json.loads((adapter / ADAPTER_CONFIG).read_text("utf-8"))
    named = config.get("target_modules") or []
    config["target_modules"] = sorted({*([named] if isinstance(named, str) else named), *names})
    config.pop("target_parameters", None)
    config.update(r=weights.rank, lora_alpha=weights.alpha)
    save_tensors(tensors, target / ADAPTER_WEIGHTS, {"format": "pt"})
    (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


FORMATS: Mapping[str, Format] = {
    "merged": Format(merged, "transformers", whole=True),
    "peft": Format(peft, "peft"),
    "card": Format(card, "peft"),
    "gguf": Format(export_gguf.model, "llama.cpp", whole=True),
    "gguf-adapter": Format(export_gguf.adapter, "llama.cpp"),
    "ollama": Format(export_gguf.ollama, "llama.cpp", whole=True),
    "experts": Format(split_experts),
}


def write(
    adapter: Path, base: str | None, target: Path, form: str, dtype: str = "auto", *, checked: bool = True
) -> Path:
    """Write an adapter in a format, and have its consumer load it again unless `checked` is false; returns the target.

    Raises:
        ConfigError: there is no such format, or the other settings do not fit it.
        AdapterError: the adapter cannot be read, does not fit the base, or computes something else in the consumer.
        BaseModelError: the base or the export cannot be loaded, or the target is taken.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: must be one of {', '.join(FORMATS)}")
    one = FORMATS[form]
    if not one.whole and dtype != "auto":
        wholes = " or ".join(name for name, other in FORMATS.items() if other.whole)
        raise ConfigError(f"--dtype needs a whole model: leave it out, or use --format {wholes}")
    say_untrained(adapter)
    write_as(one, ExportSource(adapter, base, dtype, checked), target)
    return target


def write_as(form: Format, source: ExportSource, target: Path) -> None:
    """The same for a format. Raises as `write` does."""
    if form.consumer is None:
        reason = "nothing here loads this format"
    elif not source.checked:
        reason = "because of --unchecked"
    elif lacking := missing(form.consumer):
        reason = f"{lacking} is not installed; pip install 'motet[export]'"
    else:
        reason = ""
    source = replace(source, checked=not reason)
    with drafted(target) as draft:
        loaded = form.write(source, draft)
        said = f"not checked: {reason}" if loaded is None or reason else check(loaded, source.adapter, source.base)
    say(said, aside=True)


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A directory in the target whose files move up once all are written: nothing stays of what is interrupted.

    Hidden files do not move: they are gone at the end.

    Raises:
        BaseModelError: the target is taken, or cannot be written.
    """
    made = [one for one in (target, *target.parents) if not one.exists()]
    if target.exists() and any(target.iterdir()):
        raise BaseModelError(f"{target} is not empty; give a directory that is not there yet")
    draft = target / ".tmp"
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise BaseModelError(f"{target} cannot be written: {error.strerror}; give another directory as --to") from error
    try:
        yield draft
        # configs last: readers look for these
        for file in sorted(draft.glob("[!.]*"), key=lambda file: file.name.endswith("config.json")):
            if file.is_file():
                file.chmod(draft.stat().st_mode & 0o666)  # safetensors lets nobody else read its own
            file.rename(target / file.name)
    finally:
        shutil.rmtree(draft)
        for directory in made:
            if not any(directory.iterdir()):
                directory.rmdir()
