"""The model of a decoding step's time, against what a prototype of the kernels took."""

from __future__ import annotations

import pytest

from motet.cuda.step_time import StepShape, step_time

SMALL = StepShape(
    24, ((1152, 896), (896, 896), (9728, 896), (896, 4864)), (151936, 896), 24 * 2 * 2 * 64 * 2, 2 * 8_798_208
)
LARGE = StepShape(
    32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128256, 4096), 32 * 2 * 8 * 128 * 2, 2 * 41_943_040
)
H200, H100 = (4256e9, 796e12), (2970e9, 796e12)
"""Bytes a second of a copy, and operations a second of a product: measured on an H200, and the same part of an H100's."""
MEASURED = [  # milliseconds with the fastest ways; 40 to 145 keys a row, rank 16 on all linears
    (SMALL, H200, 64, (1.031, 1.540, 2.010)), (SMALL, H200, 256, (1.325, 2.054, 2.446)),
    (LARGE, H200, 64, (4.780, 6.270, 9.197)), (LARGE, H200, 256, (8.466, 9.794, 11.951)),
    (SMALL, H100, 64, (1.114, 1.600, 2.098)), (SMALL, H100, 256, (1.422, 2.131, 2.569)),
    (LARGE, H100, 64, (6.521, 7.750, 10.932)), (LARGE, H100, 256, (9.343, 10.891, 13.407)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(MEASURED)))
def test_steps_are_predicted_within_a_fifth(case: int) -> None:
    shape, (read, computed), rows, milliseconds = MEASURED[case]
    found = [1e3 * step_time(shape, rows, 92, n, read, computed).total for n in (0, 8, 64)]
    assert found == pytest.approx(milliseconds, rel=0.2)


def test_time_grows_with_rows_keys_and_adapters() -> None:
    def total(rows: int, keys: int, adapters: int) -> float:
        return step_time(LARGE, rows, keys, adapters, *H200).total

    assert total(1, 10, 0) < total(64, 10, 0) < total(64, 1000, 0) < total(64, 1000, 1) < total(64, 1000, 9)
    assert total(1, 1, 0) > 2 * sum(n * k for n, k in LARGE.products) * LARGE.layers / H200[0]
