# mypy: disable-error-code="no-untyped-def"
"""The recurrence as Triton kernels. A program keeps some columns of the state of one head and stretch in registers.

It processes the stretch token by token, so prompts, packed batches and decoded tokens use the same machine code. Sums
over keys stay within a program. For gradients shared by all columns of a head, each program writes its part, and
`triton_recurrence`, which launches the kernels, adds the parts in order.

Uppercase arguments are compile-time constants: the model's shape (KEYS and VALUES of a head, keys padded to LANES), the
columns per program (TILE), and whether the delta rule is used (DELTA).

Legend: K keys, V columns of a program, R rows of a wave in the order of its steps, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile for argument types only, so that no size or address changes the machine code."""
    names = [name for name in inspect.signature(function).parameters if name.islower()]
    return triton.jit(function, do_not_specialize=names)


def _part(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return triton.jit(function)


@_part
def _state_places(
    index, head, n_heads, tile, KEYS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr
):
    """Offsets of a program's part of a state [H, K, V], and the mask of offsets inside the state."""
    key_K, value_V = tl.arange(0, LANES)[:, None], tile * TILE + tl.arange(0, TILE)[None, :]
    first = (index.to(tl.int64) * n_heads + head) * (KEYS * VALUES)
    return first + key_K * VALUES + value_V, (key_K < KEYS) & (value_V < VALUES)


@_part
def _token(
    reads, value, decay, match, beta, place, tile,
    KEYS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Load the inputs of a row and head: k, q, v, a, q · k and beta."""
    key_K, value_V = tl.arange(0, LANES), tile * TILE + tl.arange(0, TILE)
    k_K = tl.load(reads + place * 4 * KEYS + key_K, mask=key_K < KEYS, other=0.0)
    q_K = tl.load(reads + (place * 4 + 1) * KEYS + key_K, mask=key_K < KEYS, other=0.0)
    v_V = tl.load(value + place * VALUES + value_V, mask=value_V < VALUES, other=0.0)
    b = 1.0
    if DELTA:
        b = tl.load(beta + place)
    return k_K, q_K, v_V, tl.load(decay + place), tl.load(match + place), b


@_part
def _read(state_KV, key_K):
    return tl.sum(state_KV * key_K[:, None], 0)


@_part
def _delta(state_KV, k_K, v_V, a, b, DELTA: tl.constexpr):
    delta_V = v_V
    if DELTA:
        delta_V = b * (v_V - a * _read(state_KV, k_K))
    return delta_V


@_part
def _store_keys(grad_reads, at_row, slope_k_K, slope_q_K, KEYS: tl.constexpr, LANES: tl.constexpr):
    key_K = tl.arange(0, LANES)
    tl.store(grad_reads + at_row * 2 * KEYS + key_K, slope_k_K, mask=key_K < KEYS)
    tl.store(grad_reads + (at_row * 2 + 1) * KEYS + key_K, slope_q_K, mask=key_K < KEYS)


@_part
def _store_gates(grad_gates, at_row, slope_a, slope_m, slope_b):
    tl.store(grad_gates + at_row * 3, slope_a)
    tl.store(grad_gates + at_row * 3 + 1, slope_m)
    tl.store(grad_gates + at_row * 3 + 2, slope_b)


@_kernel
def forward(
    reads, value, decay, match, beta, begin, output, end, kept, starts, kept_starts, lengths, n_heads, keep, every,
    KEYS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Outputs, the state after each stretch and, if `keep` is 1, the state before steps 0, `every`, 2 · `every`, …"""
    stretch, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value_V = tile * TILE + tl.arange(0, TILE)
    places, there = _state_places(stretch, head, n_heads, tile, KEYS, VALUES, LANES, TILE)
    state_KV = tl.load(begin + places, mask=there, other=0.0)
    length = tl.load(lengths + stretch)
    for step in range(length):
        if (keep > 0) & (step % every == 0):
            kept_place = tl.load(kept_starts + step // every) + stretch
            at_kept, _ = _state_places(kept_place, head, n_heads, tile, KEYS, VALUES, LANES, TILE)
            tl.store(kept + at_kept, state_KV, mask=there)
        place = (tl.load(starts + step) + stretch).to(tl.int64) * n_heads + head
        k_K, q_K, v_V, a, m, b = _token(reads, value, decay, match, beta, place, tile, KEYS, VALUES, LANES, TILE, DELTA)
        delta_V = _delta(state_KV, k_K, v_V, a, b, DELTA)
        out_V = a * _read(state_KV, q_K) + m * delta_V
        tl.store(output + place * VALUES + value_V, out_V, mask=value_V < VALUES)
        state_KV = a * state_KV + k_K[:, None] * delta_V[None, :]
    tl.store(end + places, state_KV, mask=there)


@_kernel
def backward(
    reads, value, decay, match, beta, kept, grad_output, grad_end, between, grad_reads, grad_value, grad_gates, grad_begin,
    starts, kept_starts, lengths, n_heads, n_rows, every,
    KEYS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Gradients of k and q [tiles, R, H, 2, K], v [R, H, V], (a, q · k, beta) [tiles, R, H, 3] and the initial states.

    `between` is a buffer for the recomputed states of `every` steps of each stretch.
    """
    stretch, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value_V = tile * TILE + tl.arange(0, TILE)
    places, there = _state_places(stretch, head, n_heads, tile, KEYS, VALUES, LANES, TILE)
    grad_KV = tl.load(grad_end + places, mask=there, other=0.0)
    length = tl.load(lengths + stretch)
    n_parts = (length + every - 1) // every
    for back in range(n_parts):
        part = n_parts - 1 - back
        first, last = part * every, min(length, (part + 1) * every)
        at_kept, _ = _state_places(
            tl.load(kept_starts + part) + stretch, head, n_heads, tile, KEYS, VALUES, LANES, TILE
        )
        state_KV = tl.load(kept + at_kept, mask=there, other=0.0)
        for step in range(first, last):
            at, _ = _state_places(stretch * every + step - first, head, n_heads, tile, KEYS, VALUES, LANES, TILE)
            tl.store(between + at, state_KV, mask=there)
            place = (tl.load(starts + step) + stretch).to(tl.int64) * n_heads + head
            k_K, q_K, v_V, a, m, b = _token(
                reads, value, decay, match, beta, place, tile, KEYS, VALUES, LANES, TILE, DELTA
            )
            state_KV = a * state_KV + k_K[:, None] * _delta(state_KV, k_K, v_V, a, b, DELTA)[None, :]
        tl.debug_barrier()
        for ahead in range(first, last):
            step = first + last - 1 - ahead
            at, _ = _state_places(stretch * every + step - first, head, n_heads, tile, KEYS, VALUES, LANES, TILE)
            before_KV = tl.load(between + at, mask=there, other=0.0)
            place = (tl.load(starts + step) + stretch).to(tl.int64) * n_heads + head
            k_K, q_K, v_V, a, m, b = _token(
                reads, value, decay, match, beta, place, tile, KEYS, VALUES, LANES, TILE, DELTA
            )
            slope_V = tl.load(grad_output + place * VALUES + value_V, mask=value_V < VALUES, other=0.0)
            delta_V, held_V = _delta(before_KV, k_K, v_V, a, b, DELTA), _read(before_KV, k_K)
            slope_delta_V = m * slope_V + tl.sum(grad_KV * k_K[:, None], 0)
            slope_a = tl.sum(tl.sum(grad_KV * before_KV, 0), 0) + tl.sum(slope_V * _read(before_KV, q_K), 0)
            slope_k_K = tl.sum(grad_KV * delta_V[None, :], 1)
            slope_q_K = a * tl.sum(before_KV * slope_V[None, :], 1)
            grad_KV = a * grad_KV + q_K[:, None] * (a * slope_V)[None, :]
            slope_b = 0.0
            if DELTA:
                slope_b = tl.sum(slope_delta_V * (v_V - a * held_V), 0)
                slope_a -= b * tl.sum(slope_delta_V * held_V, 0)
                slope_held_V = -a * b * slope_delta_V
                slope_k_K += tl.sum(before_KV * slope_held_V[None, :], 1)
                grad_KV += k_K[:, None] * slope_held_V[None, :]
            at_row = tile.to(tl.int64) * n_rows * n_heads + place
            tl.store(grad_value + place * VALUES + value_V, b * slope_delta_V, mask=value_V < VALUES)
            _store_keys(grad_reads, at_row, slope_k_K, slope_q_K, KEYS, LANES)
            _store_gates(grad_gates, at_row, slope_a, tl.sum(slope_V * delta_V, 0), slope_b)
        tl.debug_barrier()
    tl.store(grad_begin + places, grad_KV, mask=there)
