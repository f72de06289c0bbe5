"""Math of sampling and training outside a base's passes, by Motet's kernels: the same bits on every processor.

Legend: N rows, V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from motet.core.batch import AdamW, Optimizer
from motet.core.types import SamplingParams
from motet.kernels.cpu.library import Product
from motet.kernels.cpu.plan import TYPES
from motet.model.adapter_step import AdapterStep, StepNorms
from motet.model.distribution import LogitChanges
from motet.model.lora import AdapterWeights

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Kernels count smaller numbers as zero, and take the most likely token."""


class AdamWStep(ctypes.Structure):
    """The struct `AdamW` of csrc/kernels.hpp."""

    _fields_ = [
        *((name, c_float) for name in ("lr", "beta1", "beta2", "epsilon", "weight_decay", "factor")),
        ("step", c_int64),
    ]


class Learned(ctypes.Structure):
    """The struct of csrc/kernels.hpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("master", "gradient", "mean", "square", "copy")),
        ("type", c_int32),
        ("scaling", c_float),
        ("scaled", c_int64),
        ("n", c_int64),
    ]


class OwnMath:
    """Calls the functions of `csrc/step.cpp` and `csrc/logits.cpp`."""

    def __init__(self, library: ctypes.CDLL, threads: Callable[[], int] = torch.get_num_threads) -> None:
        """`threads` returns the number of threads for a call on logits."""
        self._calls, self._threads = library, threads

    # --- logits -------------------------------------------------------------------------------------------------------

    def draw(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], uniforms_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.distribution.draw`."""
        logits_NV = logits_NV.contiguous()
        n_rows, n_tokens = logits_NV.shape
        temperatures_N = torch.tensor([row.temperature for row in params], dtype=torch.float32)
        tokens_N, logprobs_N = torch.empty(n_rows, dtype=torch.int64), torch.empty(n_rows)
        usable_N = torch.empty(n_rows, dtype=torch.uint8)
        uniforms_N = uniforms_N.double().contiguous()
        outputs = (each.data_ptr() for each in (temperatures_N, uniforms_N, tokens_N, logprobs_N, usable_N))
        self._calls.motet_draw(logits_NV.data_ptr(), n_rows, n_tokens, *outputs, self._threads())
        for row, param in enumerate(params):
            if param.truncates and temperatures_N[row] >= _LEAST_TEMPERATURE and usable_N[row]:
                tokens_N[row] = self._truncated(logits_NV[row], param, float(uniforms_N[row]))
                own = slice(row, row + 1)
                logprobs_N[own], _ = self.logprobs(logits_NV[own], tokens_N[own], param.temperature)
        return tokens_N, logprobs_N, usable_N.bool()

    def _truncated(self, logits_V: Tensor, param: SamplingParams, uniform: float) -> int:
        """Draw a token after min-p, top-k and top-p, in that order; top-p sums from the likeliest token on, in fp64."""
        weights_V = torch.empty_like(logits_V)
        self._calls.motet_weights(logits_V.data_ptr(), len(logits_V), param.temperature, weights_V.data_ptr())
        order = torch.argsort(weights_V, descending=True, stable=True).numpy()
        kept_V = weights_V.double().numpy()
        ranked = kept_V[order]
        n_kept = int(np.count_nonzero(ranked >= param.min_p * ranked[0]))
        n_kept = min(n_kept, param.top_k or n_kept)
        if param.top_p < 1:
            ends = np.cumsum(ranked[:n_kept])
            n_kept = max(int(np.count_nonzero(ends - ranked[:n_kept] < param.top_p * ends[-1])), 1)
        kept_V[order[n_kept:]] = 0
        ends = np.cumsum(kept_V)
        place = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
        return min(place, int(np.flatnonzero(kept_V)[-1]))

    def logprobs(
        self, logits_NV: Tensor, tokens_N: Tensor, temperature: float, *, slope: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprob of a token per row, and entropies, [N] each; `slope` replaces logits by gradients of the logprobs."""
        logits_NV = logits_NV if slope else logits_NV.contiguous()
        assert logits_NV.is_contiguous() and logits_NV.dtype == torch.float32
        (n_rows, n_tokens), tokens_N = logits_NV.shape, tokens_N.contiguous()
        if n_rows and not 0 <= int(tokens_N.min()) <= int(tokens_N.max()) < n_tokens:
            raise IndexError(f"a token is outside the vocabulary of {n_tokens}")
        logprobs_N, entropies_N = torch.empty(n_rows), torch.empty(n_rows)
        outputs = logprobs_N.data_ptr(), entropies_N.data_ptr(), int(slope), self._threads()
        self._calls.motet_logprobs(logits_NV.data_ptr(), n_rows, n_tokens, tokens_N.data_ptr(), temperature, *outputs)
        return logprobs_N, entropies_N

    def finish(self, raw_NV: Tensor, changes: LogitChanges) -> Tensor:
        """See `LogitChanges.finish`."""
        return changes.finish(raw_NV)

    def head_logprobs(
        self, raw_NV: Tensor, changes: LogitChanges, tokens_N: Tensor, temperatures: Sequence[float], *, slope: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `MathKernels`."""
        logits_NV, found, start = changes.finish(raw_NV), [], 0
        for temperature, rows in itertools.groupby(temperatures):
            run = slice(start, start := start + len(list(rows)))
            found.append(self.logprobs(logits_NV[run], tokens_N[run], temperature, slope=slope))
        logprobs_N, entropies_N = map(torch.cat, zip(*found, strict=True))
        return logprobs_N, entropies_N, changes.slope(raw_NV, logits_NV) if slope else None

    # --- losses -------------------------------------------------------------------------------------------------------

    def exp(self, x: Tensor) -> Tensor:
        """e^x in fp64, rounded to the dtype of x; differentiable."""
        return _Exp.apply(x, self, 0.0)  # type: ignore[no-any-return,no-untyped-call]

    def expm1(self, x: Tensor) -> Tensor:
        """e^x − 1 in fp64, rounded to the dtype of x; differentiable."""
        return _Exp.apply(x, self, 1.0)  # type: ignore[no-any-return,no-untyped-call]

    def exp_doubles(self, x: Tensor) -> Tensor:
        """e^x as fp64, without a gradient."""
        x = x.detach().double().contiguous()
        out = torch.empty_like(x)
        self._calls.motet_exp(x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def total(self, x: Tensor) -> Tensor:
        """Sum in fp64 with a single rounding (`math.fsum`); NaN on overflow."""
        try:
            total = math.fsum(x.tolist())
        except (OverflowError, ValueError):  # ∞ − ∞, or larger than all doubles
            total = math.nan
        return torch.tensor(total, dtype=torch.float64)

    def values(self, hidden_ND: Tensor, head: Tensor) -> Tensor:
        """Values [N] of a value head: hidden · head[:-1] + head[-1]."""
        return _Values.apply(hidden_ND, head, self)  # type: ignore[no-any-return,no-untyped-call]

    def product(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """Product [M, N] of fp32 matrices."""
        a_MK, b_KN = a_MK.detach().float().contiguous(), b_KN.detach().float().contiguous()
        (m, k), n = a_MK.shape, b_KN.shape[1]
        packed, out_MN = torch.empty(self._calls.motet_packed_bytes(0, k, n), dtype=torch.uint8), torch.empty(m, n)
        self._calls.motet_pack(0, b_KN.data_ptr(), n, 1, k, n, 0, packed.data_ptr())
        call = Product(a_MK.data_ptr(), 0, k, packed.data_ptr(), 0, k, out_MN.data_ptr(), n, m, k, n, False, 0)
        self._calls.motet_product(ctypes.byref(call), 1)
        return out_MN

    # --- the optimizer ------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Mapping[type[Optimizer], Callable[[Sequence[AdapterStep]], list[StepNorms]]]:
        """See `MathKernels`; gradients are in fp32, and are cleared."""
        return {AdamW: lambda due: [self._step(step) for step in due]}

    def _step(self, step: AdapterStep) -> StepNorms:
        assert isinstance(step.optimizer, AdamW)
        gradient, clip = step.total(), step.optimizer.clip_norm
        norm = self.norm(gradient)
        if norm < math.inf:
            factor = clip / (norm + 1e-6) if norm > clip else 1.0
            self.adamw(step.optimizer, step.number, factor, (step.masters, gradient, *step.state), step.new)
        weights = torch.linalg.vector_norm(step.masters[: step.new.layout.size])
        return StepNorms(norm, float(weights))

    def norm(self, x: Tensor) -> float:
        """The Euclidean norm of an fp32 vector."""
        return float(self._calls.motet_norm(x.data_ptr(), x.numel()))

    def adamw(self, adamw: AdamW, step: int, factor: float, learned: Sequence[Tensor], new: AdapterWeights) -> None:
        """Update masters and moments in place, write the new version and clear the gradient.

        Args:
            adamw: its settings.
            step: its number, from 1.
            factor: multiplies the gradient.
            learned: masters, gradient, mean and square, fp32.
            new: the compute copy of the new masters, still empty.
        """
        options = AdamWStep(adamw.lr, *adamw.betas, adamw.eps, adamw.weight_decay, factor, step)
        vectors = (each.data_ptr() for each in (*learned, new.flat))
        own = Learned(*vectors, TYPES[new.flat.dtype], new.scaling, new.layout.size_a, new.flat.numel())
        self._calls.motet_adamw(ctypes.byref(options), ctypes.byref(own), self._threads())

    # --- angles -------------------------------------------------------------------------------------------------------

    def angles(self) -> contextlib.AbstractContextManager[object]:
        """Context in which torch's cosines, sines and powers of a scalar have the same bits on every processor."""
        return _OwnAngles(self)

    def cos_sin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of fp32 numbers below 2^20."""
        x = x.float().contiguous()
        cosines, sines = torch.empty_like(x), torch.empty_like(x)
        self._calls.motet_cos_sin(x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), x.numel())
        return cosines, sines


class _Exp(torch.autograd.Function):
    """e^x minus a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: OwnMath, less: float) -> Tensor:
        powers = own.exp_doubles(x)
        ctx.save_for_backward(powers.to(x.dtype))
        return (powers - less).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (powers,) = ctx.saved_tensors
        return grad * powers, None, None


class _Values(torch.autograd.Function):
    """hidden · head[:-1] + head[-1], [N]."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head: Tensor, own: OwnMath) -> Tensor:
        ctx.save_for_backward(hidden_ND, head)
        ctx.own = own
        return own.product(hidden_ND, head[:-1, None])[:, 0] + head[-1]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_ND, head = ctx.saved_tensors
        own, ones_N1 = ctx.own, torch.ones(len(grad_N), 1)
        slopes = [own.product(grad_N[None], each)[0] for each in (hidden_ND, ones_N1)]
        return grad_N[:, None] * head[:-1], torch.cat(slopes), None


class _OwnAngles(TorchDispatchMode):
    """Replaces the operations of rotary embeddings whose bits depend on the processor."""

    def __init__(self, own: OwnMath) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler is not imported to be told to leave this alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cos.default:
            return self._own.cos_sin(args[0])[0]
        if func is torch.ops.aten.sin.default:
            return self._own.cos_sin(args[0])[1]
        if func is torch.ops.aten.pow.Scalar:
            base, exponents = args
            with localcontext(prec=40):
                powers = [float(Decimal(base) ** Decimal(each)) for each in exponents.double().flatten().tolist()]
            return torch.tensor(powers, dtype=torch.float64).to(exponents.dtype).view(exponents.shape)
        return func(*args, **(kwargs or {}))
