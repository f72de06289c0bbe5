"""Load the files of a base, with weights unpacked, or kept packed (GGUF files, fp8 with block scales, MXFP4, nf4).

transformers creates and fills the model; this module decides the storage form of each layer's weights.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from motet.core.errors import BaseModelError
from motet.model.accelerator import free_memory
from motet.model.experts import has_experts
from motet.model.lean_import import made_on_cpu
from motet.model.packed import BaseFormat, PackedExperts, PackedLinear, unpack
from motet.model.packed_forms import Float8Blocks, Form, GgufBlocks, Mxfp4Blocks, Nf4Blocks
from motet.model.text_only import without_towers

_METHOD = "motet"
_UNPACK = "set engine.base_format: unpacked"
_EXPANDED = ("fp8", "mxfp4")
"""Methods whose weights transformers unpacks. Others are unpacked here: bitsandbytes needs kernels that a CPU may lack."""
_ROOM = 3
"""A base is unpacked if free memory is this many times its size, for a second copy, adapters and caches."""
_ROTATED: dict[str, tuple[str, ...]] = {"llama": ("q_proj", "k_proj"), "qwen2": (), "qwen3": ()}
"""GGUF architectures that can stay packed, and their layers whose head rows are in ggml's order."""


@register_quantization_config(_METHOD)
class _Packed(QuantizationConfigMixin):
    """The storage form of each packed layer, by path."""

    def __init__(self, forms: Mapping[str, Form], dtype: torch.dtype) -> None:
        self.quant_method: Any = _METHOD
        self.forms, self.dtype = forms, dtype


@register_quantizer(_METHOD)
class _PackedLayers(HfQuantizer):
    """Inserts packed layers into a model without weights."""

    requires_calibration, is_trainable = False, False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        config: Any = self.quantization_config
        for path, form in config.forms.items():
            parent, _, leaf = path.rpartition(".")
            place = model.get_submodule(parent)
            layer = getattr(place, leaf)
            delattr(place, leaf)
            if isinstance(layer, nn.Linear):
                setattr(place, leaf, PackedLinear(layer, form, config.dtype))
            else:
                setattr(place, leaf, PackedExperts(tuple(layer.shape), form, config.dtype, layer.device))
        return model

    def get_weight_conversions(self) -> list[Any]:
        config: Any = self.quantization_config
        kinds = {type(form) for form in config.forms.values()}
        return [*(_mxfp4_names() if Mxfp4Blocks in kinds else ()), *(_nf4_names() if Nf4Blocks in kinds else ())]

    def is_serializable(self) -> bool:
        return False


def _mxfp4_names() -> list[Any]:
    """Rename tensors: a projection's tensors are in a separate module here."""
    return [
        WeightRenaming(f"experts.{projection}_{part}", f"experts.{projection}.{part}")
        for projection in ("gate_up_proj", "down_proj")
        for part in ("blocks", "scales")
    ]


def _nf4_names() -> list[Any]:
    """Rename tensors, because parameter names have no dots, and read the offset from JSON text stored as bytes."""
    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    offset = WeightConverter("weight.quant_state.bitsandbytes__nf4", "nested_offset", [_Offset()])
    return [*(WeightRenaming(f"weight.{part}", part) for part in parts), offset]


