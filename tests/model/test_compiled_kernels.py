"""What the compiler makes of the kernels for cards that are not here, and what a card would do with it.

`tests/support/launched_kernels.py` compiles what launches ask for: addresses that 16 divides, the constants and options
of a launch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.speed import envs

from tests.support.compiling import SHARED, compiled

PRODUCTS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTC", "gfx942": "v_mfma", "gfx950": "v_mfma"}
SPILLS = {"sm_80": 32, "sm_90": 32, "sm_100": 32, "gfx942": 300, "gfx950": 300}
"""Instructions that spill, at most; of AMD's cards a bound against worse."""
WIDTHS = ("64", "80", "128", "256")
ATTENTION = ("forward", "query_gradients", "key_gradients")


def launched(cache: Path, *words: str, packages: Path | None = None) -> list[Any]:
    """What launches of Motet's kernels make."""
    (made,) = compiled(cache, ("launched_kernels", list(words)), packages=packages)
    return made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The widest heads, where registers are fewest, and the recurrence; bad kernels; and passes without values."""
    words = ["--targets", "sm_90", "--widths", "256", "--dtypes", "bf16", "--models", "plain", "delta"]
    others: list[tuple[str, list[str]]] = [("bad_kernels", []), ("passes_without_values", [])]
    return compiled(tmp_path_factory.mktemp("triton"), ("launched_kernels", words), *others)


def wrong(made: list[dict[str, Any]]) -> list[str]:
    """A line for each promise that a compiled kernel breaks."""
    found, codes = [], dict[tuple[Any, ...], set[str]]()
    for one in made:
        target, name = one["target"], f"{one['kernel']} {one['width']} {one['dtype']} {one['target']}"
        codes.setdefault((name, one["model"]), set()).add(one["code"])
        if one["atomics"]:
            found.append(f"{name}: {one['atomics']} atomic instructions")
        if one["fused"]:
            found.append(f"{name}: products and sums are fused")
        if one["spills"] > SPILLS[target]:
            found.append(f"{name}: {one['spills']} instructions spill")
        if one["shared"] > SHARED[target] * 1024:
            found.append(f"{name}: {one['shared']} bytes of shared memory")
        if one["kernel"] in ATTENTION and one["dtype"] != "fp32" and PRODUCTS[target] not in "".join(one["products"]):
            found.append(f"{name}: no tensor cores")
    return found + [f"{key[0]}: {len(each)} machine codes" for key, each in codes.items() if len(each) > 1]


def test_kernels_compile_for_a_hopper_card_as_launches_make_them(three: list[list[Any]]) -> None:
    made = three[0]
    assert Counter(one["kernel"] for one in made) == Counter([*ATTENTION, "collect", "forward", "backward"])
    assert not wrong(made)


def test_a_bad_kernel_is_found(three: list[list[Any]]) -> None:
    """Atomic sums, a machine code for each number, registers and shared memory that do not suffice, fused sums."""
    found = "\n".join(wrong(three[1]))
    for line in (
        ": 2 machine codes",
        "1 atomic instructions",
        "are fused",
        "no tensor cores",
        "instructions spill",
        "shared memory",
    ):
        assert line in found, found


def test_passes_ask_for_no_value_and_leave_no_tensor_on_the_host(three: list[list[Any]]) -> None:
    """Decoding, and training to the gradients; attention by torch's products waits for the device, and is found."""
    kernels = ["collect", "forward", "key_gradients", "query_gradients"]
    found = three[2]
    assert found[:2] == [["triton", "decode", ["forward"]], ["triton", "train", kernels]]
    assert [(one[0], "torch.nonzero()" in one[2][0]) for one in found[2:]] == [("torch", True)] * 2


@pytest.mark.soak
@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile_for_every_card(tmp_path: Path, target: str) -> None:
    """For Hopper four widths of heads in both types; for others one that is no power of two, and the widest."""
    every = target == "sm_90"
    dtypes, widths = (("bf16", "fp16"), WIDTHS) if every else (("bf16",), ("80", "256"))
    made = launched(tmp_path, "--targets", target, "--dtypes", *dtypes, "--widths", *widths)
    assert len(made) == len(dtypes) * len(widths) * 2 * 4 + 4
    assert not wrong(made)


@pytest.mark.soak
def test_kernels_compile_with_the_triton_of_torch_2_11(tmp_path: Path) -> None:
    packages, widths = envs.packages("triton-3.6.0"), ("--widths", "80", "256")
    for target in ("sm_90", "sm_100"):
        assert not wrong(launched(tmp_path, "--targets", target, "--dtypes", "bf16", *widths, packages=packages))
