"""What fails where kernels are compiled, run or recorded, and why."""

from __future__ import annotations

import torch


def kernel_failures() -> tuple[type[Exception], ...]:
    """What torch, Triton and the driver raise where a kernel does not compile or run; descriptors assert aligned addresses."""
    kinds = RuntimeError, AttributeError, AssertionError
    try:
        from triton.errors import TritonError  # type: ignore[import-untyped, unused-ignore]
    except ImportError:  # most machines without a GPU have no Triton
        return kinds
    return *kinds, TritonError


def cause_of(error: Exception) -> Exception:
    """Torch raises an error of its own where a recording ends that failed before."""
    before, of_torch = error.__context__, isinstance(error, RuntimeError)
    return before if of_torch and type(error) is not torch.OutOfMemoryError and isinstance(before, Exception) else error


def reason_of(error: BaseException) -> str:
    """A line that says why kernels fail. Triton's errors begin with where they are, and have what is wrong by itself."""
    text = str(getattr(error, "error_message", None) or error).strip()
    return next(iter(text.splitlines()), type(error).__name__)
