"""The files of a base: read as numbers, or left as they are packed (GGUF files, and fp8 with scales for blocks).

transformers makes the model and fills it; what is said here is which layers keep their weights in which form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from motet import budgets
from motet.errors import BaseModelError
from motet.model.experts import has_experts
from motet.model.packed import BaseFormat, Float8Blocks, Form, GgufBlocks, PackedLinear
from motet.model.text_only import without_towers

_METHOD = "motet"
_UNPACK = "set engine.base_format: unpacked"
_EXPANDED = ("fp8", "mxfp4")
"""Methods whose weights transformers reads as numbers."""
_ROOM = 3
"""A base is unpacked where memory is free for so many times its numbers: a second copy, adapters and caches come too."""
_ROTATED: dict[str, tuple[str, ...]] = {"llama": ("q_proj", "k_proj"), "qwen2": (), "qwen3": ()}
"""GGUF architectures that can stay packed, and which of their layers have the rows of each head in ggml's order."""


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on a device: of its own memory, or of main memory."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else budgets.available_memory()


@register_quantization_config(_METHOD)
class _Packed(QuantizationConfigMixin):
    """Which layers stay packed, and how, by path."""

    def __init__(self, forms: Mapping[str, Form], dtype: torch.dtype) -> None:
        self.quant_method: Any = _METHOD
        self.forms, self.dtype = forms, dtype


@register_quantizer(_METHOD)
class _PackedLayers(HfQuantizer):
    """Puts packed layers into a model that has no weights yet."""

    requires_calibration, is_trainable = False, False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        config: Any = self.quantization_config
        for path, form in config.forms.items():
            model.set_submodule(path, PackedLinear(model.get_submodule(path), form, config.dtype))
        return model

    def is_serializable(self) -> bool:
        return False


