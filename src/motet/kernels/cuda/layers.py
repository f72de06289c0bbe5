"""The weights and constants of a covered decoder, as the kernels of this room read them.

Legend: D model width, E head width, N outputs, K inputs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.kernels.cuda.decoder_shape import DecoderShape
from motet.kernels.cuda.kernels import rotary
from motet.kernels.cuda.products import ProductWeight
from motet.model.attention import LayerCall
from motet.model.covered_decoder import (
    angles,
    attention_calls,
    embedding_scale,
    gate_of,
    linears_of,
    norm_weight,
    norms_of,
    query_scales,
    rotates,
)
from motet.model.frozen_weight import FrozenWeight
from motet.model.lora_model import LoraModel, head_width


@dataclass(frozen=True)
class LayerPlan:
    """One layer of the decoder. Norms are fp32 factors, None where the layer lacks one."""

    products: tuple[ProductWeight, ...]
    """Queries, keys and values; attention output; gate and up; down."""
    call: LayerCall
    norm_in: Tensor | None
    norm_attended: Tensor | None
    """Of what attention adds to the residual stream."""
    norm_mlp: Tensor | None
    norm_done: Tensor | None
    """Of what the MLP adds to the residual stream."""
    norm_q: Tensor | None
    norm_k: Tensor | None
    cosines: Tensor | None
    """fp32 [positions, rotated / 2]; None if the layer does not rotate."""
    sines: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecoderPlan:
    """A base: its shapes, constants and layers."""

    layers: tuple[LayerPlan, ...]
    embedding: Tensor
    head: ProductWeight
    norm_out: Tensor
    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    rotated: int
    """Numbers of a head that are rotated, in all layers that rotate."""
    norms_span: int
    """What norms of queries and keys span (see `kernels.rotary`)."""
    tanh: bool
    """Whether the gate is GELU by tanh, else SiLU."""
    epsilon: float
    embedding_scale: float
    residual: float
    """Factor of what attention and MLP add to the residual stream."""
    query_scales: Tensor | None
    """Factors of queries, fp32 [positions]."""

    @property
    def weights(self) -> list[ProductWeight]:
        """Those of all products."""
        return [*(weight for layer in self.layers for weight in layer.products), self.head]

    @property
    def shape(self) -> DecoderShape:
        """Its sizes."""
        layer, size = self.layers[0], self.embedding.element_size()
        shapes = [(len(weight.weight_NK), weight.weight_NK.shape[1]) for weight in layer.products]
        return DecoderShape(
            len(self.layers), tuple(shapes), len(self.layers) * 2 * self.kv_heads * self.head_width * size,
            itemsize=size, norms_of_added=sum(norm is not None for norm in (layer.norm_attended, layer.norm_done)),
        )  # fmt: skip

    @classmethod
    def of(cls, base: LoraModel) -> DecoderPlan:
        """The plan of a covered base. It reads the model's own weights, and copies of its norms."""
        decoder: Any = base.decoder
        config = base.model.config.get_text_config()
        calls = attention_calls(base)
        angles_of = angles(decoder, config, base.info.max_positions, contextlib.nullcontext)
        on_device: dict[int, tuple[Tensor, Tensor]] = {}

        def turned(index: int) -> tuple[Tensor, Tensor]:
            cosines, sines = angles_of(index)
            if id(cosines) not in on_device:  # layers of one kind share them
                on_device[id(cosines)] = _numbers(cosines, base), _numbers(sines, base)
            return on_device[id(cosines)]

        layers = tuple(
            _layer(
                base,
                module,
                calls[index],
                turned(index) if rotates(module.self_attn, config) else (None, None),
            )
            for index, module in enumerate(decoder.layers)
        )
        norm_q, width = norms_of(decoder.layers[0])["norm_q"], head_width(config)
        span = (
            rotary.NO_NORM if norm_q is None else rotary.EACH_HEAD if len(norm_q.weight) == width else rotary.ALL_HEADS
        )
        scales = query_scales(config, base.info.max_positions)
        return cls(
            layers=layers,
            embedding=decoder.embed_tokens.weight.detach(),
            head=_weight(base.head),
            norm_out=_numbers(norm_weight(decoder.norm), base),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=width,
            inner=layers[0].products[3].weight_NK.shape[1],
            rotated=2 * angles_of(0)[0].shape[1],
            norms_span=span.value,
            tanh=gate_of(config) == "gelu_pytorch_tanh",
            epsilon=config.rms_norm_eps,
            embedding_scale=embedding_scale(decoder, config),
            residual=getattr(config, "residual_multiplier", 1.0),
            query_scales=None if scales is None else _numbers(scales, base),
        )


def _layer(base: LoraModel, module: Any, call: LayerCall, turned: tuple[Tensor | None, Tensor | None]) -> LayerPlan:
    norms = {
        name: None if norm is None else _numbers(norm_weight(norm), base) for name, norm in norms_of(module).items()
    }
    products = tuple(_weight(linear.fused.frozen) for linear, *_ in linears_of(module))
    return LayerPlan(products, call, **norms, cosines=turned[0], sines=turned[1])


def _weight(frozen: FrozenWeight) -> ProductWeight:
    return ProductWeight(frozen.dense().detach(), None if frozen.bias is None else frozen.bias.detach())


def _numbers(tensor: Tensor, base: LoraModel) -> Tensor:
    return tensor.detach().to(base.device, torch.float32).contiguous()
