"""The C++ kernels by themselves, as tests call them: torch tensors in, torch tensors out."""

from __future__ import annotations

import ctypes
import fcntl
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.core.types import SamplingParams
from motet.kernels.cpu import building, library
from motet.kernels.cpu.own_math import OwnMath

TYPES = {torch.float32: 0, torch.bfloat16: 1}
EXACT, PAIRS = 0, 1
i64, i32, f32, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Pool(ctypes.Structure):
    _fields_ = [
        ("type", i32),
        ("keys", pointer),
        ("values", pointer),
        ("n_blocks", i64),
        ("block", i64),
        ("n_kv", i64),
        ("width", i64),
    ]


class Span(ctypes.Structure):
    _fields_ = [
        ("first_row", i64),
        ("n_rows", i64),
        ("first_position", i64),
        ("blocks", pointer),
        ("n_table", i64),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("pool", Pool),
        ("arithmetic", i32),
        ("fold", i64),
        ("scale", f32),
        ("softcap", f32),
        ("window", i64),
        ("sinks", pointer),
        ("q", pointer),
        ("ldq", i64),
        ("out", pointer),
        ("ldo", i64),
        ("log_sums", pointer),
    ]


class AttentionBackward(ctypes.Structure):
    _fields_ = [
        ("call", Attention),
        ("dout", pointer),
        ("dq", pointer),
        ("lddq", i64),
        ("dk", pointer),
        ("dv", pointer),
    ]


class RowSum(ctypes.Structure):
    _fields_ = [("peak", f32), ("log_total", f32), ("entropy", f32), ("usable", i32), ("total", ctypes.c_double)]


