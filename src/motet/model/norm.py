"""RMS norms with a closed-form gradient.

Autograd's gradient takes seven passes over fp32 copies, which it stores for each norm. Its bits may also depend on a
row's position: `pow` rounds differently at the end of a tensor.

The forward pass is unchanged. Each norm is checked at load; other forms, such as 1 + weight, keep autograd's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest accepted difference from autograd's gradient, relative to its largest element."""

_WIDTH = 64
"""Width of the input on which norms are checked."""


def speed_up_norms(model: nn.Module) -> int:
    """Give every RMS norm that passes the check the closed-form gradient; returns their number."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    like = next((parameter for parameter in model.parameters() if parameter.dtype in _TOLERANCE), None)
    return 0 if like is None else sum(_speed_up(module, like) for module in norms)


def _speed_up(module: nn.Module, like: Tensor) -> bool:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)  # the norms of Gemma's values have none
    if not isinstance(epsilon, float) or (weight is not None and weight.dtype not in _TOLERANCE):
        return False
    tried = like.new_ones(_WIDTH) if weight is None else weight
    stock = module.forward

    def forward(x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return stock(x)  # type: ignore[no-any-return]
        output: Tensor = _RMSNorm.apply(x, weight, epsilon, stock)  # type: ignore[no-untyped-call]
        return output

    if not _agrees(forward, stock, tried):
        return False
    module.forward = forward
    return True


def _agrees(ours: Callable[[Tensor], Tensor], stock: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, slope = (torch.randn(1, 4, len(weight), generator=generator).to(weight) for _ in range(2))
    with torch.enable_grad():
        leaf = x.requires_grad_()
        shown, wanted = (torch.autograd.grad(norm(leaf), leaf, slope)[0].float() for norm in (ours, stock))
    return float((shown - wanted).abs().max()) <= _TOLERANCE[weight.dtype] * float(wanted.abs().max())


class _RMSNorm(torch.autograd.Function):
    """y = w · x / rms(x) over the last dimension (Zhang & Sennrich 2019)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, stock: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.epsilon = epsilon
        ctx.save_for_backward(x, weight)
        return stock(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        scaled = x.float()
        inverse = torch.rsqrt(scaled.square().mean(-1, keepdim=True).add_(ctx.epsilon))
        normal = scaled * inverse
        slope = (grad.clone() if weight is None else grad * weight).float()
        along = (slope * normal).mean(-1, keepdim=True)
        return slope.sub_(normal.mul_(along)).mul_(inverse).to(x.dtype), None, None, None
