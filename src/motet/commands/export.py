"""`motet export`: the formats in which an adapter is written. To add one, write a function and a line in `FORMATS`."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.errors import AdapterError, BaseModelError, ConfigError
from motet.model_info import matches_experts
from motet.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS


@dataclass(frozen=True)
class Format:
    """A format of `motet export`."""

    write: Callable[[Path, str | None, Path, str], None]
    """From an adapter, its base (None reads it from the adapter), the target, and the type of the weights."""
    whole: bool
    """Whether it is a whole model, which has a type and can become a .gguf file."""


_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What a base that sees images has besides; what is written reads them again."""


def export(adapter: Path, base: str | None, target: Path, dtype: str) -> None:
    """Write a model directory whose weights are the base's with the adapter's product added, in fp32 before they are rounded.

    Args:
        adapter: a PEFT LoRA directory.
        base: what it was trained on; None takes what its directory says.
        target: a directory that is not there yet, or is empty.
        dtype: `auto` keeps the base's type.

    Raises:
        AdapterError: it cannot be read or does not fit the base.
        BaseModelError: the base cannot be loaded, or the target is taken.
    """
    with drafted(target) as draft:
        weights, name, source = _read(adapter, base)
        model, tokenizer = _load(name, source, dtype)
        _add(model, weights, adapter, name)
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        _copy_processors(source, draft)


def split_experts(adapter: Path, base: str | None, target: Path, dtype: str = "auto") -> None:
    """Write an adapter on experts as vLLM reads it, expert by expert. `dtype` changes nothing.

    Raises:
        AdapterError: it cannot be read, or has nothing on experts.
        BaseModelError: the base is not there or its experts cannot be apart, or the target is taken.
    """
    from transformers import AutoConfig

    from motet.model.expert_files import apart, names_apart
    from motet.model.peft_io import save_tensors

    weights, name, source = _read(adapter, base)
    model_type = AutoConfig.from_pretrained(source).get_text_config().model_type
    names = names_apart(model_type)
    if names is None:
        raise BaseModelError(
            f"checkpoints of {name} ({model_type}) do not store experts one by one; give a server the adapter unchanged"
        )
    tensors = apart(weights.tensors, weights.rank, weights.target_modules, names)
    if tensors.keys() == weights.tensors.keys():
        raise AdapterError(f"{adapter} has no weights on experts; give a server the adapter unchanged")
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    named = config.get("target_modules") or []
    config["target_modules"] = sorted({*([named] if isinstance(named, str) else named), *names})
    config.pop("target_parameters", None)
    config.update(r=weights.rank, lora_alpha=weights.alpha)
    with drafted(target) as draft:
        save_tensors(tensors, draft / ADAPTER_WEIGHTS, {"format": "pt"})
        (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


FORMATS: Mapping[str, Format] = {"merged": Format(export, whole=True), "experts": Format(split_experts, whole=False)}


def write(adapter: Path, base: str | None, target: Path, form: str, dtype: str, gguf: str | None) -> Path:
    """Write an adapter in a format, and with `gguf`, a path of llama.cpp's converter, as a .gguf file; returns what was made.

    Raises:
        ConfigError: there is no such format, or the other settings do not fit it.
        AdapterError: the adapter cannot be read or does not fit the base.
        BaseModelError: the base cannot be loaded, or the target is taken.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: must be one of {', '.join(FORMATS)}; PEFT reads the directory as it is")
    if not FORMATS[form].whole and (gguf is not None or dtype != "auto"):
        raise ConfigError(f"--gguf and --dtype need a whole model: leave them out, or use --format {_wholes()}")
    converter = None if gguf is None else find_converter(gguf)
    FORMATS[form].write(adapter, base, target, dtype)
    return target if converter is None else write_gguf(target, converter)


def _wholes() -> str:
    return " or ".join(name for name, one in FORMATS.items() if one.whole)


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A directory in the target whose files move up once all are written: nothing stays of what is interrupted.

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
        for file in sorted(draft.iterdir(), key=lambda file: file.name.endswith("config.json")):
            if file.is_file():
                file.chmod(draft.stat().st_mode & 0o666)  # safetensors lets nobody else read its own
            file.rename(target / file.name)
    finally:
        shutil.rmtree(draft)
        for directory in made:
            if not any(directory.iterdir()):
                directory.rmdir()


def _read(adapter: Path, base: str | None) -> tuple[Any, str, str]:
    """The adapter, its base's name, and what transformers loads of it."""
    from motet.model.find import find_base
    from motet.model.peft_io import read_adapter

    weights = read_adapter(adapter)
    if not (name := base or weights.base):
        raise AdapterError(f"{adapter} does not say what it was trained on; give --base")
    source, gguf = find_base(name)
    if gguf is not None:
        raise BaseModelError(
            f"{name} is a .gguf file, which an adapter cannot be added to; give what it was made from as --base"
        )
    return weights, name, source


def find_converter(given: str) -> str:
    """The path of llama.cpp's converter.

    Raises:
        ConfigError: it is not there.
    """
    script = given if Path(given).is_file() else shutil.which(given)
    if script is None:
        raise ConfigError(
            f"--gguf {given}: there is no such file, here or on PATH; it is convert_hf_to_gguf.py of llama.cpp's repository"
        )
    return script


def write_gguf(model: Path, converter: str) -> Path:
    """Have llama.cpp's converter write a model directory as one .gguf file beside its weights.

    Raises:
        BaseModelError: it does not, with the last that it said.
    """
    target = model / f"{model.resolve().name}.gguf"
    draft = model / f".tmp-{target.name}"
    command = [sys.executable, converter, str(model), "--outfile", str(draft)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not draft.is_file():
            (*_, said) = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            raise BaseModelError(f"{converter} does not convert {model}, which is unchanged, and says: {said}")
        return draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)


def _load(name: str, source: str, dtype: str) -> tuple[Any, Any]:
    import transformers

    from motet.model.text_only import without_towers

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        sees = without_towers(transformers.AutoConfig.from_pretrained(source)) is not None
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        return kind.from_pretrained(source, dtype=dtype), tokenizer
    except (OSError, ValueError) as error:
        raise BaseModelError(f"base {name!r} cannot be loaded: {error}; give another as --base") from error


def _copy_processors(source: str, target: Path) -> None:
    """Whatever prepares images, as it is."""
    from transformers.utils.hub import cached_file

    for name in _PROCESSORS:
        file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, target / name)


