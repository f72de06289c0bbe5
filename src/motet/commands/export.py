"""`motet export`: a base and an adapter as one model, for engines that know nothing of LoRA."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from motet.errors import AdapterError, BaseModelError, ConfigError
from motet.model_info import matches_experts


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
    from motet.model.load import find_base
    from motet.model.peft_io import read_adapter

    if target.exists() and any(target.iterdir()):
        raise BaseModelError(f"{target} is not empty; give a directory that is not there yet")
    weights = read_adapter(adapter)
    if not (name := base or weights.base):
        raise AdapterError(f"{adapter} does not say what it was trained on; give --base")
    source, gguf = find_base(name)
    if gguf is not None:
        raise BaseModelError(
            f"{name} is a .gguf file, which an adapter cannot be added to; give what it was made from as --base"
        )
    model, tokenizer = _load(name, source, dtype)
    _add(model, weights, adapter, name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


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
    command = [sys.executable, converter, str(model), "--outfile", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not target.is_file():
        (*_, said) = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise BaseModelError(f"{converter} does not convert {model}, which stays as it is, and says: {said}")
    return target


def _load(name: str, source: str, dtype: str) -> tuple[Any, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype), tokenizer
    except (OSError, ValueError) as error:
        raise BaseModelError(f"base {name!r} cannot be loaded: {error}; give another as --base") from error


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
