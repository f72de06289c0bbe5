"""What the compiler makes of the room's kernels for cards that are not here, as launches make them.

`tests/support/launched_room.py` has the launches. What no card has run, a card shows itself (`motet.kernels.cuda.bit_trial`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.speed import envs

import motet.kernels.cuda.kernels
import tests.support.triton_on_cpu  # noqa: F401
from motet.kernels.cuda.product_backends import OwnTile
from tests.support.compiling import SHARED, SMALL, compiled

PASSES = {"decoding", "decoding with adapters", "a pass", "a pass with adapters"}
SPILLS = {"sm_80": 64, "sm_90": 32, "sm_100": 32, **dict.fromkeys(SMALL, 64)}
"""Instructions that spill, at most; of older cards a bound against worse."""
SUMS = {
    **dict.fromkeys(("norm_after_add", "norm_before_add", "rotate_and_write", "attend"), PASSES),
    "combine": {"decoding", "decoding with adapters"},
}
"""Kernels that add floats otherwise than by the tensor core alone, and the passes of one base that launch them.

Their machine codes are the same in all. `block_sums` adds whole numbers, whose sum is the same in any order.
"""
WITHOUT_PASSES = {
    "list_pieces", "block_sums", "score", "pick", "pick_truncated",
    "attend_back_queries", "norm_after_add_back", "norm_before_add_back", "rotate_back", "add_squares", "step_adapters",
}  # fmt: skip
"""Kernels with other sums: of whole numbers, and of gradients, which one pass alone computes."""
MORE = {"attention", "gradients"}
"""What is launched for the same base, and may be for others."""
TILE = {"ROWS", "num_warps", "num_stages"}
"""Constants of `attend` that differ between passes: what it adds over keys, the tensor core adds, whatever the tile."""
WHOLE = {"add_units"}
"""Kernels that add whole numbers in memory, whose sum has one value in every order."""
DESCRIBED = {"multiply_by_descriptors"}
"""Kernels that copy blocks by descriptors, not by loads."""
PROCESSOR = {"sm_80": 164, "sm_90": 228, "sm_120": 100}
"""KiB of shared memory of a multiprocessor, of which each program takes one more."""
BIAS = 1
"""Loads of two bytes that a bias may take, once in a tile."""
PAIRS = 16
"""Loads of four bytes that it may take."""
SHORT = {
    "embed": 1, "combine": 6, "attend_back_queries": 6, "attend": 12, "attend_back_keys": 24,
    "finish": 8, "slopes": 12, "block_sums": 33,
    "add_adapters": 39, "gate_and_up": 46, "rotate_and_write": 87,
    "add_adapters_back": 12, "add_units": 17, "shrink_back": 24, "gate_and_up_back": 50, "rotate_back": 87,
    "add_squares": 23, "step_adapters": 66,
}  # fmt: skip
"""Loads of four and eight bytes, at most; of other kernels none.

