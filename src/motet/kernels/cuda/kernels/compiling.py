"""How kernels are compiled: for the types of their arguments, so that no number and no address changes the machine code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped, unused-ignore]


def kernel(*aligned: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel. `aligned` are the arguments whose addresses 16 divides; nothing is known of the others.

    Arguments with a capital are constants.

    Raises:
        TypeError: the kernel has no argument of a name in `aligned`.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        arguments = [name for name in inspect.signature(function).parameters if name[0].islower()]
        if unknown := [name for name in aligned if name not in arguments]:
            raise TypeError(f"{function.__name__} has no argument {' and '.join(unknown)}")
        return triton.jit(function, do_not_specialize=[name for name in arguments if name not in aligned])

    return compiled


def part(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return triton.jit(function)
