"""An adapter for export, its base, and both merged into one model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.errors import AdapterError, BaseModelError
from motet.core.model_info import matches_experts
from motet.model.find import find_base, hub_id_of

if TYPE_CHECKING:
    from motet.model.peft_io import PeftAdapter

_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Additional files of a base that reads images; the written model needs them too."""
_WRITTEN_ANEW = frozenset({
    "dtype", "torch_dtype", "transformers_version", "quantization_config", "compression_config", "auto_map",
})  # fmt: skip
"""Values that an export decides itself: its weights are whole, and code of the base is not copied."""
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
"""The name of a repository's folder in the hub's cache."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ExportSource:
    """The adapter and base of an export. Files are read when they are needed."""

    adapter: Path
    """A PEFT LoRA directory."""
    named: str | None = None
    """The base that the user names; None means the one named in the adapter's directory."""
    dtype: str = "auto"
    """Type of a whole model's weights; `auto` is the base's own, and float16 in a .gguf file."""
    checked: bool = True
    """Whether the consumer loads the export again."""

    @cached_property
    def weights(self) -> PeftAdapter:
        """The adapter.

        Raises:
            AdapterError: it cannot be read.
        """
        from motet.model.peft_io import read_adapter

        return read_adapter(self.adapter)

    @property
    def base(self) -> str:
        """Name of its base.

        Raises:
            AdapterError: neither the user nor the adapter names it.
        """
        if not (name := self.named or self.weights.base):
            raise AdapterError(f"{self.adapter} does not say what it was trained on; give --base")
        return name

    @cached_property
    def files(self) -> str:
        """The base in the form that transformers loads: a hub id or a directory.

        Raises:
            BaseModelError: it is missing, or is a .gguf file.
        """
        found, gguf = find_base(self.base)
        if gguf is not None:
            raise BaseModelError(
                f"{self.base} is a .gguf file, which an adapter cannot be added to; give what it was made from as --base"
            )
        return found

    @cached_property
    def hub_id(self) -> str | None:
        """The base's name on the hub; None for a directory outside of the hub's cache that no short name stands for."""
        if (named := hub_id_of(Path(self.files))) is not None:
            return named
        if found := _CACHED.search(f"{self.files}/"):
            return "/".join(found.groups())
        return self.files if _HUB_ID.fullmatch(self.files) and not Path(self.files).exists() else None

    @property
    def caveat(self) -> str:
        """What is to be known of the base's name on the hub; empty where its files are those here."""
        named = hub_id_of(Path(self.files))
        if named is None or "_model_name_or_path" not in (Path(self.files) / "config.json").read_text("utf-8"):
            return ""
        return f"The weights it was trained on are those of {named}, expanded from four bits by `make smollm2`."

    @property
    def loads_as(self) -> str:
        """The base's name on the hub, or its absolute path: transformers and peft can load it from any directory."""
        here = Path(self.files)
        return self.hub_id or (str(here.absolute()) if here.is_dir() else self.files)

    @cached_property
    def directory(self) -> Path:
        """The base's files, downloaded if they are on the hub."""
        if Path(self.files).is_dir():
            return Path(self.files)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.files))


def merge(source: ExportSource, target: Path, dtype: str) -> str:
    """Write a model directory whose weights are the base's with the adapter's product added, in fp32 before they are rounded.

    Returns the type of its weights.

    Raises:
        AdapterError: the adapter cannot be read or does not fit the base.
        BaseModelError: the base cannot be loaded.
    """
    from motet.model.peft_io import writing

    weights = source.weights
    paths = _paths(weights, source.adapter)
    model, tokenizer = load_model(source.base, source.files, dtype)
    _add(model, weights, paths, source.adapter, source.base)
    with writing(target):
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _restate(source.files, target)
    _copy_processors(source.files, target)
    return str(model.dtype).removeprefix("torch.")