Rows, positions, tables and entries of adapters are single numbers, and so is a mask's word for 32 ids. The products with A
begin at a column that is known when the kernel runs, so these float32 are read one by one.
"""
READ_A = {"shrink"}
"""With products beside adapters: rows of A begin at multiples of eight bytes, so that A is copied by eight."""
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


REDUCING = {"sum", "cumsum", "reduce", "associative_scan", "xor_sum"}
KERNEL = re.compile(r"kernel\(|_kernel$|triton\.jit\(")
"""Decorators of kernels."""


def functions() -> Iterator[tuple[str, ast.Module, ast.FunctionDef]]:
    """Those of the room: the file, what else is in it, and the function."""
    for source in Path(motet.kernels.cuda.kernels.__path__[0]).glob("*.py"):
        tree = ast.parse(source.read_text())
        yield from ((source.stem, tree, node) for node in tree.body if isinstance(node, ast.FunctionDef))


def kernels() -> set[str]:
    """The names of all kernels of the room."""
    return {node.name for _, _, node in functions() if any(map(KERNEL.match, map(ast.unparse, node.decorator_list)))}


def kernels_that_sum() -> set[str]:
    """Those that reduce a tensor, or call a function that does."""
    found = dict[tuple[str, str], tuple[set[tuple[str, str]], bool]]()
    for file, tree, function in functions():
        imported = {
            name.asname or name.name: (node.module.rpartition(".")[2], name.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module
            for name in node.names
        }
        called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        names = {imported.get(each.id, (file, each.id)) for each in called if isinstance(each, ast.Name)}
        sums = {each.attr for each in called if isinstance(each, ast.Attribute)} & REDUCING
        found[file, function.name] = names, bool(sums)

    def reduces(function: tuple[str, str]) -> bool:
        names, sums = found.get(function, (set(), False))
        return sums or any(map(reduces, names - {function}))

    return {name for _, name in filter(reduces, found)} & kernels()


def made_by(cache: Path, *words: str, packages: Path | None = None) -> list[dict[str, Any]]:
    (found,) = compiled(cache, ("launched_room", list(words)), packages=packages)
    return found


def wrong(made: list[dict[str, Any]], *, spills: bool = True) -> list[str]:
    """A line for each promise that a compiled kernel breaks; without `spills` they need not have been counted."""
    found, codes = [], dict[str, set[str]]()
    for one in made:
        name = f"{one['kernel']} {one['target']}"
        codes.setdefault(f"{name} {sorted(one['constants'].items())}", set()).add(one["code"])
        if one["atomics"] and not (one["kernel"] in WHOLE and not one["atomic_floats"]):
            found.append(f"{name}: {one['atomics']} atomic instructions")
        if one["fused"]:
            found.append(f"{name}: products and sums are fused")
        if spills and (one["spills"] is None or one["spills"] > SPILLS[one["target"]]):
            found.append(f"{name}: {one['spills']} instructions spill")
        if one["shared"] > (SHARED | SMALL)[one["target"]] * 1024:
            found.append(f"{name}: {one['shared']} bytes of shared memory")
        if one["kernel"] not in NARROW and (one["narrow"] > BIAS or not (one["wide"] or one["kernel"] in DESCRIBED)):
            found.append(f"{name}: {one['narrow']} loads of two bytes, {one['wide']} of sixteen")
        of_a = one["kernel"] in READ_A or one["constants"].get("ADAPTERS") == "True"
        allowed = PAIRS if one["constants"].get("BIAS") == "True" else SHORT.get(one["kernel"], 0)
        if not (of_a or one["kernel"] in NARROW) and one["short"] > allowed:
            found.append(f"{name}: {one['short']} loads of four and eight bytes")
        if one["kernel"] == "attend" and (lacking := products(one) - set(one["dots"])):
            found.append(f"{name}: not by the tensor core: {' and '.join(sorted(lacking))}")
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


def products(attend: dict[str, Any]) -> set[str]:
    """Rows, depth and columns of what attention multiplies: queries with keys; weights with ones, and with values."""
    rows, lanes, keys = (attend["constants"][name] for name in ("ROWS", "LANES", "KEYS"))
    return {f"{rows}x{lanes}x{keys}", f"{rows}x{keys}x16", f"{rows}x{keys}x{lanes}"}


def different(made: list[dict[str, Any]]) -> Iterator[str]:
    """Sums whose machine code is not the same in all passes; of attention the constants that are not of a tile."""
    codes = dict[tuple[str, str], dict[str, set[str]]]()
    for one in made:
        if one["kernel"] in SUMS:
            fixed = sorted(item for item in one["constants"].items() if item[0] not in TILE)
            models = codes.setdefault((one["kernel"], one["target"]), {})
            models.setdefault(one["model"], set()).add(str(fixed) if one["kernel"] == "attend" else one["code"])
    for (kernel, target), models in sorted(codes.items()):
        passes = [models.get(model, set()) for model in sorted(SUMS[kernel])]
        if any(each != passes[0] for each in passes) or any(
            not passes[0] <= models[model] for model in MORE & models.keys()
        ):
            yield f"{kernel} {target}: not the same in {', '.join(sorted(models))}"


def test_every_kernel_with_a_sum_is_compared_across_passes() -> None:
    """`combine` adds pieces one after the other."""
    assert kernels_that_sum() == SUMS.keys() - {"combine"} | WITHOUT_PASSES


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
    assert not wrong(made, spills=False)


def test_the_tiles_that_a_card_with_99_kib_begins_with_run_beside_adapters(three: list[list[dict[str, Any]]]) -> None:
    tiles = three[-1]
    assert {one["constants"]["ADAPTERS"] for one in tiles} == {"True"}
    assert len(tiles) > 1
    assert not wrong(tiles, spills=False)
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
@pytest.mark.parametrize("words", [("sm_80",), ("sm_90", "--all"), ("sm_100",)], ids=" ".join)
def test_kernels_compile_for_every_card(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Tiles, heads and constants that few launches have are compiled for one card."""
    made = made_by(tmp_path, "--targets", *words)
    assert {one["model"] for one in made} == PASSES | {
        "products",
        "attention",
        "draws",
        "step",
        "gradients",
        "optimizer",
    }
    assert not wrong(made)


