"""Weights that stay as a checkpoint packed them, in a quarter to a half of the memory of bfloat16.

For each product their numbers are written out into a matrix that is let go afterwards, a slice of rows at a time, each by
itself; the product is the one that unpacked weights have. So a packed base gives the bits of the same base unpacked.

Legend: K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.model.frozen_weight import FrozenWeight

BaseFormat = Literal["auto", "unpacked", "packed"]

_SLICE = 1 << 20
"""Numbers that are written out at a time: what is made on the way takes several times their memory."""


class Form(Protocol):
    """How numbers are packed into tensors."""

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type of each tensor of a weight [N, K], by the name that a checkpoint gives it."""
        ...

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Some rows of the weight, in fp32."""
        ...


@dataclass(frozen=True)
class GgufBlocks:
    """Blocks of one of ggml's types: a row is so many of them."""

    ggml_type: int

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """One row of bytes for each output."""
        from transformers.integrations.gguf.dequant import row_bytes

        return {"weight": ((n_out, row_bytes(self.ggml_type, n_in)), torch.uint8)}

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """As transformers unpacks them."""
        from transformers.integrations.gguf.dequant import dequantize

        chosen = tensors["weight"][rows]
        numbers: Tensor = dequantize(chosen, self.ggml_type, torch.float32)
        return numbers.view(len(chosen), -1)


@dataclass(frozen=True)
class Float8Blocks:
    """Numbers of eight bits, and a scale for every block of rows and columns."""

    block: tuple[int, int]

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The numbers, and their scales; blocks at the edges may be smaller."""
        scales = (-(-n_out // self.block[0]), -(-n_in // self.block[1]))
        return {"weight": ((n_out, n_in), torch.float8_e4m3fn), "weight_scale_inv": (scales, torch.float32)}

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Each number times the scale of its block."""
        numbers_NK = tensors["weight"][rows].float()
        n, k = numbers_NK.shape
        at = torch.arange(rows.start, rows.start + n, device=numbers_NK.device) // self.block[0]
        scales = tensors["weight_scale_inv"][at].repeat_interleave(self.block[1], dim=1)
        return numbers_NK * scales[:, :k]


class PackedLinear(nn.Module):
    """A linear layer as a checkpoint packed it; its tensors have the checkpoint's names."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, form: Form, dtype: torch.dtype) -> None:
        """In the place of a layer whose weight has not been loaded."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.form, self.dtype = form, dtype
        tensors = form.tensors(self.out_features, self.in_features)
        self._names = tuple(tensors)
        for name, (shape, kind) in tensors.items():
            empty = torch.empty(shape, dtype=kind, device=linear.weight.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", linear.bias)

    def write(self, out_NK: Tensor) -> None:
        """Write the weight out, in the type of `out_NK`."""
        tensors = {name: getattr(self, name) for name in self._names}
        step = max(1, _SLICE // self.in_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, min(start + step, self.out_features))
            out_NK[rows] = self.form.numbers(tensors, rows)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, as the layer that it stands for does."""
        return F.linear(x, _written([self]), self.bias)


class PackedWeight(FrozenWeight):
    """The weights of packed layers that read the same input, one below the other."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        nn.Module.__init__(self)
        self.layers: Sequence[PackedLinear] = nn.ModuleList(layers)  # type: ignore[assignment]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.register_parameter("bias", nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None)
        self._settle()

    @property
    def shape(self) -> torch.Size:
        """Of all of them, [N, K]."""
        return torch.Size((sum(layer.out_features for layer in self.layers), self.layers[0].in_features))

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are multiplied with."""
        return self.layers[0].dtype

    def dense(self) -> Tensor:
        """The numbers [N, K], written out anew."""
        return _written(self.layers)


def _written(layers: Sequence[PackedLinear]) -> Tensor:
    """The weights of layers that read the same input, one below the other [N, K]."""
    first, sizes = layers[0], [layer.out_features for layer in layers]
    out_NK = torch.empty(sum(sizes), first.in_features, dtype=first.dtype, device=next(first.parameters()).device)
    for layer, rows in zip(layers, out_NK.split(sizes), strict=True):
        layer.write(rows)
    return out_NK


def frozen_weight(linear: nn.Linear | PackedLinear) -> FrozenWeight:
    """The weight of one layer."""
    return PackedWeight([linear]) if isinstance(linear, PackedLinear) else FrozenWeight(linear.weight, linear.bias)


def joint_weight(weights: Sequence[FrozenWeight]) -> FrozenWeight:
    """Weights of layers that read the same input, one below the other; packed only where all of them are."""
    packed = [one for one in weights if isinstance(one, PackedWeight)]
    if len(packed) == len(weights):
        return PackedWeight([layer for one in packed for layer in one.layers])
    biases = [one.bias.detach() for one in weights if one.bias is not None]
    return FrozenWeight(torch.cat([one.dense().detach() for one in weights]), torch.cat(biases) if biases else None)


def n_hidden(model: nn.Module) -> int:
    """Numbers of a model that its parameters do not count, because several of them lie in one."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    stored = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return sum(layer.in_features * layer.out_features for layer in layers) - stored
