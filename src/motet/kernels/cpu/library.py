"""Finds the compiled kernels, and selects the fastest form that runs on this processor and gives the right results.

Nothing is compiled here: `pip install` does that if there is a compiler, and `motet doctor --build` later.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import ConfigError
from motet.kernels.cpu import building

ARITHMETICS = {"exact": 0, "exact-dpbf16": 1}
"""Summation orders by name: values of `Arithmetic` in csrc/kernels.hpp."""

FORM = "MOTET_KERNELS_FORM"
"""Environment variable that selects a form by name."""

INSTALLED = Path(__file__).parent / "built"
"""Directory in which `pip install` puts the libraries."""


_PROTOTYPES: dict[str, list[Any]] = {
    # csrc/kernels.hpp
    "form_runs": [c_int32, c_char_p],
    "ceiling": [c_double, c_int32],
    "packed_bytes": [c_int64, c_int32, c_int64, c_int64],
    "pack": [None, c_int32, c_void_p, *[c_int64] * 4, c_int32, c_void_p],
    "product": [None, c_void_p, c_int64],
    "functions": [None, *[c_void_p] * 5, c_int64],
    # csrc/plan.hpp
    "pack_adapter": [None, *[c_void_p] * 3, c_int32, c_int64],
    "kept_bytes": [c_int64, c_void_p, c_void_p],
    "scratch_bytes": [c_int64, c_void_p, c_void_p],
    "forward": [c_char_p, c_void_p, c_void_p],
    "backward": [c_char_p, *[c_void_p] * 3],
    "head": [c_char_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64],
    "head_back": [c_char_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64],
    # csrc/logits.cpp and csrc/step.cpp
    "draw": [None, c_void_p, c_int64, c_int64, *[c_void_p] * 5, c_int64],
    "logprobs": [None, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p, c_void_p, c_int32, c_int64],
    "weights": [None, c_void_p, c_int64, c_float, c_void_p],
    "exp": [None, c_void_p, c_void_p, c_int64],
    "cos_sin": [None, *[c_void_p] * 3, c_int64],
    "norm": [c_double, c_void_p, c_int64],
    "adamw": [None, c_void_p, c_void_p, c_int64],
}
"""The type of each function's result, then those of its arguments."""


class Product(ctypes.Structure):
    """The struct `Product` of csrc/kernels.hpp."""

    _fields_ = [
        ("a", c_void_p),
        ("a_type", c_int32),
        ("lda", c_int64),
        ("b", c_void_p),
        ("b_type", c_int32),
        ("b_k", c_int64),
        ("c", c_void_p),
        ("ldc", c_int64),
        *((name, c_int64) for name in "mkn"),
        ("add", c_bool),
        ("arithmetic", c_int32),
    ]


@dataclass(frozen=True)
class Native:
    """The kernels of one form."""

    calls: ctypes.CDLL
    form: str
    path: Path
    passed_over: tuple[str, ...]
    """Why faster forms were not selected."""

    @property
    def multiplies_pairs(self) -> bool:
        """Whether the processor has `vdpbf16ps`; without it, `exact-dpbf16` gives the same bits, but slowly."""
        return bool(self.calls.motet_has_dpbf16())

    def ceiling(self, arithmetic: str) -> float:
        """Measure the peak speed of one core in an arithmetic, in GFLOP/s."""
        return float(self.calls.motet_ceiling(ARITHMETICS[arithmetic]))


def cache_directory() -> Path:
    """Directory in which `motet doctor --build` puts the libraries of these sources."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "motet" / "native" / building.fingerprint()


@functools.cache
def load() -> Native:
    """The fastest form that runs here and agrees with the portable one.

    Raises:
        ConfigError: the kernels are not compiled, or not from these sources.
    """
    for directory in (INSTALLED, cache_directory()):
        portable = _open(directory / building.file_name("portable"))
        if portable is not None:
            return _fastest(directory, portable)
    raise ConfigError(
        "Motet's own kernels are not compiled here, or were compiled from other sources: run motet doctor --build "
        "(it needs a C++ compiler), or set engine.kernels to torch"
    )


def _open(path: Path) -> ctypes.CDLL | None:
    """Load a library; None if it is missing, built from other sources, or for another system."""
    try:
        calls = ctypes.CDLL(str(path))
    except OSError:
        return None
    try:
        calls.motet_fingerprint.restype = c_char_p
        if calls.motet_fingerprint().decode() != building.fingerprint():
            return None
    except AttributeError:
        return None
    declare(calls)
    return calls


def declare(calls: ctypes.CDLL) -> None:
    """Declare the argument and return types of a library's functions."""
    for name, (result, *arguments) in _PROTOTYPES.items():
        function = getattr(calls, f"motet_{name}")
        function.restype, function.argtypes = result, arguments


def _fastest(directory: Path, portable: ctypes.CDLL) -> Native:
    passed_over = []
    wanted = os.environ.get(FORM)
    if wanted is not None and wanted not in building.FORMS:
        raise ConfigError(f"{FORM} is {wanted!r}; there are: {', '.join(building.FORMS)}")
    for form in building.FORMS:
        if wanted not in (None, form):
            passed_over.append(f"{form}: {FORM} is {wanted}")
            continue
        path = directory / building.file_name(form)
        if not portable.motet_form_runs(form.encode()):
            passed_over.append(f"{form}: this processor lacks its instructions")
            continue
        calls = portable if form == "portable" else _open(path)
        if calls is None:
            passed_over.append(f"{form}: not compiled")
        elif form != "portable" and trial(calls) != trial(portable):
            passed_over.append(f"{form}: its results differ from the portable form's")
        else:
            return Native(calls, form, path, tuple(passed_over))
    raise ConfigError(f"{FORM} asks for kernels that do not run here: {'; '.join(passed_over)}")


def trial(calls: ctypes.CDLL) -> bytes:
    """Results of sample products in each arithmetic and of the functions, as bytes that every form must reproduce."""
    random = np.random.default_rng(0)
    rows, k, n = 37, 75, 40
    a, b = (_bf16(random.standard_normal(shape, np.float32)) for shape in ((rows, k), (n, k)))
    results = []
    for kind, arithmetic in ((1, 0), (1, 1), (0, 0)):
        left, right = (a, b) if kind else (_f32(a), _f32(b))
        packed = np.empty(calls.motet_packed_bytes(kind, k, n), np.uint8)
        calls.motet_pack(kind, right.ctypes.data, 1, k, k, n, kind, packed.ctypes.data)
        output = np.zeros((rows, n), np.float32)
        call = Product(
            left.ctypes.data, kind, k, packed.ctypes.data, kind, k, output.ctypes.data, n, rows, k, n, False, arithmetic
        )
        calls.motet_product(ctypes.byref(call), 1)
        results.append(output)
    x = np.abs(random.standard_normal(64, np.float32)) * 8 + np.float32(0.01)
    functions = np.empty((4, 64), np.float32)
    calls.motet_functions(x.ctypes.data, *(row.ctypes.data for row in functions), 64)
    return b"".join(each.tobytes() for each in [*results, functions])


def _bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of fp32 numbers."""
    return np.ascontiguousarray(x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _f32(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
