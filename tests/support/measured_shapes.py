"""The decoders and cards that a prototype of the kernels was measured with."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.step_time import TimedShape

DOCS = Path(__file__).resolve().parents[2] / "docs"

SMALL = TimedShape(
    24,
    ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    24 * 2 * 2 * 64 * 2,
    head=(151936, 896),
    adapter_bytes=2 * 8_798_208,
)
LARGE = TimedShape(
    32,
    ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    32 * 2 * 8 * 128 * 2,
    head=(128256, 4096),
    adapter_bytes=2 * 41_943_040,
)
H200, H100 = (4256e9, 796e12), (2970e9, 796e12)
"""Bytes a second of a copy, and operations a second of a product: measured on an H200, and the same part of an H100's."""
