"""Import this before `motet.model.attention.triton_attention`: without a CUDA device its kernels run in Triton's interpreter.

Triton asks the environment whenever it makes a kernel. What it has made of its own before, because another test imported it,
is made again. The interpreter multiplies matrices with numpy, whose rows have other bits at another place in the matrix; tiles
of a GPU do not, so here every element is summed in order.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_order(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
    """Total + left · right, summed in order: numpy adds matrices of a stack one after another."""
    stack = np.empty((len(right) + 1, *total.shape), np.float32)
    stack[0] = total
    np.multiply(left.T[:, :, None], right[:, None, :], out=stack[1:])
    summed: Matrix = np.add.reduce(stack, axis=0)
    return summed


_products: list[Callable[[Matrix, Matrix, Matrix], Matrix]] = [in_order]


@contextlib.contextmanager
def multiplied_by(product: Callable[[Matrix, Matrix, Matrix], Matrix]) -> Iterator[None]:
    """Let kernels on the CPU multiply otherwise: total + left · right of fp32 matrices."""
    _products.append(product)
    try:
        yield
    finally:
        _products.pop()


def _widened(matrix: Any) -> Matrix:
    """In fp32, as tensor cores multiply; the interpreter has bfloat16 as the upper halves of fp32."""
    data: Any = matrix.data
    wide: Matrix = (
        (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data.astype(np.float32)
    )
    return wide


@np.errstate(all="ignore")
def _dot(_builder: Any, left: Any, right: Any, total: Any, *_precision: Any) -> Any:
    return type(total)(_products[-1](_widened(left), _widened(right), total.data), total.dtype.scalar)


_patched: set[str] = set()
"""The modules of Triton's language that the launch under way has replaced."""


def _patched_once(patch: Callable[[Any], Any], function: Any) -> Any:
    """Triton looks through its language for every function that a kernel calls, for longer than most functions take."""
    needed = _languages(function)
    if needed <= _patched:
        return interpreter._LangPatchScope()  # the launch restores what it has replaced
    scope = patch(function)
    restore = scope.restore

    def restored() -> None:
        restore()
        _patched.clear()

    _patched.update(needed)
    scope.restore = restored
    return scope


@functools.cache
def _languages(function: Any) -> frozenset[str]:
    """The modules of Triton's language by which a function knows it."""
    known = {getattr(value, "__name__", "") for value in function.__globals__.values() if inspect.ismodule(value)}
    return frozenset(known & {"triton.language", "triton.language.core"})


if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton.language", reason="there is no Triton for this platform")
    from triton.runtime import interpreter  # type: ignore[import-untyped, unused-ignore]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped, unused-ignore]

    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_lang = functools.partial(_patched_once, interpreter._patch_lang)
    for module in [module for name, module in sys.modules.items() if name.startswith("triton.language")]:
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(function.fn))