@dataclass(frozen=True)
class Checkpoint:
    """Where a base lies, and what is known of its weights before they are read."""

    source: str
    gguf: str | None
    config: Any
    method: str | None
    """How its weights are quantised; None where they are not."""

    @classmethod
    def of(cls, source: str, file: str | None, trust_remote_code: bool) -> Checkpoint:
        """`source` is a hub id or a directory, `file` the name of a GGUF file there."""
        if file is not None:
            return cls(source, file, AutoConfig.from_pretrained(source, gguf_file=file), "gguf")
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        quantised = _quantisation(config)
        return cls(source, None, config, str(quantised["quant_method"]) if quantised else None)

    def stays_packed(self, wanted: BaseFormat, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether weights stay packed; `auto` unpacks them while memory lasts."""
        if wanted != "auto" or self.method is None:
            return wanted == "packed"
        try:
            empty = self._layers().model
        except BaseModelError:
            return False
        n_bytes = sum(weight.numel() for weight in empty.parameters()) * dtype.itemsize
        return bool(n_bytes * _ROOM > free_memory(device))

    def unpacked(self, dtype: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """The model with all its weights as numbers, and what transformers reports of loading it."""
        if self.gguf is not None:
            files = {"gguf_file": self.gguf, "quantization_config": GgufConfig(dequantize=True)}
            return _loaded(AutoModelForCausalLM, self.source, dtype, {**options, **files})
        kind = without_towers(self.config) or AutoModelForCausalLM
        if self.method not in _EXPANDED:
            return _loaded(kind, self.source, dtype, options)
        config = copy.deepcopy(self.config)
        config.quantization_config = {**_quantisation(config), "dequantize": True}
        model, report = _loaded(kind, self.source, dtype, {**options, "config": config})
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        for name, weight in model.named_parameters():
            if not kept & set(name.split(".")):
                weight.data = weight.data.to(dtype)  # what was not quantised has come in the type of the files
        return model, report

    def packed(self, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """The same, with the weights of linear layers as they are stored.

        Raises:
            BaseModelError: they are in no form that can stay packed.
        """
        layers = self._layers()
        source: str | None = self.source
        options = {**options, "config": layers.model.config, "quantization_config": _Packed(layers.forms, dtype)}
        if isinstance(layers, _GgufLayers):
            options, source = {**options, "state_dict": layers.tensors(dtype)}, None
        model, report = _loaded(type(layers.model), source, dtype, options)
        model.config.name_or_path = self.source
        return model, report

    def _layers(self) -> _GgufLayers | _Float8Layers:
        config = copy.deepcopy(self.config)
        if self.gguf is not None:
            return _GgufLayers(Path(self.source) / self.gguf, config)
        return _Float8Layers(self.source, config)


def _quantisation(config: Any) -> dict[str, Any]:
    said = getattr(config, "quantization_config", None) or {}
    return said if isinstance(said, dict) else dict(said.to_dict())


def _loaded(kind: Any, source: str | None, dtype: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    loaded: tuple[Any, Any] = kind.from_pretrained(source, dtype=dtype, attn_implementation="eager", **options)
    return loaded


def _empty(config: Any) -> Any:
    """A model without weights."""
    kind = without_towers(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config) if kind is None else kind(config)


class _GgufLayers:
    """The layers of a GGUF file by the names that the model has for them."""

    def __init__(self, path: Path, config: Any) -> None:
        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        if architecture not in _ROTATED:
            raise BaseModelError(
                f"{path} holds a model of architecture {architecture!r}, and only {', '.join(_ROTATED)} can stay packed; "
                f"{_UNPACK}"
            )
        kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        stored = {one.name: one for one in reader.tensors}
        self.model, self._rotated = _empty(config), _ROTATED[architecture]
        self._stored, self.forms = {}, dict[str, Form]()
        for name, _ in self.model.named_parameters():
            path_of, _, leaf = name.rpartition(".")
            tensor = stored.get(f"{names.get_name(path_of)}.{leaf}")
            if tensor is None:
                continue  # transformers knows which are tied, and says which are missing
            self._stored[name] = tensor
            kind_of = int(tensor.tensor_type)
            if kind_of in GGML_BLOCK and isinstance(self.model.get_submodule(path_of), nn.Linear):
                self.forms[path_of] = GgufBlocks(kind_of)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All there are, packed or in a type."""
        return {name: self._rows_in_order(name, self._read(name, dtype)) for name in self._stored}

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._stored[name]
        if name.rpartition(".")[0] in self.forms and name.endswith(".weight"):
            return torch.from_numpy(np.array(tensor.data))
        return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).to(dtype)

    def _rows_in_order(self, name: str, rows: Tensor) -> Tensor:
        """In ggml the two halves of each head's rows are interleaved, for its own rotary embedding."""
        layer, config = name.split(".")[-2], self.model.config
        if layer not in self._rotated:
            return rows
        heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
        halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2)
        return halves.flatten(0, 2).contiguous()


class _Float8Layers:
    """The layers of a checkpoint in fp8; `config` forgets that it is quantised."""

    def __init__(self, source: str, config: Any) -> None:
        quantised = _quantisation(config)
        block, method = quantised.get("weight_block_size"), quantised.get("quant_method")
        if not quantised:
            raise BaseModelError(f"base {source!r} is not quantised, so nothing can stay packed; {_UNPACK}")
        if method != "fp8" or not block:
            raise BaseModelError(
                f"base {source!r} is quantised ({method}), and what can stay packed are GGUF files and fp8 with scales for "
                f"blocks; {_UNPACK}, or give the base that it was made from"
            )
        del config.quantization_config
        self.model = _empty(config)
        if has_experts(self.model):
            raise BaseModelError(f"base {source!r} has experts, which cannot stay packed yet; {_UNPACK}")
        left_out = [*(quantised.get("modules_to_not_convert") or ()), "lm_head"]
        self.forms: dict[str, Form] = {
            path: Float8Blocks(tuple(block))
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and not any(part in path for part in left_out)
        }
