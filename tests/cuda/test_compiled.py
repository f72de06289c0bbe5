"""What the compiler makes of the room's kernels for cards that are not here, as launches make them.

`tests/support/launched_room.py` has the launches. What no card has run, a card shows itself (`motet.cuda.trial`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.speed import envs

from tests.support.compiling import SHARED, compiled
from tests.support.launched_room import LAUNCHES, NARROW, ONE_CODE

SPILLS = 32
"""Instructions that spill, at most."""


def made_by(cache: Path, *words: str, packages: Path | None = None) -> list[dict[str, Any]]:
    (found,) = compiled(cache, ("launched_room", list(words)), packages=packages)
    return found


def wrong(made: list[dict[str, Any]]) -> list[str]:
    """A line for each promise that a compiled kernel breaks."""
    found, codes = [], dict[str, set[str]]()
    for one in made:
        name = f"{one['kernel']} {one['target']}"
        constants = "" if one["kernel"] in ONE_CODE else f" {sorted(one['constants'].items())}"
        codes.setdefault(name + constants, set()).add(one["code"])
        if one["atomics"]:
            found.append(f"{name}: {one['atomics']} atomic instructions")
        if one["fused"]:
            found.append(f"{name}: products and sums are fused")
        if one["spills"] > SPILLS:
            found.append(f"{name}: {one['spills']} instructions spill")
        if one["shared"] > SHARED[one["target"]] * 1024:
            found.append(f"{name}: {one['shared']} bytes of shared memory")
        if one["kernel"] not in NARROW and (one["narrow"] or not one["wide"]):
            found.append(f"{name}: {one['narrow']} loads of two bytes, {one['wide']} of sixteen")
    return found + [f"{name}: {len(each)} machine codes" for name, each in codes.items() if len(each) > 1]


def test_kernels_compile_for_a_hopper_card_as_launches_make_them(tmp_path: Path) -> None:
    made = made_by(tmp_path, "--targets", "sm_90")
    assert made
    assert not wrong(made)


@pytest.mark.soak
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_for_every_card(tmp_path: Path, target: str) -> None:
    made = made_by(tmp_path, "--targets", target, "--all")
    assert {one["model"] for one in made} == set(LAUNCHES)
    assert not wrong(made)


@pytest.mark.soak
def test_kernels_compile_with_the_triton_of_torch_2_11(tmp_path: Path) -> None:
    made = made_by(tmp_path, "--targets", "sm_90", "--all", packages=envs.packages("triton-3.6.0"))
    assert not wrong(made)