class _Offset(ConversionOps):
    """Reads bitsandbytes' offset of nested scales, and rejects unsupported forms."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        ((stored,),) = input_dict.values()
        state = json.loads(bytes(stored.to(torch.uint8).tolist()))
        sizes = state["blocksize"], state.get("nested_blocksize", 256)
        if sizes != (64, 256):
            raise BaseModelError(f"its nf4 blocks have {sizes} numbers and scales, and Motet reads those of (64, 256)")
        return {"nested_offset": torch.tensor([state.get("nested_offset", 0.0)])}


@dataclass(frozen=True)
class BaseCheckpoint:
    """Location of a base, and the facts known before its weights are read."""

    source: str
    gguf: str | None
    config: Any
    method: str | None
    """Quantisation method of its weights; None if they are not quantised."""

    @classmethod
    def of(cls, source: str, file: str | None, trust_remote_code: bool) -> BaseCheckpoint:
        """`source` is a hub id or a directory, `file` the name of a GGUF file in it."""
        if file is not None:
            return cls(source, file, AutoConfig.from_pretrained(source, gguf_file=file), "gguf")
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        quantised = _quantisation(config)
        return cls(source, None, config, str(quantised["quant_method"]) if quantised else None)

    def stays_packed(self, wanted: BaseFormat, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether weights stay packed; `auto` unpacks them if memory allows."""
        if wanted != "auto" or self.method is None:
            return wanted == "packed"
        try:
            empty = self._layers.model
        except BaseModelError:
            return False
        n_bytes = sum(weight.numel() for weight in empty.parameters()) * dtype.itemsize
        return bool(n_bytes * _ROOM > free_memory(device))

    def unpacked(self, dtype: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """The model with unpacked weights, and transformers' loading report."""
        if self.gguf is not None:
            files = {"gguf_file": self.gguf, "quantization_config": GgufConfig(dequantize=True)}
            return _loaded(AutoModelForCausalLM, self.source, dtype, {**options, **files})
        kind = without_towers(self.config) or AutoModelForCausalLM
        if self.method in _FORMS and self.method not in _EXPANDED:
            model, report = self.packed(dtype, options)
            unpack(model)
            model.is_quantized = False
            del model.config.quantization_config
            return model, report
        if self.method not in _EXPANDED:
            return _loaded(kind, self.source, dtype, options)
        config = copy.deepcopy(self.config)
        config.quantization_config = {**_quantisation(config), "dequantize": True}
        model, report = _loaded(kind, self.source, dtype, {**options, "config": config})
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        for name, weight in model.named_parameters():
            if not kept & set(name.split(".")):
                weight.data = weight.data.to(dtype)  # weights that were not quantised have the dtype of the files
        return model, report

    @property
    def expands(self) -> bool:
        """Whether `expanded` can unpack its weights."""
        return self.method in _FORMS and without_towers(self.config) is None

    def expanded(self, dtype: torch.dtype) -> Any:
        """A quantised model with unpacked weights, which is saved as one that was never quantised."""
        model, _ = self.unpacked(dtype, {"output_loading_info": True})
        model.is_quantized, model.hf_quantizer, model._weight_conversions = False, None, None
        return model

    def packed(self, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """`unpacked`, but linear layers keep their stored form.

        Raises:
            BaseModelError: the stored form cannot stay packed.
        """
        layers = self._layers
        source: str | None = self.source
        options = {**options, "config": layers.model.config, "quantization_config": _Packed(layers.forms, dtype)}
        if has_experts(layers.model):
            options["experts_implementation"] = "eager"  # the reference pass of the proof reads experts one by one
        if isinstance(layers, _GgufLayers):
            options, source = {**options, "state_dict": layers.tensors(dtype)}, None
        model, report = _loaded(type(layers.model), source, dtype, options)
        model.config.name_or_path = self.source
        return model, report

    @functools.cached_property
    def _layers(self) -> _Layers:
        config = copy.deepcopy(self.config)
        if self.gguf is not None:
            return _GgufLayers(Path(self.source) / self.gguf, config)
        quantised = _quantisation(config)
        if not quantised:
            raise BaseModelError(f"base {self.source!r} is not quantised, so it cannot stay packed; {_UNPACK}")
        form_of = _FORMS.get(str(self.method))
        del config.quantization_config
        model = empty_model(config)
        forms = None if form_of is None else form_of(model, quantised)
        if forms is None:
            raise BaseModelError(
                f"base {self.source!r} is quantised ({self.method}), and only these can stay packed: GGUF files, fp8 with "
                f"block scales, MXFP4, and nf4 of bitsandbytes; {_UNPACK}, or use the original base"
            )
        return _Layers(model, forms)


def _quantisation(config: Any) -> dict[str, Any]:
    said = getattr(config, "quantization_config", None) or {}
    return said if isinstance(said, dict) else dict(said.to_dict())


def _loaded(kind: Any, source: str | None, dtype: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    with made_on_cpu():
        loaded: tuple[Any, Any] = kind.from_pretrained(source, dtype=dtype, attn_implementation="eager", **options)
    return loaded


def empty_model(config: Any) -> Any:
    """A model without weights."""
    kind = without_towers(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config) if kind is None else kind(config)


@dataclass
class _Layers:
    """A model without weights or quantisation settings, and the forms of its packed layers, by path."""

    model: Any
    forms: dict[str, Form]


class _GgufLayers(_Layers):
    """The layers of a GGUF file, by the model's names."""

    def __init__(self, path: Path, config: Any) -> None:
        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        if architecture not in _ROTATED:
            raise BaseModelError(
                f"{path} holds a model of architecture {architecture!r}, and only {', '.join(_ROTATED)} can stay packed; "
                f"{_UNPACK}"
            )
        kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        super().__init__(empty_model(config), {})
        self._stored, self._rotated = {}, _ROTATED[architecture]
        for name, _ in self.model.named_parameters():
            path_of, _, leaf = name.rpartition(".")
            tensor = stored.get(f"{names.get_name(path_of)}.{leaf}")
            if tensor is None:
                continue  # transformers handles tied tensors and reports missing ones
            self._stored[name] = tensor
            kind_of = int(tensor.tensor_type)
            if kind_of in GGML_BLOCK and isinstance(self.model.get_submodule(path_of), nn.Linear):
                self.forms[path_of] = GgufBlocks(kind_of)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors, packed or in `dtype`."""
        return {name: self._rows_in_order(name, self._read(name, dtype)) for name in self._stored}

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._stored[name]
        if name.rpartition(".")[0] in self.forms and name.endswith(".weight"):
            return torch.from_numpy(np.array(tensor.data))
        return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).to(dtype)

    def _rows_in_order(self, name: str, rows: Tensor) -> Tensor:
        """Undo ggml's interleaving of the two halves of each head's rows, which its rotary embedding uses."""
        layer, config = name.split(".")[-2], self.model.config
        if layer not in self._rotated:
            return rows
        heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
        halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2)
        return halves.flatten(0, 2).contiguous()


def _float8(model: Any, quantised: Mapping[str, Any]) -> dict[str, Form] | None:
    block = quantised.get("weight_block_size")
    if not block:
        return None
    if has_experts(model):
        raise BaseModelError(f"a base in fp8 that has experts cannot stay packed yet; {_UNPACK}")
    left_out = [*(quantised.get("modules_to_not_convert") or ()), "lm_head"]
    return {
        path: Float8Blocks(tuple(block)) for path, _ in _linears(model) if not any(part in path for part in left_out)
    }


def _mxfp4(model: Any, quantised: Mapping[str, Any]) -> dict[str, Form] | None:
    """Only the experts of gpt-oss are packed."""
    return {
        path: Mxfp4Blocks()
        for path, _ in model.named_parameters()
        if path.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }


def _nf4(model: Any, quantised: Mapping[str, Any]) -> dict[str, Form] | None:
    if not quantised.get("load_in_4bit") or quantised.get("bnb_4bit_quant_type") != "nf4" or has_experts(model):
        return None
    nested = bool(quantised.get("bnb_4bit_use_double_quant"))
    left_out = quantised.get("llm_int8_skip_modules") or ["lm_head"]
    return {
        path: Nf4Blocks(linear.in_features, nested)
        for path, linear in _linears(model)
        if should_convert_module(path, left_out)
    }


_FORMS: Mapping[str, Callable[[Any, Mapping[str, Any]], dict[str, Form] | None]] = {
    "fp8": _float8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _nf4,
}
"""What finds the form of each packed layer, by a checkpoint's quantisation method; None if such layers cannot stay packed."""


def _linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear))