@pytest.mark.soak
def test_kernels_compile_with_the_triton_of_torch_2_11(tmp_path: Path) -> None:
    made = made_by(tmp_path, "--targets", "sm_90", "--ptx", packages=envs.packages("triton-3.6.0"))
    assert not wrong(made, spills=False)


def good() -> list[dict[str, Any]]:
    """What a compiler might make of the sums of one base, and of a product."""
    of_all = {
        "target": "sm_90",
        "atomics": 0,
        "fused": False,
        "spills": 0,
        "shared": 1024,
        "wide": 8,
        "short": 0,
        "narrow": 0,
    }
    constants = {"ROWS": "64", "LANES": "128", "KEYS": "32"}
    launched = [(kernel, model) for kernel, models in SUMS.items() for model in sorted(models | MORE)]
    return [
        {**of_all, "kernel": kernel, "model": model, "code": kernel, "constants": dict(constants), "dots": [*DOTS]}
        for kernel, model in [*launched, ("multiply", "products")]
    ]


DOTS = ("64x128x32", "64x32x16", "64x32x128")
NO_TILE: dict[str, Any] = {"code": "b", "constants": {"EPSILON": "1"}}
BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("multiply", "products", {"atomics": 1}, "1 atomic instructions"),
    ("multiply", "products", {"fused": True}, "are fused"),
    ("multiply", "products", {"spills": 33}, "33 instructions spill"),
    ("multiply", "products", {"spills": None}, "None instructions spill"),
    ("multiply", "products", {"shared": 228 << 10}, "bytes of shared memory"),
    ("multiply", "products", {"narrow": 2}, "2 loads of two bytes"),
    ("multiply", "products", {"wide": 0}, "0 of sixteen"),
    ("multiply", "products", {"short": 1}, "1 loads of four and eight bytes"),
    ("rotate_and_write", "a pass", {"short": 88}, "88 loads of four and eight bytes"),
    ("combine", "decoding", {"code": "b"}, "2 machine codes"),
    ("attend", "decoding", {"dots": [DOTS[0], DOTS[2]]}, "not by the tensor core: 64x32x16"),
    *(
        ("attend", model, {"constants": {"ROWS": "64", "LANES": "128", "KEYS": "64"}}, "attend sm_90: not the same")
        for model in sorted(PASSES | MORE)
    ),
    *(
        (kernel, model, NO_TILE, f"{kernel} sm_90: not the same")
        for kernel in ("norm_after_add", "norm_before_add", "rotate_and_write", "combine")
        for model in sorted(SUMS[kernel] | MORE)
    ),
]


@pytest.mark.parametrize(("kernel", "model", "change", "line"), BROKEN)
def test_each_broken_promise_is_a_line(kernel: str, model: str, change: dict[str, Any], line: str) -> None:
    made = good()
    assert not wrong(made)
    (broken,) = (one for one in made if (one["kernel"], one["model"]) == (kernel, model))
    broken |= change
    assert any(line in found for found in wrong(made)), wrong(made)


def test_a_pass_that_does_not_launch_a_norm_is_a_line() -> None:
    made = [one for one in good() if (one["kernel"], one["model"]) != ("norm_before_add", "decoding")]
    assert [found.split(" in ")[0] for found in wrong(made)] == ["norm_before_add sm_90: not the same"]


def test_attention_may_have_other_tiles_in_other_passes() -> None:
    made = good()
    (decoding,) = (one for one in made if (one["kernel"], one["model"]) == ("attend", "decoding"))
    decoding["constants"] |= {"ROWS": "16", "num_warps": "8"}
    decoding |= {"code": "b", "dots": ["16x128x32", "16x32x16", "16x32x128"]}
    assert not wrong(made)
