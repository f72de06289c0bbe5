"""Ways to multiply are chosen by speed among those whose bits were tried; the trial finds every planted fault."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.errors import TritonError  # type: ignore[import-untyped, unused-ignore]

import tests.support.triton_on_cpu
from motet.core.errors import BaseModelError
from motet.kernels.cuda import product_timings
from motet.kernels.cuda.adapters import TILE
from motet.kernels.cuda.bit_trial import Sizes, Trial
from motet.kernels.cuda.decoder_shape import piece_of
from motet.kernels.cuda.product_backends import (
    A_COLUMNS,
    BUCKETS,
    REFERENCE,
    ROWS_OF_PASSES,
    Library,
    OwnTile,
    ProductShape,
    ProductWeight,
    WayTable,
    start_tile,
    table_for,
)
from motet.kernels.cuda.products import Products
from motet.model.accelerator import products_without_split
from tests.support.adapted_rows import adapted
from tests.support.bad_ways import BadLibrary, WatchedRecorder
from tests.support.triton_on_cpu import Matrix, in_order, multiplied_by

DEVICE = tests.support.triton_on_cpu.DEVICE
SIZES = Sizes(decoding=(1, 8, 64), passes=(66, 72))
SHAPE = ProductShape(24, 64)
ALL = [SHAPE, replace(SHAPE, biased=True), ProductShape(64, 24, back=True)]
INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="a card multiplies as it does")
"""Of tests that let the interpreter multiply otherwise."""


def tried(
    library: object, recorder: WatchedRecorder | None = None, shapes: list[ProductShape] = ALL
) -> tuple[WayTable, Trial]:
    table = table_for(DEVICE, torch.float16)
    trial = Trial(DEVICE, torch.float16, recorder or WatchedRecorder(), SIZES)
    trial.run(table, shapes, library)  # type: ignore[arg-type]
    return table, trial


def test_a_library_with_equal_bits_is_used_where_it_was_tried_and_is_faster() -> None:
    library = BadLibrary()
    table, trial = tried(library)
    assert not trial.notes
    assert table.tried == {SHAPE: {1, 8, 64, 66, 72}, ALL[1]: {1, 8, 64, 66, 72}, ALL[2]: {66, 72}}
    own = table.own(SHAPE, 64)
    assert table.choose(SHAPE, 64) == own  # nobody measured it
    table.speeds[SHAPE, 64] = {own.name: 20.0, library.name: 18.0}
    assert [table.choose(SHAPE, rows) is library for rows in (64, 63, 65)] == [True, False, False]
    assert table.choose(SHAPE, 64, adapted=True) == own  # a launch more
    table.speeds[SHAPE, 64] = {own.name: 20.0, library.name: 21.0}
    assert table.choose(SHAPE, 64) == own


RECORDER = WatchedRecorder()
FAULTS: list[tuple[str, BadLibrary, list[set[int]]]] = [
    ("splits K from the 65th row on", BadLibrary(lambda rows, biased: rows > 64), [{1, 8, 64}, set()]),
    ("splits K with a bias only", BadLibrary(lambda rows, biased: biased), [set(), {66, 72}]),
    ("rounds before it adds a bias", BadLibrary(lambda rows, biased: biased, rounds_twice=True), [set(), {66, 72}]),
    ("splits K at one number of rows", BadLibrary(lambda rows, biased: rows == 66), [{1, 8, 64, 72}, {72}]),
    ("splits K in graphs only", BadLibrary(lambda rows, biased: RECORDER.replaying), [{66, 72}, {66, 72}]),
]


@pytest.mark.parametrize(("library", "good"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_library_is_used_at_no_number_of_rows_at_which_its_bits_differ(
    library: BadLibrary, good: list[set[int]]
) -> None:
    table, trial = tried(library, RECORDER, ALL[1:])
    assert [table.tried[shape] for shape in ALL[1:]] == good
    everywhere = [{1, 8, 64, 66, 72}, {66, 72}]
    assert sum("its bits differ" in note for note in trial.notes) == sum(map(set.__lt__, good, everywhere))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="here torch has the library")
def test_a_library_that_does_not_run_is_left_out() -> None:
    before = torch.backends.cuda.preferred_blas_library()
    table, trial = tried(Library(), shapes=[SHAPE])
    assert table.library is None
    assert "cuBLASLt" in trial.notes[0]
    with pytest.raises(RuntimeError), products_without_split:
        pass
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.gpu
def test_the_switches_of_torch_are_put_back_when_the_last_leaves() -> None:
    matmul = torch.backends.cuda.matmul

    def switches() -> tuple[object, ...]:
        blas = torch.backends.cuda.preferred_blas_library()
        return (
            blas,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        )

    before = switches()
    with products_without_split:
        with products_without_split:
            inside = switches()
        assert switches() == inside != before
        assert not any(inside[1:])
    assert switches() == before


def backwards(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
    return in_order(left[:, ::-1], right[::-1], total)


@INTERPRETED
def test_a_tile_with_other_bits_is_left_out() -> None:
    """A tile of 128 rows that adds from the end."""
    with multiplied_by(lambda *of: (backwards if of[0].shape[0] == 128 else in_order)(*of)):
        table, trial = tried(None, shapes=[SHAPE])
    assert {tile.rows for tile in table.left_out} == {128}
    assert "has other bits" in trial.notes[0]
    assert all(table.own(SHAPE, rows).rows != 128 for rows in BUCKETS)


def is_a(left: Matrix, right: Matrix) -> bool:
    """Whether a program multiplies A."""
    return (*left.shape, right.shape[1]) == (TILE, piece_of(SHAPE.n_inputs), A_COLUMNS)


@INTERPRETED
def test_a_tile_beside_which_a_has_other_bits_is_left_out() -> None:
    """A tile of 128 rows, after which A is added from the end."""
    tiles = [0]

    def product(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
        tiles.append(tiles[-1] if is_a(left, right) else len(left))
        return (backwards if is_a(left, right) and tiles[-1] == 128 else in_order)(left, right, total)

    with multiplied_by(product):
        table, trial = tried(None, shapes=[SHAPE])
    assert {tile.rows for tile in table.left_out} == {128}
    assert "has other bits" in trial.notes[0]


def last_rows_backwards(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
    """Rows have other bits in the second half of a tile."""
    half = len(left) // 2
    parts = in_order(left[:half], right, total[:half]), backwards(left[half:], right, total[half:])
    return np.concatenate(parts)


@INTERPRETED
@pytest.mark.parametrize(
    ("product", "why"),
    [
        (last_rows_backwards, "other places"),
        (lambda left, right, total: in_order(left, right * 1.01, total), "wrong values$"),
        (
            lambda left, right, total: in_order(left, right * (1 + 0.01 * is_a(left, right)), total),
            "wrong values for adapt",
        ),
    ],
)
def test_a_base_is_not_multiplied_by_kernels_that_are_wrong(product: Callable[..., Matrix], why: str) -> None:
    with multiplied_by(product), pytest.raises(BaseModelError, match=why):
        tried(None, shapes=[SHAPE])


# --- speeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [RuntimeError("does not run here"), AssertionError("base must be 16-byte aligned"), TritonError("too large")],
)
def test_speeds_are_measured_once_and_kept(tmp_path: Path, error: Exception) -> None:
    weights = [ProductWeight(torch.zeros(24, 64, dtype=torch.float16, device=DEVICE)) for _ in range(3)]
    clock, library = itertools.count(1.0), BadLibrary()

    def stopwatch(run: Callable[[], None]) -> float:
        if (now := next(clock)) == 2.0:
            raise error
        return 3 * now

    table = table_for(DEVICE, torch.float16)
    assert product_timings.measure(table, weights, library, stopwatch, lambda: False, back=True) is False
    assert product_timings.measure(table, weights, library, stopwatch, lambda: True, back=True)
    assert set(table.speeds) == {(SHAPE, rows) for rows in BUCKETS} | {(ProductShape(64, 24, back=True), BUCKETS[-1])}
    for (shape, rows), found in table.speeds.items():
        tiles = [table.start(shape, rows), *table.others(shape, rows)]
        assert list(found) == [tiles[0].name, library.name, *(tile.name for tile in tiles[1:])]
    first, second, *_ = table.speeds[SHAPE, 16].values()
    assert (first, second) == (1.0, float("inf"))  # of one of three weights
    path = product_timings.file_of({"card": "one"})
    assert path != product_timings.file_of({"card": "other"})
    path = tmp_path / "made" / path.name
    product_timings.write(path, {"card": "one"}, table.speeds)
    assert product_timings.read(path) == table.speeds
    again = replace(table, speeds=product_timings.read(path))
    assert not product_timings.measure(again, weights, library, stopwatch, lambda: True, back=True)
    assert again.own(SHAPE, 3) == table.start(SHAPE, 16)


def test_processes_beside_others_are_told_to_measure_nothing() -> None:
    """The tests are such processes."""
    assert product_timings.seconds_to_measure() == 0


def test_processes_that_load_other_bases_at_once_keep_the_speeds_of_both(tmp_path: Path) -> None:
    """Each has read the file before the other wrote it."""
    path, here = tmp_path / "speeds.json", {"card": "one"}
    bases = [{(ProductShape(n_outputs, 64), BUCKETS[0]): {"library": float(n_outputs)}} for n_outputs in (24, 48)]
    for found in bases:
        product_timings.write(path, here, found)
    assert product_timings.read(path) == {**bases[0], **bases[1]}
    again = {shape: {"library": 1.0} for shape in bases[0]}
    product_timings.write(path, here, again)
    assert product_timings.read(path) == {**again, **bases[1]}, "what was measured last counts"


def test_a_load_that_has_no_time_measures_what_is_used_anyway_and_later_loads_do_not_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = [ProductWeight(torch.zeros(24, 64, dtype=torch.float16, device=DEVICE))]
    shapes, library = [(SHAPE, rows) for rows in BUCKETS], BadLibrary()
    table = table_for(DEVICE, torch.float16)
    for n_known in (3, 4):  # the second load has time for what the first left, and for one tile more
        in_time = partial(next, iter([True] * 3), False)
        assert product_timings.measure(table, weights, library, lambda run: 1.0, in_time, back=False)
        assert set(table.speeds) == set(shapes[:n_known])
    assert len(caplog.messages) == 2
    for shape, rows in shapes:
        assert list(table.speeds[shape, rows])[:2] == [table.start(shape, rows).name, library.name]
    assert [len(found) for found in table.speeds.values()] == [2, 2, 2, 4]
    assert not product_timings.measure(table, weights, library, lambda run: 1.0, lambda: True, back=False)
    assert len(caplog.messages) == 2


def test_a_shape_for_which_memory_was_short_is_measured_by_the_next_load() -> None:
    weights = [ProductWeight(torch.zeros(24, 64, dtype=torch.float16, device=DEVICE))]
    table, clock = table_for(DEVICE, torch.float16), itertools.count()

    def stopwatch(run: Callable[[], None]) -> float:
        if next(clock) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return 1.0

    for short in ({(SHAPE, BUCKETS[1])}, set()):
        assert product_timings.measure(table, weights, None, stopwatch, lambda: True, back=False)
        assert set(table.speeds) == {(SHAPE, rows) for rows in BUCKETS} - short


def test_speeds_hold_for_all_sources_of_the_room(tmp_path: Path) -> None:
    room = Path(str(product_timings.__file__)).parent
    shutil.copytree(room, tmp_path / "room")
    digests = {product_timings.digest_of(room), product_timings.digest_of(tmp_path / "room")}
    assert len(digests) == 1
    for name in ("product_backends.py", "kernels/products.py"):
        source = tmp_path / "room" / name
        source.write_text(source.read_text() + "# mended")
        digests.add(product_timings.digest_of(tmp_path / "room"))
    assert len(digests) == 3


@pytest.mark.parametrize(
    "text", ["", "[]", '{"products": [{"rows": 1}]}', '{"products": [{"shape": {"x": 1}, "rows": 1}]}']
)
def test_a_file_that_cannot_be_read_holds_no_speeds(tmp_path: Path, text: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    assert product_timings.read(path) == product_timings.read(tmp_path / "missing") == {}


def test_rows_of_a_pass_go_to_the_library_in_numbers_that_were_tried() -> None:
    library, large = BadLibrary(), BUCKETS[-1]
    table = replace(table_for(DEVICE, torch.float16), library=library, tried={SHAPE: frozenset(ROWS_OF_PASSES)})
    own = table.own(SHAPE, large)
    assert table.split(SHAPE, 700) == [(700, own)]  # nobody measured it
    table.speeds[SHAPE, large] = {own.name: 2.0, library.name: 1.0}
    assert table.split(SHAPE, 3000) == [(2048, library), (512, library), (440, table.own(SHAPE, 440))]
    assert table.split(SHAPE, 2048) == [(2048, library)]
    assert table.split(SHAPE, 40000)[:3] == [(16384, library), (16384, library), (4096, library)]
    assert table.split(SHAPE, 511) == [(511, table.own(SHAPE, 511))]
    biased = replace(SHAPE, biased=True)
    assert table.split(biased, 3000) == [(3000, table.own(biased, 3000))]


@pytest.mark.parametrize("with_adapters", [False, True])
def test_rows_have_the_same_bits_by_both_ways(with_adapters: bool) -> None:
    n_rows, library = 530, BadLibrary()
    weight = ProductWeight(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16))
    x = torch.randn(n_rows, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    found = []
    for uses in (None, library):
        table = replace(table_for(DEVICE, torch.float16), library=uses)
        shapes = [ProductShape.of(weight, back=back) for back in (False, True)]
        table.tried.update((shape, frozenset(ROWS_OF_PASSES)) for shape in shapes)
        table.speeds.update(
            ((shape, BUCKETS[-1]), {library.name: 1.0, table.own(shape, 512).name: 9.0}) for shape in shapes
        )
        products, rows = Products(table), adapted([0, 1] * (n_rows // 2), [4, 16], 32, torch.float16, DEVICE)
        y = x.new_empty(n_rows, 16)
        products.multiply(x, weight, y, (rows.tables, rows.group) if with_adapters else None)
        found.append([y, products.back(y, weight), rows.pieces() if with_adapters else y])
    assert all(torch.equal(own, by_parts) for own, by_parts in zip(*found, strict=True))
    assert not found[1][2].isnan().any()


def at(address: int, rows: int, columns: int) -> torch.Tensor:
    """Zeros whose first byte is at this address, modulo 256."""
    memory = torch.zeros(rows * columns + 256, dtype=torch.float16, device=DEVICE)
    first = (address - memory.data_ptr()) % 256 // 2
    return memory[first : first + rows * columns].view(rows, columns)


@pytest.mark.parametrize("addresses", [(0, 0, 0), (16, 0, 0), (0, 128, 0), (0, 0, 64)])
def test_a_library_gets_no_address_that_its_trial_did_not_have(addresses: tuple[int, int, int]) -> None:
    """It may choose another kernel for it."""
    counted = list[int]()

    def count(n_rows: int, _biased: bool) -> bool:
        counted.append(n_rows)
        return False

    library = BadLibrary(count, 256)
    table = replace(table_for(DEVICE, torch.float16), library=library, tried={SHAPE: frozenset({8})})
    table.speeds[SHAPE, BUCKETS[0]] = {library.name: 1.0, table.own(SHAPE, 8).name: 9.0}
    x, weight, y = (at(*given) for given in zip(addresses, (8, 24, 8), (64, 64, 24), strict=True))
    Products(table).multiply(x, ProductWeight(weight), y)
    assert len(counted) == (not any(addresses))


CARDS = {8: 166912, 9: 232448, 10: 232448, 12: 101376}
"""Bytes of shared memory of a program, by major compute capability."""


@pytest.mark.parametrize("capability", CARDS)
def test_every_card_has_a_tile_for_every_product(capability: int) -> None:
    table = WayTable(capability, CARDS[capability], 2)
    chosen: set[OwnTile] = set()
    for n_outputs, n_inputs in itertools.product((896, 1152, 6144, 28672, 151936), (896, 4864, 14336)):
        chosen |= {table.own(ProductShape(n_outputs, n_inputs), rows) for rows in (1, 64, 65, 256, 9000)}
    assert all(tile.shared_bytes(2, capability) <= CARDS[capability] for tile in chosen)
    assert any(tile.by_descriptors for tile in chosen) == (capability in (9, 10))
    assert not table.own(ProductShape(900, 900), 64).by_descriptors  # rows that do not begin at multiples of 16 bytes
    assert table.runs(REFERENCE)


def test_start_tiles_are_those_that_were_fastest() -> None:
    """On an H200, among Motet's own, at 64 and 256 rows."""
    assert start_tile(ProductShape(896, 4864), 64, 9) == OwnTile(16, 32, 256, 4, 4)
    assert start_tile(ProductShape(4096, 14336), 64, 9) == OwnTile(64, 32, 128, 4, 5, True)
    assert start_tile(ProductShape(28672, 4096), 64, 9) == OwnTile(64, 128, 64, 4, 4, True)
    assert start_tile(ProductShape(151936, 896), 256, 9) == OwnTile(256, 128, 64, 8, 3, True)
