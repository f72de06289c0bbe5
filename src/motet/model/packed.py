"""Weights that stay packed as in the checkpoint and take a quarter to a half of the memory of bfloat16.

For each product, the weights are unpacked into a temporary matrix, a slice of rows at a time. The product is the same as
with unpacked weights, so a packed base gives the same bits as the unpacked one.

Legend: E experts, K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.model.frozen_weight import FrozenWeight
from motet.model.packed_forms import Form

BaseFormat = Literal["auto", "unpacked", "packed"]

_SLICE = 1 << 20
"""Numbers unpacked at a time: intermediate results take several times their memory."""


def _unpack(form: Form, tensors: Mapping[str, Tensor], out_NK: Tensor) -> None:
    """Write the numbers of packed tensors, a slice of rows at a time."""
    n_out, n_in = out_NK.shape
    step = max(1, _SLICE // n_in)
    for start in range(0, n_out, step):
        rows = slice(start, min(start + step, n_out))
        out_NK[rows] = form.numbers(tensors, rows)


class PackedLinear(nn.Module):
    """A linear layer with packed weights; its tensors have the checkpoint's names."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, form: Form, dtype: torch.dtype) -> None:
        """Replace a layer whose weight has not been loaded."""
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
        """Unpack the weight into `out_NK`, in the dtype of `out_NK`."""
        _unpack(self.form, {name: getattr(self, name) for name in self._names}, out_NK)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply as the replaced layer does."""
        return F.linear(x, _written([self]), self.bias)


class PackedExperts(nn.Module):
    """Packed weights of one projection of a layer's experts; read like a tensor [E, K, N]."""

    def __init__(self, shape: tuple[int, int, int], form: Form, dtype: torch.dtype, device: torch.device) -> None:
        """Replace a parameter of that shape that has not been loaded."""
        super().__init__()
        self.shape, self.form, self.dtype = torch.Size(shape), form, dtype
        n_experts, n_in, n_out = shape
        tensors = form.tensors(n_out, n_in)
        self._names = tuple(tensors)
        for name, (size, kind) in tensors.items():
            empty = torch.empty(n_experts, *size, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def __getitem__(self, number: int | Tensor) -> Tensor:
        """The weight of one expert [K, N], unpacked at each call."""
        tensors = {name: getattr(self, name)[number] for name in self._names}
        _, n_in, n_out = self.shape
        out_KN = torch.empty(n_in, n_out, dtype=self.dtype, device=next(iter(tensors.values())).device)
        _unpack(self.form, tensors, out_KN.t())
        return out_KN


class PackedWeight(FrozenWeight):
    """The stacked weights of packed layers that read the same input."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        nn.Module.__init__(self)
        self.layers: Sequence[PackedLinear] = nn.ModuleList(layers)  # type: ignore[assignment]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.register_parameter("bias", nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None)
        self._settle()

    @property
    def shape(self) -> torch.Size:
        """[N, K], N over all layers."""
        return torch.Size((sum(layer.out_features for layer in self.layers), self.layers[0].in_features))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the unpacked numbers."""
        return self.layers[0].dtype

    def dense(self) -> Tensor:
        """The numbers [N, K], unpacked at each call."""
        return _written(self.layers)


def _written(layers: Sequence[PackedLinear]) -> Tensor:
    """The stacked weights [N, K] of layers that read the same input."""
    first, sizes = layers[0], [layer.out_features for layer in layers]
    out_NK = torch.empty(sum(sizes), first.in_features, dtype=first.dtype, device=next(first.parameters()).device)
    for layer, rows in zip(layers, out_NK.split(sizes), strict=True):
        layer.write(rows)
    return out_NK


def frozen_weight(linear: nn.Linear | PackedLinear) -> FrozenWeight:
    """The weight of one layer."""
    return PackedWeight([linear]) if isinstance(linear, PackedLinear) else FrozenWeight(linear.weight, linear.bias)


def joint_weight(weights: Sequence[FrozenWeight]) -> FrozenWeight:
    """The stacked weights of layers that read the same input; packed only if all of them are."""
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) == len(weights):
        return PackedWeight([layer for part in packed for layer in part.layers])
    biases = [part.bias.detach() for part in weights if part.bias is not None]
    return FrozenWeight(torch.cat([part.dense().detach() for part in weights]), torch.cat(biases) if biases else None)


@torch.no_grad()
def unpack(model: nn.Module) -> None:
    """Replace packed layers by linear ones, permanently."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, PackedLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(_written([layer]), requires_grad=False)
            linear.register_parameter("bias", layer.bias)
            model.set_submodule(path, linear)


def n_hidden(model: nn.Module) -> int:
    """Number of weights missing from the parameters' sizes, because one element packs several weights."""
    sizes = {
        module: module.in_features * module.out_features if isinstance(module, PackedLinear) else module.shape.numel()
        for module in model.modules()
        if isinstance(module, PackedLinear | PackedExperts)
    }
    return sum(sizes.values()) - sum(parameter.numel() for module in sizes for parameter in module.parameters())