def _add(model: Any, adapter: Any, source: Path, base: str) -> None:
    """Add the adapter to the weights of the layers that it names."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from motet.model.peft_io import PREFIX

    paths = sorted({key.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for key in adapter.tensors})
    layers = dict(model.named_modules())
    for path in paths:
        a, b = (adapter.tensors[f"{PREFIX}{path}.lora_{side}.weight"].float() for side in "AB")
        module, weight = _weight(layers, path, adapter.target_modules)
        n_experts = weight.shape[0] if weight is not None and weight.dim() == 3 else 1
        fits = weight is not None and sorted(weight.shape[-2:]) == sorted((len(b), a.shape[1]))
        if not fits or len(a) != n_experts * adapter.rank:
            raise AdapterError(
                f"{source} has a product for {path}, which {base} does not have in this shape; give its own base as --base"
            )
        a_ERK, b_NRE = a.view(n_experts, adapter.rank, -1), b.view(len(b), adapter.rank, n_experts)
        product = torch.einsum("nre,erk->enk", b_NRE, a_ERK) * (adapter.alpha / adapter.rank)
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False):
            product = product.transpose(1, 2)
        with torch.no_grad():
            weight.copy_(weight.float() + product.reshape(weight.shape))


def _weight(layers: dict[str, Any], path: str, targets: str | list[str]) -> tuple[Any, Any]:
    """A layer and its weight; of experts the parameter that PEFT wrapped at this depth, the first one innermost."""
    inside, *wrappers = path.split(".base_layer")
    layer = layers.get(inside)
    if layer is None or getattr(layer, "weight", None) is not None:
        return layer, getattr(layer, "weight", None)
    wrapped = [
        parameter
        for name, parameter in layer.named_parameters(recurse=False)
        if any(matches_experts(f"{inside}.{name}", target) for target in targets)
    ]
    return layer, wrapped[-1 - len(wrappers)] if len(wrappers) < len(wrapped) else None
