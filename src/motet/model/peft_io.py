"""Read and write PEFT directories: `adapter_config.json` and `adapter_model.safetensors`.

Written adapters are plain PEFT LoRA, fp32, with sorted JSON. Adapters to read may come from anywhere, so every tensor is
checked. Adapters on experts use PEFT's `target_parameters`; files with one adapter for each expert can be read too.

Legend: E experts, R rank, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from motet.config import AdapterConfig
from motet.config.adapters import ADAPTERS, adapter_type
from motet.core.checksums import check_version, sync
from motet.core.errors import AdapterError
from motet.core.model_info import ALL_LINEAR, with_experts
from motet.core.safetensors_header import MOST_TENSORS, count_tensors, saved_targets
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from motet.model.expert_files import together
from motet.model.find import find_adapter
from motet.model.lora import AdapterLayout
from motet.model.lora_model import LoraModel

PREFIX = "base_model.model."
_MANY_TENSORS = 4096
"""Tensors that are read for any base, so that the message about an adapter of another one names that one."""

_REFUSED = {
    "use_dora": "DoRA",
    "use_rslora": "rank-stabilised scaling",
    "use_qalora": "QALoRA",
    "modules_to_save": "fully trained modules (modules_to_save)",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "layer replication",
    "rank_pattern": "a rank per layer (rank_pattern)",
    "alpha_pattern": "an alpha per layer (alpha_pattern)",
    "lora_bias": "trained biases (lora_bias)",
    "alora_invocation_tokens": "activated LoRA",
    "corda_config": "CorDA",
    "eva_config": "EVA",
    "arrow_config": "Arrow",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of `init_lora_weights` with which `peft` also changes the base: the adapter is useless without that change."""

_OUT_PROJ_REFUSED = ("falcon_h1", "mamba2", "nemotron_h")
"""Architectures for whose `out_proj` PEFT loads no adapter: Mamba kernels use its weight without calling the layer."""


def refused_by_peft(model_type: str, path: str) -> bool:
    """Whether PEFT would not load an adapter of this layer."""
    return model_type in _OUT_PROJ_REFUSED and path.endswith(".out_proj")


@dataclass(frozen=True)
class PeftAdapter:
    """A plain LoRA read from disk."""

    rank: int
    alpha: float
    target_modules: str | list[str]
    tensors: dict[str, Tensor]
    base: str
    """The base named in its directory; may be empty."""
    kind: type[AdapterConfig] = AdapterConfig

    @property
    def scale(self) -> float:
        """The factor on B·A."""
        return self.kind.scale_of(self.rank, self.alpha)


