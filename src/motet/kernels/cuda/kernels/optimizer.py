# mypy: disable-error-code="no-untyped-def"
"""AdamW of many adapters at once: `add_squares` fills the norms of their gradients, and `step_adapters` takes the steps.

A program has CHUNK elements of one adapter, counted from its first, BLOCK at a time. Numbers of an element are fp64, and are
rounded to fp32 once where they are stored. `motet.kernels.cuda.adapter_steps` fills the tables.

Legend: A adapters, C chunks of the largest adapter.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.adapter_gradients import UNIT_SCALE
from motet.kernels.cuda.kernels.compiling import kernel, part

MASTERS, MEAN, SQUARE, SUMS, GRADIENT, LARGEST, VERSION, ELEMENTS, SCALED, WEIGHTS, PLACES = (
    tl.constexpr(column) for column in range(11)
)
"""Columns of an adapter's places, and their number."""
RATE, BETA1, BETA2, EPSILON, KEPT, ROOT, CLIP, SCALING, UNITS, NUMBERS = (tl.constexpr(column) for column in range(10))
"""Columns of its numbers, and their number."""
INFINITY = tl.constexpr(float("inf"))
RANGE = tl.constexpr(2.0**63)
"""A sum of whole numbers is below."""


@part
def _vector(place, column, TYPE: tl.constexpr):
    """A vector's address; 0 if the adapter has none."""
    return tl.multiple_of(tl.load(place + column).to(tl.pointer_type(TYPE)), 16)


@part
def _gradient(place, number, at, live):
    """Elements of the gradient: the sum of units, rounded once, plus what was added in fp32; NaN if the sum does not fit."""
    total = tl.zeros(at.shape, tl.float32)
    if tl.load(place + SUMS) != 0:
        units = tl.load(_vector(place, SUMS, tl.int64) + at, mask=live, other=0)
        largest = tl.load(tl.load(place + LARGEST).to(tl.pointer_type(tl.int64)))
        fits = largest.to(tl.float64) * tl.load(number + UNITS) < RANGE
        total = tl.where(fits, units.to(tl.float32) * (1 / UNIT_SCALE), float("nan"))
    if tl.load(place + GRADIENT) != 0:
        total += tl.load(_vector(place, GRADIENT, tl.float32) + at, mask=live, other=0.0)
    return total


@part
def _squares(total, place, number, at, live):
    """Add the squares of the gradient's elements."""
    gradient = tl.where(live, _gradient(place, number, at, live), 0.0).to(tl.float64)
    return total + gradient * gradient


@kernel("squares")
def add_squares(squares, places, numbers, n_chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Fill the sums of squares [A, C] of the gradients' chunks."""
    chunk, adapter = tl.program_id(0), tl.program_id(1)
    place, number = places + adapter * PLACES, numbers + adapter * NUMBERS
    n = tl.load(place + ELEMENTS)
    first = chunk.to(tl.int64) * CHUNK
    if first >= n:
        return
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(first, tl.minimum(first + CHUNK, n), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= n:
            total = _squares(total, place, number, at, tl.full(at.shape, True, tl.int1))
        else:
            total = _squares(total, place, number, at, at < n)
    tl.store(squares + adapter * n_chunks + chunk, tl.sum(total, 0))


@part
def _step(total, place, number, at, live, factor, finite, TYPE: tl.constexpr):
    """Take the step of some elements if the norm is finite; returns `total` and the squares of the adapter's new weights."""
    masters, means = _vector(place, MASTERS, tl.float32) + at, _vector(place, MEAN, tl.float32) + at
    variances = _vector(place, SQUARE, tl.float32) + at
    gradient = _gradient(place, number, at, live).to(tl.float64) * factor
    rate, beta1, beta2 = tl.load(number + RATE), tl.load(number + BETA1), tl.load(number + BETA2)
    before = tl.load(masters, mask=live, other=0.0)
    mean = tl.load(means, mask=live, other=0.0).to(tl.float64) * beta1 + gradient * (1.0 - beta1)
    mean = mean.to(tl.float32)
    square = tl.load(variances, mask=live, other=0.0).to(tl.float64) * beta2 + gradient * gradient * (1.0 - beta2)
    square = square.to(tl.float32)
    divisor = tl.sqrt(square.to(tl.float64)) / tl.load(number + ROOT) + tl.load(number + EPSILON)
    master = before.to(tl.float64) * tl.load(number + KEPT) - rate * (mean.to(tl.float64) / divisor)
    master = tl.where(finite, master.to(tl.float32), before)
    if finite:
        tl.store(masters, master, mask=live)
        tl.store(means, mean, mask=live)
        tl.store(variances, square, mask=live)
        scaled = master * tl.where(at < tl.load(place + SCALED), tl.load(number + SCALING).to(tl.float32), 1.0)
        tl.store(_vector(place, VERSION, TYPE) + at, scaled.to(TYPE), mask=live)
    weight = tl.where(live & (at < tl.load(place + WEIGHTS)), master, 0.0).to(tl.float64)
    return total + weight * weight


@kernel("copy", "squares", "weights", "norms")
def step_adapters(
    copy, squares, weights, norms, places, numbers, n_chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the steps of adapters whose gradient is finite; fill its norms [A], and sums of squares of weights' chunks [A, C].

    `copy` only tells the type of the new versions.
    """
    chunk, adapter = tl.program_id(0), tl.program_id(1)
    place, number = places + adapter * PLACES, numbers + adapter * NUMBERS
    n = tl.load(place + ELEMENTS)
    first = chunk.to(tl.int64) * CHUNK
    if first >= n:
        return
    total = tl.zeros([BLOCK], tl.float64)
    own_chunks = (n + CHUNK - 1) // CHUNK
    for start in range(0, own_chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(squares + adapter * n_chunks + at, mask=at < own_chunks, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    if chunk == 0:
        tl.store(norms + adapter, norm)
    limit = tl.load(number + CLIP)
    factor = tl.where(norm > limit, limit / (norm + 1e-6), 1.0)
    TYPE: tl.constexpr = copy.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(first, tl.minimum(first + CHUNK, n), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= n:
            total = _step(total, place, number, at, tl.full(at.shape, True, tl.int1), factor, norm < INFINITY, TYPE)
        else:
            total = _step(total, place, number, at, at < n, factor, norm < INFINITY, TYPE)
    tl.store(weights + adapter * n_chunks + chunk, tl.sum(total, 0))