def load_model(name: str, source: str, dtype: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer with transformers, its weights unpacked; `name` is for the message.

    Raises:
        BaseModelError: it cannot be loaded.
    """
    import torch
    import transformers

    from motet.model.checkpoint import BaseCheckpoint
    from motet.model.load import DTYPES
    from motet.model.text_only import without_towers

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        checkpoint = BaseCheckpoint.of(source, None, trust_remote_code=False)
        if checkpoint.expands:
            return checkpoint.expanded(DTYPES.get(dtype, torch.bfloat16)), tokenizer
        sees = without_towers(checkpoint.config) is not None
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        return kind.from_pretrained(source, dtype=dtype), tokenizer
    except (OSError, ValueError, ImportError) as error:
        raise BaseModelError(f"base {name!r} cannot be loaded: {error}; give another as --base") from error


def _restate(source: str, target: Path) -> None:
    """State each value of the base's own files in its own words too: other readers know `rope_theta`, not what it became."""
    from transformers.utils.hub import cached_file

    for name in ("config.json", "generation_config.json"):
        file, written = cached_file(source, name, _raise_exceptions_for_missing_entries=False), target / name
        if file is not None and written.is_file():
            told, own = (json.loads(Path(place).read_text("utf-8")) for place in (written, file))
            whole = restated(told, own, told.get("dtype"))
            written.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", "utf-8")


def restated(told: dict[str, Any], own: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """What an export tells of itself, with each value of the base's `own` file; its weights have the type `dtype`.

    Where that has the newer `rope_parameters` alone, the older words are added: their readers take 10,000 for a missing base.
    """
    kept = {name: value for name, value in own.items() if name not in _WRITTEN_ANEW}
    turned = kept.get("rope_parameters")
    if isinstance(turned, dict) and "rope_theta" in turned:  # not one for each type of layer
        apart = {name: turned[name] for name in ("rope_theta", "partial_rotary_factor") if name in turned}
        scaling = {name: value for name, value in turned.items() if name not in apart}
        kept = {**apart, **({} if scaling == {"rope_type": "default"} else {"rope_scaling": scaling}), **kept}
    for name, value in kept.items():
        if name.endswith("_config") and isinstance(value, dict) and isinstance(told.get(name), dict):
            kept[name] = restated(told[name], value, dtype)
    return {**told, **kept, **({"torch_dtype": dtype} if "torch_dtype" in own and dtype else {})}


def _copy_processors(source: str, target: Path) -> None:
    """Copy the files that prepare images, unchanged."""
    from transformers.utils.hub import cached_file

    for name in _PROCESSORS:
        file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, target / name)


def _paths(adapter: PeftAdapter, source: Path) -> list[str]:
    """Paths of the layers that have a product.

    Raises:
        AdapterError: it has a tensor that belongs to none, or half of a product.
    """
    from motet.model.peft_io import PREFIX

    paths = sorted({name.rsplit(".lora_", 1)[0] for name in adapter.tensors})
    pairs = {f"{path}.lora_{side}.weight" for path in paths for side in "AB"}
    if odd := sorted(adapter.tensors.keys() - pairs):
        raise AdapterError(
            f"{source} has {odd[0]}, and only LoRA on linear layers and experts is merged here: leave embeddings out of its "
            "training, or merge it with `merge_and_unload` of peft"
        )
    if lacking := sorted(pairs - adapter.tensors.keys()):
        raise AdapterError(f"{source} is damaged: it has no tensor {lacking[0]}; save it again")
    return [path.removeprefix(PREFIX) for path in paths]


def _add(model: Any, adapter: PeftAdapter, paths: list[str], source: Path, base: str) -> None:
    """Add the adapter to the weights of its layers."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from motet.model.peft_io import PREFIX

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
        product = torch.einsum("nre,erk->enk", b_NRE, a_ERK) * adapter.scale
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False):
            product = product.transpose(1, 2)
        with torch.no_grad():
            weight.copy_(weight.float() + product.reshape(weight.shape))


def _weight(layers: dict[str, Any], path: str, targets: str | list[str]) -> tuple[Any, Any]:
    """A layer and its weight; for experts, the parameter that PEFT wrapped at this depth (the first is innermost)."""
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
