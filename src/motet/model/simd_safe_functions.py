"""Elementwise functions on a CPU, with bits independent of a number's position, its neighbours and the threads.

torch computes some functions (`silu`, `sigmoid`, …) with other code at the end of a stretch than in whole SIMD vectors,
and each thread gets one stretch. So the number of rows determines where stretches end, and thus which numbers get other
bits. This module splits a tensor first, so that every stretch has whole vectors or whole rows.

The proof of a base finds the modules that call such functions; other modules do not become slower.

Legend: T rows, N numbers of a row.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[[Tensor], Tensor]

_LANES = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Numbers that torch computes at a time: two vectors of AVX512, or four of AVX2."""
_STRETCH = 32768
"""Minimum numbers per thread (`at::internal::GRAIN_SIZE`)."""
_GELU = 16384
"""Above this many numbers, all threads share a `gelu`, but not its gradient."""

_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.silu, F.gelu, F.softplus, F.mish, F.elu, torch.sigmoid, torch.exp2, torch.pow, torch.rsqrt,
        Tensor.sigmoid, Tensor.exp2, Tensor.pow, Tensor.__pow__, Tensor.rsqrt,
    }
)  # fmt: skip
"""Functions whose input is split here."""
_OPERATORS = {
    "aten::silu", "aten::silu_", "aten::sigmoid", "aten::sigmoid_", "aten::gelu", "aten::softplus", "aten::mish", "aten::mish_",
    "aten::elu", "aten::elu_", "aten::exp2", "aten::exp2_", "aten::glu",
}  # fmt: skip
"""Operations that torch computes differently at the end of a stretch."""
_PLAIN_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""Powers that torch computes by products and roots."""


def by_whole_vectors(function: Function, x: Tensor, *, gelu: bool = False) -> Tensor:
    """Apply an elementwise function by whole vectors; the gradient, if x needs one, is computed in the same way."""
    lanes = _LANES.get(x.dtype, 0)
    if x.device.type != "cpu" or not lanes or not x.numel():
        return function(x)
    cut = _Cut(function, lanes, torch.get_num_threads(), gelu)
    if not x.is_contiguous():
        if not any(stride == 1 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            return function(x)  # torch computes such numbers one by one
        if x.stride(-1) == 1 and _are_rows(x):
            return cut.of_rows(x)
        x = x.contiguous()
    y = function(x) if cut.is_even(x.numel()) else cut.of_numbers(x.reshape(-1)).view(x.shape)
    if y.requires_grad:
        y.register_hook(Tensor.contiguous)  # otherwise the gradient's stretches would be rows
    return y


def _are_rows(x: Tensor) -> bool:
    """Whether a tensor [..., T, N] is a matrix with gaps between rows."""
    outer = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return all(above[1] == size * stride for above, (size, stride) in itertools.pairwise(outer))


@dataclass(frozen=True)
class _Cut:
    """How a tensor is split before a function is applied."""

    function: Function
    lanes: int
    threads: int
    gelu: bool

    def stretches(self, n: int) -> int:
        """Number of equal parts for `n` numbers, so that threads get whole parts in both passes."""
        sharing = min(self.threads, -(-n // _STRETCH))
        return math.lcm(sharing, self.threads) if self.gelu and n > _GELU else sharing

    def is_even(self, n: int) -> bool:
        """Whether `n` consecutive numbers are cut into whole vectors."""
        return n % (self.stretches(n) * self.lanes) == 0

    def of_numbers(self, flat: Tensor) -> Tensor:
        """Compute whole vectors, as many at a time as threads share evenly; the remainder is padded to a vector."""
        n, parts, start = len(flat) - len(flat) % self.lanes, list[Tensor](), 0
        while start < n:
            count = n - start
            while left := count % (self.stretches(count) * self.lanes):
                count = count - left or min(count, _GELU)
            parts.append(self.function(flat[start : start + count]))
            start += count
        if rest := len(flat) - n:
            parts.append(self.function(F.pad(flat[n:], (0, self.lanes - rest)))[:rest])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def of_rows(self, x: Tensor) -> Tensor:
        """Compute rows with gaps between them in stretches of whole rows, so that all rows end in the same way."""
        n_rows, width = x.numel() // x.shape[-1], x.shape[-1]
        if n_rows % self.stretches(x.numel()) == 0:
            return self.function(x)
        rows_TN, parts, start = x.flatten(0, -2), list[Tensor](), 0
        while start < n_rows:
            count = n_rows - start
            while count > 1 and (left := count % self.stretches(count * width)):
                count = count - left or 1
            part = rows_TN[start : start + count]
            long = count == 1 and self.stretches(width) > 1
            parts.append(self.of_numbers(part.flatten())[None] if long else self.function(part))
            start += count
        return torch.cat(parts).view(x.shape)


class _ByWholeVectors(TorchFunctionMode):
    """Applies `by_whole_vectors` to the functions called inside it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _FUNCTIONS and _is_one_way(args, options):
            return by_whole_vectors(lambda x: func(x, *args[1:], **options), args[0], gelu=func is F.gelu)
        return func(*args, **options)


def _is_one_way(args: Any, options: dict[str, Any]) -> bool:
    """Whether a call only computes a new tensor from a single tensor, its first argument."""
    tensors = [place for place, argument in enumerate(args) if isinstance(argument, Tensor)]
    return tensors == [0] and not options.get("inplace") and "out" not in options


class Uneven(TorchDispatchMode):
    """Records the modules that call functions whose bits differ at the end of a stretch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = set(model.modules())
        self.modules: dict[nn.Module, str] = {}
        """Name of the function by module."""
        self.elsewhere: set[str] = set()
        """Functions called outside the model's modules."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler is not imported to be told to leave this alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends_on_place(func, args):
            name = func._schema.name.removeprefix("aten::")
            match self._caller():
                case nn.Module() as module:
                    self.modules[module] = name
                case None:
                    self.elsewhere.add(name)
        return func(*args, **(kwargs or {}))

    def _caller(self) -> nn.Module | Callable[..., Any] | None:
        """The innermost running one of the model's modules and `by_whole_vectors`; None if neither runs."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is by_whole_vectors.__code__:
                return by_whole_vectors
            own = frame.f_locals.get("self")
            if isinstance(own, nn.Module) and own in self._own:
                return own
            frame = frame.f_back
        return None


def _depends_on_place(func: Any, args: Any) -> bool:
    name = func._schema.name
    if name in ("aten::pow", "aten::pow_"):
        return not isinstance(args[1], Tensor) and not _is_plain(args[1], args[0].dtype)
    if name in ("aten::rsqrt", "aten::rsqrt_"):
        return bool(args[0].dtype != torch.float32)
    return name in _OPERATORS


def _is_plain(power: float, dtype: torch.dtype) -> bool:
    """Whether a power and its gradient, power · x^(power − 1), have the same bits in every place."""
    # at the end of a stretch, an inverse root in half precision is rounded twice
    plain = [exponent for exponent in _PLAIN_POWERS if exponent != -0.5 or dtype == torch.float32]
    return power in plain and (power in (0, 1) or power - 1 in plain)


def take_whole_vectors(module: nn.Module) -> None:
    """Make a module compute its functions by whole vectors, in the forward and the backward pass."""
    stock, mode = module.forward, _ByWholeVectors()

    @functools.wraps(stock)
    def forward(*args: Any, **options: Any) -> Any:
        with mode:
            return stock(*args, **options)

    module.forward = forward