def write_adapter(directory: Path, base: LoraModel, layout: AdapterLayout, shape: AdapterConfig, flat: Tensor) -> None:
    """Write an adapter into an existing directory. Every file is synced, so a later rename is a commit."""
    views = file_views(layout, flat.detach().float().cpu())
    tensors = {name: view.reshape(shape).contiguous() for name, (view, shape) in views.items()}
    named = shape.target_modules
    target_modules = [named] if isinstance(named, str) else named
    if ALL_LINEAR in target_modules or base.towers or layout.experts:
        target_modules = _names(base, [place.path for place in layout.places])
    config = {
        "base_model_name_or_path": base.model.config.name_or_path or base.info.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": layout.rank,
        "target_modules": target_modules,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        **shape.PEFT,
    }
    if layout.experts:
        config["target_parameters"] = [place.path for place in layout.experts]
    save_tensors(tensors, directory / ADAPTER_WEIGHTS, {"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    sync(directory / ADAPTER_CONFIG)


def file_views(layout: AdapterLayout, flat: Tensor) -> dict[str, tuple[Tensor, tuple[int, int]]]:
    """Each tensor of a file as a view of `flat`, and its shape in the file.

    PEFT wraps a module once for each of its parameters, the first innermost; it names the wrappers, not the parameters.
    """
    views, named = layout.views(flat), {}
    for place in layout.places:
        a_KR, b_RN = views[place.path]
        named[f"{PREFIX}{place.path}.lora_A.weight"] = (a_KR.t(), (layout.rank, place.n_in))
        named[f"{PREFIX}{place.path}.lora_B.weight"] = (b_RN.t(), (place.n_out, layout.rank))
    for module, own in groupby(layout.experts, lambda place: place.path.rpartition(".")[0]):
        for depth, experts in enumerate(reversed(list(own))):
            a_EKR, b_ERN = views[experts.path]
            wrapper, ranks = f"{PREFIX}{module}{'.base_layer' * depth}", experts.n_experts * layout.rank
            named[f"{wrapper}.lora_A.weight"] = (a_EKR.transpose(1, 2), (ranks, experts.n_in))
            named[f"{wrapper}.lora_B.weight"] = (b_ERN.permute(2, 1, 0), (experts.n_out, ranks))
    return named


def _names(base: LoraModel, adapted: list[str]) -> list[str]:
    """Names by which PEFT finds exactly these layers: the last part of their paths, if no other module has it.

    Towers that are not loaded may have layers with the same names.
    """
    if base.towers:
        return sorted(adapted)
    known = set(adapted)
    others = {path.rsplit(".", 1)[-1] for path, _ in base.model.named_modules() if path not in known}
    lasts = ((path, path.rsplit(".", 1)[-1]) for path in adapted)
    return sorted({path if last in others else last for path, last in lasts})


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OSError where safetensors cannot write; a full disk keeps its error number."""
    try:
        yield
    except SafetensorError as error:
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write and sync a safetensors file.

    Raises:
        OSError: it cannot be written; a full disk keeps its error number.
    """
    with writing(path):
        save_file(tensors, str(path), metadata=metadata)
    # readable by everyone who can read the directory, such as servers of other users
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)


def read_adapter(directory: Path) -> PeftAdapter:
    """Read a PEFT LoRA directory.

    Raises:
        AdapterError: it is missing, not a plain LoRA (the message names the kind), damaged, or changed since it was saved.
    """
    config_file, weights_file = directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS
    find_adapter(directory)
    check_version(directory)
    try:
        config: Any = json.loads(config_file.read_text("utf-8"))
    except ValueError as error:
        raise AdapterError(f"{config_file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{config_file} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{directory} is a {config.get('peft_type')} adapter; Motet trains plain LoRA")
    kind = ADAPTERS[adapter_type(config)]
    for field, what in _REFUSED.items():
        if config.get(field) and not kind.PEFT.get(field):
            raise AdapterError(f"{directory} uses {what}, which Motet does not train; start from a plain LoRA")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{directory} trains biases (bias={config['bias']!r}); start from a plain LoRA")
    if str(config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{directory} was initialised with {config['init_lora_weights']}, which changes the base; save it with "
            "`path_initial_model_for_weight_conversion`, which makes a plain LoRA of it"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{config_file} is damaged: r={rank!r} and lora_alpha={alpha!r} are not a rank and a number")
    try:
        if count_tensors(weights_file) > MOST_TENSORS:
            raise AdapterError(f"{weights_file} names more than {MOST_TENSORS} tensors, which no adapter has")
        tensors = load_file(str(weights_file))
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{weights_file} is damaged: {error}") from error
    trained_on = str(config.get("base_model_name_or_path") or "")
    targets = saved_targets(config, directory)
    if parameters := config.get("target_parameters"):
        if not isinstance(parameters, list):
            raise AdapterError(f"{config_file} is damaged: target_parameters={parameters!r} is no list of names")
        targets = with_experts(targets, parameters)
    try:
        joined = together(tensors, rank, PREFIX)
    except (AdapterError, RuntimeError) as error:  # mismatched shapes
        raise AdapterError(f"{directory}: {next(iter(str(error).splitlines()), '')}") from error
    if joined is not None:
        alpha *= kind.scale_of(rank, 1.0) / kind.scale_of(rank * joined.times, 1.0)  # the scale stays
        rank, tensors = rank * joined.times, joined.tensors
        targets = [*joined.modules, *joined.parameters]
    return PeftAdapter(rank, float(alpha), targets, tensors, trained_on, kind)


def flatten(adapter: PeftAdapter, base: LoraModel, layout: AdapterLayout, source: Path) -> Tensor:
    """Copy a read adapter into an arena of this layout (fp32, CPU).

    Raises:
        AdapterError: nothing matched, or a named tensor is missing, unexpected, of another shape or not finite.
    """
    if adapter.rank != layout.rank:
        raise AdapterError(
            f"{source} has rank {adapter.rank}, the job asks for {layout.rank}; set adapter.rank to {adapter.rank}"
        )
    flat = torch.zeros(layout.size)
    left = dict(adapter.tensors)
    expected = file_views(layout, flat)
    if not any(name in left for name in expected):
        tails = {name.partition("layers.")[2]: name for name in expected}
        for name in sorted(left):
            if wanted := tails.get(name.replace(".default.", ".").partition("layers.")[2] or name):
                raise AdapterError(
                    f"{source} has other names of tensors than peft gives them: {name} is {wanted} there; save it with "
                    "`save_pretrained` of its peft model, or rename them all like this"
                )
        raise AdapterError(
            f"{source}: none of its {len(left)} tensors fits {base.info.name}; it was trained on "
            f"{adapter.base or 'another base'}"
        )
    origin = f"; it was trained on {adapter.base}" if adapter.base else ""
    for name, (view, shape) in expected.items():
        tensor = left.pop(name, None)
        if tensor is None:
            raise AdapterError(
                f"{source} has no tensor {name}; set adapter.target_modules to what it was trained with{origin}"
            )
        if tuple(tensor.shape) != shape:
            raise AdapterError(f"{source}: {name} has shape {tuple(tensor.shape)}, the base needs {shape}{origin}")
        values = tensor.float()
        if not torch.isfinite(values).all():
            raise AdapterError(f"{source}: {name} has values that are not finite")
        view.copy_(values.view(view.shape))
    if left:
        raise AdapterError(
            f"{source} has a tensor that nothing asks for: {sorted(left)[0]} ({len(left)} in all){origin}"
        )
    return flat


def _most_tensors(base: LoraModel) -> int:
    """A bound for reading: two matrices for each layer, and for gate, up and down of each expert; more for small bases."""
    experts = sum(4 * n_experts for n_experts, _, _ in base.experts.values())
    return max(_MANY_TENSORS, 2 * len(base.linears) + experts)


def examine(base: LoraModel, directory: Path) -> AdapterConfig:
    """The adapter settings that a job over this base needs to start from an adapter.

    Raises:
        AdapterError: no job can start from it; the message says why.
    """
    weights = directory / ADAPTER_WEIGHTS
    try:
        if weights.is_file() and (count := count_tensors(weights)) > (most := _most_tensors(base)):
            raise AdapterError(
                f"{weights} names {count} tensors, and no adapter of {base.info.name} has more than {most}; it is of another "
                "base, or damaged"
            )
        adapter = read_adapter(directory)
        targets = adapter.target_modules
        shape = adapter.kind(rank=adapter.rank, alpha=adapter.alpha, target_modules=targets)
    except ValidationError as error:
        first = error.errors()[0]
        raise AdapterError(f"{ADAPTER_CONFIG}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OverflowError, RecursionError) as error:
        raise AdapterError(f"{ADAPTER_CONFIG} is damaged: {error}") from error
    layout = base.adapter_layout(shape.target_modules, shape.rank)
    flatten(adapter, base, layout, directory)
    chosen = sorted({place.path.rsplit(".", 1)[-1] for place in layout.places})
    chosen += sorted({".".join(place.path.rsplit(".", 2)[1:]) for place in layout.experts})
    if base.info.adapted(chosen) != base.info.adapted(shape.target_modules):  # only some of the layers with these names
        chosen = [*(place.path for place in layout.places), *(place.path for place in layout.experts)]
    return shape.model_copy(update={"target_modules": chosen})
