"""Jobs of one file that go on with each other's adapters: in order, with the same bytes as by hand, and with clear mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import motet
from motet.core.errors import ConfigError
from tests.support.adapter_files import run
from tests.support.fake_run import metrics, weights

pytestmark = pytest.mark.bits

ROWS = [{"prompt": f"Say {i}", "answer": f"{i % 4}"} for i in range(24)]


def taught(**fields: Any) -> dict[str, Any]:
    job = {
        "name": "taught",
        "data": {"source": ROWS, "holdout": 4},
        "algorithm": {"type": "sft", "rows_per_step": 8},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 3e-3},
        "steps": 3,
        "eval": {"every": 1},
    }
    return {**job, **fields}


def rewarded(init: str, **fields: Any) -> dict[str, Any]:
    job = {
        "name": "rewarded",
        "data": {"source": ROWS, "holdout": 4},
        "reward": "exact",
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 2, "groups_per_step": 4},
        "adapter": {"rank": 8, "init": init},
        "steps": 2,
    }
    return {**job, **fields}


def test_one_after_another_is_as_by_hand(tmp_path: Path) -> None:
    chained = run(tmp_path / "chained", taught(), rewarded("taught@latest"))
    assert chained.ok, chained
    first = run(tmp_path / "first", taught())
    second = run(tmp_path / "second", rewarded(str(first.jobs["taught"].adapter)))
    assert second.ok
    assert metrics(tmp_path / "chained", "rewarded") == metrics(tmp_path / "second", "rewarded")
    assert weights(tmp_path / "chained", "rewarded", 2) == weights(tmp_path / "second", "rewarded", 2)
    best = run(tmp_path / "best", taught(optimizer={"lr": 0.5}), rewarded("taught", steps=1))
    assert best.ok
    assert best.jobs["taught"].best != best.jobs["taught"].adapter, "the rate is so large that the last is not the best"
    start = weights(tmp_path / "best", "rewarded", 0)
    assert start == (best.jobs["taught"].best / "adapter_model.safetensors").read_bytes()


def test_whoever_has_nothing_to_start_from_fails_with_the_reason(tmp_path: Path) -> None:
    ended = run(tmp_path, taught(budget=1), rewarded("taught"))
    assert ended.jobs["taught"].spent
    assert ended.jobs["rewarded"].message == "starts from job taught, which has spent its budget; resume both"
    again = run(tmp_path, taught(), rewarded("taught"))
    assert again.ok, again


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([rewarded("taught"), taught()], "adapter.init names 'taught', which must come before it"),
        (
            [taught(), rewarded("taught", adapter={"rank": 4, "alpha": 8, "init": "taught"})],
            r"'taught' has rank 8, alpha 32.0, the job asks for 4, 8.0; leave out adapter.rank, adapter.alpha",
        ),
    ],
)
def test_chains_that_cannot_be_are_named(jobs: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, *jobs)


def test_an_adapter_gives_its_shape_to_the_job_that_starts_from_it(tmp_path: Path) -> None:
    """To a job of the same file, to one of another run, and to one of a job file; also when it goes on."""
    shape = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
    first = run(tmp_path / "first", taught(adapter=shape, steps=1), rewarded("taught", adapter={"init": "taught"}))
    assert first.ok, first
    start = {"init": str(first.jobs["rewarded"].best)}
    for _ in range(2):
        assert run(tmp_path / "second", rewarded("", adapter=start, steps=1)).ok
    (tmp_path / "jobs.yaml").write_text(
        yaml.safe_dump(
            {"base": "small", "jobs": [{"name": "a", "data": "toy:add", "reward": "exact", "adapter": start}]}
        )
    )
    (read,) = motet.load_jobs(tmp_path / "jobs.yaml").jobs
    assert (read.adapter.rank, read.adapter.alpha, read.adapter.target_modules) == tuple(shape.values())
    other = rewarded("", adapter={"rank": 2, "target_modules": ["k_proj"], **start})
    with pytest.raises(ConfigError, match=r"has rank 4, target_modules.*\['k_proj'\]"):
        run(tmp_path / "third", other)
    assert not (tmp_path / "third").exists(), "before anything is loaded or written"
