"""What the compiler makes of the room's kernels for cards that are not here, as launches make them.

`tests/support/launched_room.py` has the launches. What no card has run, a card shows itself (`motet.cuda.trial`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.speed import envs

import motet.cuda.kernels
import tests.support.triton_on_cpu  # noqa: F401
from motet.cuda.ways import OwnTile
from tests.support.compiling import SHARED, SMALL, compiled

PASSES = {"decoding", "decoding with adapters", "a pass", "a pass with adapters"}
SPILLS = {"sm_80": 64, "sm_90": 32, "sm_100": 32, **dict.fromkeys(SMALL, 64)}
"""Instructions that spill, at most; of older cards a bound against worse."""
SUMS = ("norm_after_add", "rotate_and_write")
"""Kernels that add numbers otherwise than by the tensor core: the same machine codes in all passes of one base."""
WHOLE = {"add_units"}
"""Kernels that add whole numbers in memory, whose sum has one value in every order."""
DESCRIBED = {"multiply_by_descriptors"}
"""Kernels that copy blocks by descriptors, not by loads."""
PROCESSOR = {"sm_80": 164, "sm_90": 228, "sm_120": 100}
"""KiB of shared memory of a multiprocessor, of which each program takes one more."""
BIAS = 1
"""Loads of two bytes that a bias may take, once in a tile."""
NARROW = {
    "list_pieces",
    "place_rows",
    "copy_rows",
    "pick",
    "pick_truncated",
    "score",
    "add_copies",
    "read_rows",
    "write_rows",
    "write_changes",
}
"""Kernels that read single numbers, or a few rows, from memory."""


KERNEL = re.compile(r"^@(?:kernel\(.*\)|_kernel|triton\.jit\(.+\))\ndef (\w+)", re.MULTILINE)


def kernels() -> set[str]:
    """The names of all kernels of the room."""
    sources = Path(motet.cuda.kernels.__path__[0]).glob("*.py")
    return {name for source in sources for name in KERNEL.findall(source.read_text())}


def made_by(cache: Path, *words: str, packages: Path | None = None) -> list[dict[str, Any]]:
    (found,) = compiled(cache, ("launched_room", list(words)), packages=packages)
    return found


def wrong(made: list[dict[str, Any]]) -> list[str]:
    """A line for each promise that a compiled kernel breaks."""
    found, codes = [], dict[str, set[str]]()
    for one in made:
        name = f"{one['kernel']} {one['target']}"
        codes.setdefault(f"{name} {sorted(one['constants'].items())}", set()).add(one["code"])
        if one["atomics"] and not (one["kernel"] in WHOLE and not one["atomic_floats"]):
            found.append(f"{name}: {one['atomics']} atomic instructions")
        if one["fused"]:
            found.append(f"{name}: products and sums are fused")
        if one["spills"] > SPILLS[one["target"]]:
            found.append(f"{name}: {one['spills']} instructions spill")
        if one["shared"] > (SHARED | SMALL)[one["target"]] * 1024:
            found.append(f"{name}: {one['shared']} bytes of shared memory")
        if one["kernel"] not in NARROW and (one["narrow"] > BIAS or not (one["wide"] or one["kernel"] in DESCRIBED)):
            found.append(f"{name}: {one['narrow']} loads of two bytes, {one['wide']} of sixteen")
    found += [f"{name}: {len(each)} machine codes" for name, each in codes.items() if len(each) > 1]
    return found + list(different(made))


def miscounted(made: list[dict[str, Any]]) -> list[str]:
    """Tiles whose shared memory beside adapters is not what decides whether a card runs them; barriers are left out."""
    found = []
    for one in made:
        names = ("ROWS", "COLUMNS", "DEPTH", "num_warps", "num_stages")
        rows, columns, depth, warps, stages = (int(one["constants"][name]) for name in names)
        tile = OwnTile(rows, columns, depth, warps, stages)
        counted = tile.shared_bytes(2, int(one["target"].removeprefix("sm_")) // 10)
        if one["constants"]["ADAPTERS"] == "True" and not 0 <= counted - one["shared"] <= 1024:
            found.append(f"{tile.name} {one['target']}: {counted} bytes, and the compiler takes {one['shared']}")
    return found


def different(made: list[dict[str, Any]]) -> Iterator[str]:
    """Sums whose machine code is not the same in all passes."""
    for target, kernel in {(one["target"], one["kernel"]) for one in made if one["kernel"] in SUMS}:
        codes = {
            model: {
                one["code"] for one in made if (one["target"], one["kernel"], one["model"]) == (target, kernel, model)
            }
            for model in PASSES
        }
        if len(set(map(frozenset, codes.values()))) > 1:
            yield f"{kernel} {target}: other machine codes in {' and '.join(codes)}"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """For Hopper products, and each kernel once; for a card with 99 KiB the tiles it begins with."""
    hopper = ["--targets", "sm_90"]
    small = ["--targets", "sm_89"]
    parts = [*hopper, "--rooms", "products"], [*hopper, "--once", "--ptx"], [*small, "--rooms", "tiles", "--ptx"]
    return compiled(tmp_path_factory.mktemp("triton"), *(("launched_room", part) for part in parts))


def test_products_are_one_kernel_for_any_number_of_rows_and_any_adapters(three: list[list[dict[str, Any]]]) -> None:
    products = three[0]
    assert len(products) == 1
    assert not wrong(products)


def test_every_kernel_is_launched_and_compiles_for_a_hopper_card(three: list[list[dict[str, Any]]]) -> None:
    """Once; the long test compiles it for each value of its constants, for all cards, and counts spills."""
    made = three[1]
    assert [one["kernel"] for one in made] == list(dict.fromkeys(one["kernel"] for one in made))
    assert {one["kernel"] for one in made} == kernels()
    assert not wrong(made)


def test_the_tiles_that_a_card_with_99_kib_begins_with_run_beside_adapters(three: list[list[dict[str, Any]]]) -> None:
    tiles = three[-1]
    assert {one["constants"]["ADAPTERS"] for one in tiles} == {"True"}
    assert len(tiles) > 1
    assert not wrong(tiles)
    assert not miscounted(tiles)


@pytest.mark.soak
@pytest.mark.parametrize("target", PROCESSOR)
def test_every_tile_runs_beside_adapters_and_as_many_programs_at_once(tmp_path: Path, target: str) -> None:
    """Of `REFERENCE`, which few products use, A alone takes more memory than the tile."""
    made = made_by(tmp_path, "--targets", target, "--rooms", "tiles", "--all")
    assert not wrong(made)
    assert not miscounted(made)
    at_once: dict[str, dict[str, int]] = {"True": {}, "False": {}}
    for one in made:
        sizes = [one["constants"][name] for name in ("ROWS", "COLUMNS", "DEPTH", "num_warps", "num_stages")]
        programs = (PROCESSOR[target] << 10) // (one["shared"] + 1024)
        at_once[one["constants"]["ADAPTERS"]][f"{one['kernel']} {'x'.join(sizes)}"] = programs
    for programs in at_once.values():
        del programs["multiply 64x64x64x4x3"]
    assert at_once["True"] == at_once["False"]


@pytest.mark.soak
@pytest.mark.parametrize("words", [("sm_80", "--ptx"), ("sm_90", "--all", "--ptx"), ("sm_100", "--ptx")], ids=" ".join)
def test_kernels_compile_for_every_card(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Tiles, heads and constants that few launches have are compiled for one card."""
    made = made_by(tmp_path, "--targets", *words)
    assert {one["model"] for one in made} == PASSES | {
        "products",
        "attention",
        "draws",
        "steps",
        "gradients",
        "optimizer",
    }
    assert not wrong(made)


@pytest.mark.soak
def test_kernels_compile_with_the_triton_of_torch_2_11(tmp_path: Path) -> None:
    made = made_by(tmp_path, "--targets", "sm_90", "--ptx", packages=envs.packages("triton-3.6.0"))
    assert not wrong(made)
