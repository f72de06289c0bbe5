"""Pools of rows: each has its share of every step, goes through its rows pass by pass, and depends on nothing but the seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.config import DataConfig
from motet.core.errors import DataError
from motet.data.dataset import Dataset, load_dataset
from motet.data.pools import BLOCK, block, shares
from motet.runtime.identity import of_config
from tests.support.fake_run import job

pytestmark = pytest.mark.tier1

LEVELS = ["easy"] * 12 + ["hard"] * 5 + ["odd"] * 3


def data(tmp_path: Path, pools: dict[str, Any], levels: list[Any] = LEVELS, **fields: Any) -> Dataset:
    """Rows with these levels, in pools."""
    rows = [{"prompt": f"question {number}", "level": level} for number, level in enumerate(levels)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"source": str(tmp_path / "rows.jsonl"), "holdout": 0, "pools": {"column": "level", **pools}}
    return load_dataset(DataConfig.model_validate({**source, **fields}))


def levels(data: Dataset, first: int, n: int, per_step: int = 8, seed: int = 1) -> list[str]:
    """The level of each problem of a window."""
    return [problem.metadata["level"] for problem in data.window(first, n, seed, per_step)]


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=64))
@settings(max_examples=25, deadline=None)
def test_each_pool_has_its_share_of_a_block_and_of_every_stretch(weights: list[float]) -> None:
    counts, pools = shares(weights), block(tuple(weights))
    assert counts.sum() == len(pools) == BLOCK
    for pool, weight in enumerate(weights):
        assert abs(counts[pool] - BLOCK * weight / sum(weights)) <= 1
        so_far = np.cumsum(pools == pool)
        assert so_far[-1] == counts[pool]
        assert np.abs(so_far - counts[pool] * np.arange(1, BLOCK + 1) / BLOCK).max() <= 1 + 1e-9


@pytest.mark.parametrize("n_light", [10, 63])
def test_one_large_pool_among_many_small_ones_comes_evenly(n_light: int) -> None:
    pools = block((float(n_light), *[1.0] * n_light))
    assert {int((pools[first : first + 8] == 0).sum()) for first in range(0, BLOCK, 8)} == {4}


@pytest.mark.parametrize("weight", [1e-310, 5e-324, 1e-9, 1e6])
def test_only_the_ratio_of_weights_matters(weight: float) -> None:
    assert shares([weight, weight]).tolist() == [512, 512]
    light = shares([weight, 2 * weight] * 30)[::2]
    assert light.tolist() == [12] * 4 + [11] * 26, "the first of equal ones get what is left"


def test_every_step_has_the_shares_and_each_pool_goes_through_its_rows_pass_by_pass(tmp_path: Path) -> None:
    mixed = data(tmp_path, {"weights": {"easy": 3, "hard": 1}})
    assert mixed.notes == ("rows by level: easy: 12, hard: 5; rows left out, with other values: 3",)
    steps = [mixed.window(8 * step, 8, 1, 8) for step in range(300)]
    for step in steps:
        assert Counter(problem.metadata["level"] for problem in step) == {"easy": 6, "hard": 2}
    for level, n, each in (("easy", 12, 6), ("hard", 5, 2)):
        sets = [sorted(problem.id for problem in step if problem.metadata["level"] == level) for step in steps]
        counts, firsts = Counter[int](), set()
        for number, ids in enumerate(sets, 1):  # a step's order is random, so passes end within steps
            counts.update(ids)
            assert max(counts.values()) - (min(counts.values()) if len(counts) == n else 0) <= 1
            if number * each % (n * each) == 0:
                assert len(set(counts.values())) == 1
                firsts.add(tuple(sets[number - n]))
        assert len(firsts) > 1, "each pass is shuffled anew"


def test_windows_of_any_width_are_parts_of_one_sequence(tmp_path: Path) -> None:
    mixed = data(tmp_path, {"weights": {"easy": 5, "hard": 2, "odd": 1}, "changes": {3: {"hard": 1}, 200: {"odd": 1}}})
    whole = mixed.window(0, 2500, 7, 8)
    alone = [problem for place in range(0, 2500, 50) for problem in mixed.window(place, 50, 7, 8)]
    assert whole == alone
    assert whole[1033:1041] == mixed.window(1033, 8, 7, 8)
    assert whole != mixed.window(0, 2500, 8, 8)


def test_a_seed_gives_the_rows_that_it_always_gave(tmp_path: Path) -> None:
    mixed = data(tmp_path, {"weights": {"easy": 3, "hard": 1}})
    ids = [problem.id for problem in mixed.window(0, 16, 1, 8)]
    assert ids == [1, 6, 8, 14, 3, 2, 9, 15, 16, 10, 0, 11, 7, 4, 13, 5]


def test_what_comes_first_in_a_step_has_the_shares_too(tmp_path: Path) -> None:
    """With oversampling a step often trains its first problems alone."""
    for weights in ({"easy": 3, "hard": 1}, {"hard": 7, "easy": 1}):
        mixed = data(tmp_path, {"weights": weights})
        first = Counter(level for step in range(2000) for level in levels(mixed, 8 * step, 4))
        for level, weight in weights.items():
            assert first[level] / 8000 == pytest.approx(weight / sum(weights.values()), abs=0.02)


def test_the_order_of_keys_changes_nothing(tmp_path: Path) -> None:
    pools: dict[str, dict[Any, Any]] = {"weights": {"easy": 1, "hard": 2}, "changes": {9: {"odd": 1}, 4: {"hard": 1}}}
    turned = {name: dict(reversed(part.items())) for name, part in pools.items()}
    one, other = (data(tmp_path, each).window(0, 200, 1, 8) for each in (pools, turned))
    assert one == other


def test_names_that_begin_alike_are_other_pools(tmp_path: Path) -> None:
    long = "x" * 100
    mixed = data(tmp_path, {"weights": {f"{long}a": 1, f"{long}b": 1}}, [f"{long}a", f"{long}b", f"{long}b"])
    assert mixed.pools is not None
    assert [pool.tolist() for pool in mixed.pools.rows] == [[0], [1, 2]]
    with pytest.raises(DataError, match="no row to train on has level 'xxx"):
        data(tmp_path, {"weights": {f"{long}a": 1, f"{long}b": 1}}, [f"{long}b"])


def test_weights_change_at_their_step(tmp_path: Path) -> None:
    mixed = data(tmp_path, {"weights": {"easy": 1}, "changes": {2: {"easy": 1, "hard": 1}, 5: {"odd": 1}}})
    found = levels(mixed, 0, 8 * 7)
    assert found[:16] == ["easy"] * 16
    assert Counter(found[16:40]) == {"easy": 12, "hard": 12}
    assert found[40:] == ["odd"] * 16
    assert sorted(levels(mixed, 4, 4, per_step=2)) == ["easy", "easy", "hard", "hard"], "steps count, not positions"


def test_numbers_truths_and_nothing_are_values(tmp_path: Path) -> None:
    mixed = data(tmp_path, {"weights": {1.0: 1, 2.5: 1, "true": 1, None: 1}}, [1, 1.0, "1", 2.5, True, None, 7])
    assert mixed.notes == ("rows by level: 1: 3, 2.5: 1, null: 1, true: 1; rows left out, with other values: 1",)


def test_an_order_holds_within_each_pool(tmp_path: Path) -> None:
    mixed = data(tmp_path, {"weights": {"easy": 1, "hard": 1}}, shuffle=False)
    ids = [problem.id for problem in mixed.window(0, 10, 1, 10)]
    assert sorted(ids) == [0, 1, 2, 3, 4, 12, 13, 14, 15, 16]
    assert sorted(problem.id for problem in mixed.window(10, 10, 1, 10)) == [5, 6, 7, 8, 9, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ({"weights": {}}, "at least one weight above 0"),
        ({"weights": {"easy": 0}}, "at least one weight above 0"),
        ({"weights": {"easy": 1, "hard": -1}}, "greater than or equal to 0"),
        ({"weights": {"easy": 1, "hard": 0.0001}}, "less than 0.1% of their sum"),
        ({"weights": {"easy": 1}, "changes": {0: {"hard": 1}}}, "greater than or equal to 1"),
        ({"weights": {"easy": 1}, "changes": {5: {}}}, "at least one weight above 0"),
        ({"weights": {str(number): 1 for number in range(65)}}, "at most 64"),
        ({"weights": {1: 1, "1": 2}}, "several keys mean '1', as"),
        ({"weights": {"easy": 1}, "changes": {"7": {"hard": 1}, "07": {"easy": 1}}}, "several keys are step 7; give"),
    ],
)
def test_bad_weights_are_refused(tmp_path: Path, pools: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        data(tmp_path, pools)


def test_values_that_no_row_has_are_told_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row to train on.*have easy, odd, hard"):
        data(tmp_path, {"weights": {"easy": 1}, "changes": {9: {"hrad": 1}}}, [*LEVELS, "odd", "odd", "odd"])
    with pytest.raises(DataError, match=r"rows.jsonl row 1 has.*Its columns: level"):
        data(tmp_path, {"column": "lvl", "weights": {"easy": 1}})


def test_jobs_without_pools_are_what_they_were() -> None:
    assert "pools" not in of_config(job("a"))["job"]["data"]
    mixed = job("a", data={"source": "toy:add", "pools": {"column": "level", "weights": {"1": 1}}})
    assert of_config(mixed)["job"]["data"]["pools"]["weights"] == {"1": 1}