@functools.cache
def directory() -> Path:
    """Where all forms of these sources are compiled; the first test to ask compiles them."""
    made = library.cache_directory()
    made.mkdir(parents=True, exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [form for form in building.forms_here() if not (made / building.file_name(form)).exists()]
        if missing:
            try:
                building.build(made, missing)
            except building.CannotBuild as error:
                pytest.skip(str(error))
    return made


@functools.cache
def forms() -> tuple[str, ...]:
    """Forms that run here."""
    portable = Kernels(directory() / building.file_name("portable")).calls
    return tuple(form for form in building.forms_here() if portable.motet_form_runs(form.encode()))


@functools.cache
def kernels(form: str) -> Kernels:
    return Kernels(directory() / building.file_name(form))


def address(x: Tensor | None) -> int | None:
    assert x is None or x.is_contiguous()
    return None if x is None else x.data_ptr()


@dataclass
class Cache:
    """A pool of KV blocks, and where a sequence's are."""

    pool: Pool
    keys: Tensor
    values: Tensor
    table: Tensor


class Kernels:
    """The calls of one library."""

    def __init__(self, path: Path) -> None:
        self.calls = ctypes.CDLL(str(path))
        library.declare(self.calls)
        self.math = OwnMath(self.calls)

    def pack(self, weight_NK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """For x · Wᵀ."""
        n, k = weight_NK.shape
        kind = TYPES[dtype or weight_NK.dtype]
        packed = torch.empty(self.calls.motet_packed_bytes(kind, k, n), dtype=torch.uint8)
        self.calls.motet_pack(TYPES[weight_NK.dtype], address(weight_NK), 1, k, k, n, kind, address(packed))
        return packed

    def product(
        self,
        a_MK: Tensor,
        weight_NK: Tensor,
        arithmetic: int = EXACT,
        add: Tensor | None = None,
        threads: int = 1,
        k: int | None = None,
        emulated: bool = False,
    ) -> Tensor:
        (m, own), n = a_MK.shape, len(weight_NK)
        packed = self.pack(weight_NK)
        output = torch.full((m, n), float("nan")) if add is None else add.clone()
        call = library.Product(
            address(a_MK), TYPES[a_MK.dtype], own, address(packed), TYPES[weight_NK.dtype], own,
            address(output), n, m, k or own, n, add is not None, arithmetic,
        )  # fmt: skip
        if emulated:
            self.calls.motet_product_emulated(ctypes.byref(call))
        else:
            self.calls.motet_product(ctypes.byref(call), threads)
        return output

    def functions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """exp, sigmoid, tanh, log"""
        outputs = [torch.empty_like(x) for _ in range(4)]
        self.calls.motet_functions(address(x), *map(address, outputs), len(x))
        return tuple(outputs)  # type: ignore[return-value]

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype)
        self.calls.motet_rms_norm(
            pointer(address(x)), pointer(address(weight)), f32(epsilon), TYPES[dtype], pointer(address(out)),
            i64(x.shape[0]), i64(x.shape[1]),
        )  # fmt: skip
        return out

    def rms_norm_backward(self, x: Tensor, weight: Tensor, epsilon: float, slope: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.calls.motet_rms_norm_backward(
            pointer(address(x)), pointer(address(weight)), f32(epsilon), pointer(address(slope)), pointer(address(out)),
            i64(x.shape[0]), i64(x.shape[1]),
        )  # fmt: skip
        return out

    def rope(self, x_THE: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        out = x_THE.clone()
        rows, heads, width = out.shape
        self.calls.motet_rope(
            pointer(address(out)),
            pointer(address(cos)),
            pointer(address(sin)),
            int(back),
            i64(rows),
            i64(heads),
            i64(width),
        )
        return out

    def gate_up(self, gate: int, x: Tensor, up: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype)
        self.calls.motet_gate_up(
            gate, pointer(address(x)), pointer(address(up)), TYPES[dtype], pointer(address(out)), i64(x.shape[0]),
            i64(x.shape[1]),
        )  # fmt: skip
        return out

    def gate_up_backward(self, gate: int, x: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.empty_like(x), torch.empty_like(x)
        self.calls.motet_gate_up_backward(
            gate, *(pointer(address(each)) for each in (x, up, slope, *outputs)), i64(x.shape[0]), i64(x.shape[1])
        )
        return outputs

    def cache(
        self, n_keys: int, n_kv: int, width: int, dtype: torch.dtype, block: int = 32, fill: float = 0.0
    ) -> Cache:
        """Blocks for so many keys, in an order of their own."""
        n_blocks = -(-n_keys // block) + 2
        keys, values = (torch.full((n_blocks, n_kv, block, width), fill, dtype=dtype) for _ in range(2))
        table = torch.arange(n_blocks - 1, 0, -1, dtype=torch.int32)
        pool = Pool(TYPES[dtype], keys.data_ptr(), values.data_ptr(), n_blocks, block, n_kv, width)
        return Cache(pool, keys, values, table)

    def attend(
        self,
        cache: Cache,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        first: int = 0,
        arithmetic: int = EXACT,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values of rows at positions [first, …), and attends: out [T, H, E] and the log sums [T, H]."""
        rows, heads, _ = q_THE.shape
        span = Span(0, rows, first, cache.table.data_ptr(), len(cache.table))
        self.calls.motet_write_keys_values(
            ctypes.byref(cache.pool), ctypes.byref(span), pointer(address(k_TKE)), pointer(address(v_TKE))
        )
        out, log_sums = torch.full_like(q_THE, float("nan")), torch.empty(rows, heads)
        self.calls.motet_attend(
            ctypes.byref(self.call(cache, q_THE, out, log_sums, arithmetic, **options)), ctypes.byref(span)
        )
        return out, log_sums

    def call(
        self,
        cache: Cache,
        q_THE: Tensor,
        out: Tensor,
        log_sums: Tensor,
        arithmetic: int = EXACT,
        *,
        scale: float = 0.125,
        softcap: float = 0.0,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Attention:
        _, heads, width = q_THE.shape
        return Attention(
            cache.pool, arithmetic, heads // cache.pool.n_kv, scale, softcap, window, address(sinks), address(q_THE),
            heads * width, address(out), heads * width, address(log_sums),
        )  # fmt: skip

    def attend_backward(
        self, cache: Cache, call: Attention, slope_THE: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries [T, H, E], and of keys and values [positions, K, E], from those of the output."""
        rows, dq = len(slope_THE), torch.empty_like(slope_THE)
        span = Span(0, rows, first, cache.table.data_ptr(), len(cache.table))
        dk, dv = (torch.zeros(cache.keys.shape) for _ in range(2))
        back = AttentionBackward(call, address(slope_THE), address(dq), call.ldq, address(dk), address(dv))
        self.calls.motet_attend_backward(ctypes.byref(back), ctypes.byref(span))
        by_position = (
            each[cache.table.long()].transpose(1, 2).flatten(0, 1)[: first + rows].contiguous() for each in (dk, dv)
        )
        return dq, *by_position  # type: ignore[return-value]

    def row_sum(self, logits: Tensor, temperature: float = 1.0) -> RowSum:
        made = RowSum()
        self.calls.motet_row_sum(pointer(address(logits)), i64(len(logits)), f32(temperature), ctypes.byref(made))
        return made

    def draw(self, logits: Tensor, uniforms: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Of one row, again and again: tokens, logprobs, and whether the row is usable."""
        params = [SamplingParams(temperature=temperature)] * len(uniforms)
        return self.math.draw(logits.expand(len(uniforms), -1), params, uniforms)

    def slope(self, logits: Tensor, token: int, temperature: float = 1.0) -> tuple[float, float, Tensor]:
        """A logprob, the entropy, and the slope of the logprob [V]."""
        slope = logits.clone()[None]
        logprob, entropy = self.math.logprobs(slope, torch.tensor([token]), temperature, slope=True)
        return float(logprob), float(entropy), slope[0]
