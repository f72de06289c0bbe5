"""The models of the time of steps and passes, against what a prototype of the kernels took."""

from __future__ import annotations

import re

import pytest
from bench.gpu.pass_time import pass_time
from bench.gpu.step_time import (
    _NOT_OVERLAPPED,
    _PER_INPUT,
    LAUNCH,
    SMALL_LAUNCH,
    TimedShape,
    product_time,
    step_time,
)

from tests.support.measured_shapes import DOCS, H100, H200, LARGE, SMALL

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


def test_the_page_has_what_the_model_predicts() -> None:
    """Tokens a second of three figures, with 96 keys a row, and attention beside reading its keys."""
    page = (DOCS / "benchmarks-gpu.md").read_text()
    table = page.partition("## Predictions")[2].partition("## ")[0]
    found = []
    for name, shape in (("0.5b", SMALL), ("8b", LARGE)):
        for rows in (64, 256):
            rates = [rows / step_time(shape, rows, 96, n, *H200).total for n in (0, 8, 64)]
            found.append(
                f"| {name}, {rows} rows | " + " | ".join(f"{float(f'{rate:.3g}'):,.0f}" for rate in rates) + " |"
            )
    assert re.findall(r"^\| .* rows \|.*$", table, re.M) == found
    attention = step_time(LARGE, 256, 1024, 0, *H200).attention
    assert f"it takes {attention / (256 * 1024 * LARGE.key_bytes / H200[0]):.1f} times as long" in " ".join(
        table.split()
    )


def gain_of_segments(shape: TimedShape, which: int, rows: int, adapters: int) -> float:
    """The part of a step that a product would save if K were cut into its best number of segments, by the model of time.

    Each is written in fp32; a launch of its own reads them and writes their sum.
    """
    (n, k), (read, computed) = shape.products[which], H200

    def cut(segments: int) -> float:
        parts, computing = 4 * segments * rows * n / read, 2 * rows * n * k / computed
        reading = 2 * (n * k + rows * k) / read + parts
        working = max(reading, computing) + _NOT_OVERLAPPED * min(reading, computing)
        return LAUNCH + max(working, k / segments * _PER_INPUT) + SMALL_LAUNCH + parts + 2 * rows * n / read

    saved = product_time(n, k, rows, read, computed) - min(map(cut, range(2, 17)))
    return shape.layers * saved / step_time(shape, rows, 96, adapters, read, computed).total


def test_the_page_has_what_segments_of_k_would_save() -> None:
    """Of `down` of 0.5B; `o` and products of 8B would lose."""
    output, down = 1, 3
    without, with_eight = (100 * gain_of_segments(SMALL, down, 64, adapters) for adapters in (0, 8))
    said = f"for `down` of 0.5B, 64 rows, {without:.0f} % of a step without adapters, {with_eight:.0f} % with eight"
    assert said in " ".join((DOCS / "cuda.md").read_text().split())
    losing = [(SMALL, output), *((LARGE, which) for which in range(4))]
    assert max(gain_of_segments(shape, which, 64, adapters) for shape, which in losing for adapters in (0, 8)) < 0


TRAINED = [  # milliseconds, eight adapters and one: all rows through the head in blocks of 2,048, no optimizer
    (SMALL, H200, (64, 128), (48.42, 47.77)), (SMALL, H200, (8, 1024), (53.56, 52.79)), (SMALL, H200, (16, 1024), (101.8,)),
    (LARGE, H200, (64, 128), (448.28, 445.91)), (LARGE, H200, (8, 1024), (473.87, 470.72)),
    (SMALL, H100, (64, 128), (53.73, 53.49)), (SMALL, H100, (8, 1024), (58.83,)),
    (LARGE, H100, (64, 128), (467.12, 464.56)),
]  # fmt: skip
AIMS = [  # tokens a second of an H200, one adapter and eight: the least that is wanted, trained rows through the head
    (SMALL, (64, 128), 64, (130_000, 125_000)), (SMALL, (16, 1024), 768, (120_000, 120_000)),
    (LARGE, (64, 128), 64, (16_500, 16_000)), (LARGE, (8, 1024), 768, (15_000, 15_000)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(TRAINED)))
def test_passes_are_predicted_within_a_fifth(case: int) -> None:
    shape, card, (sequences, length), milliseconds = TRAINED[case]
    rows = sequences * length
    found = 1e3 * pass_time(shape, rows, length / 2, rows, 0, *card, block=2048).total
    assert [found] * len(milliseconds) == pytest.approx(milliseconds, rel=0.2)


@pytest.mark.parametrize("case", range(len(AIMS)))
def test_the_least_that_is_wanted_of_gradients_needs_products_that_are_kept(case: int) -> None:
    shape, (sequences, length), answer, least = AIMS[case]
    rows = sequences * length

    def rate(adapters: int, *, recompute: bool) -> float:
        spent = pass_time(shape, rows, length / 2, sequences * answer, adapters, *H200, recompute=recompute)
        return rows / spent.total

    kept = [rate(adapters, recompute=False) for adapters in (1, 8)]
    assert all(found > wanted for found, wanted in zip(kept, least, strict=True))
    assert kept[1] > 0.97 * kept[0]
    assert rate(1, recompute=True) < 0.85 * kept[0]
    assert shape is SMALL or rate(1, recompute=True) < least[0]
