"""A form that no answer has, taught by rows; and a policy that stays near what it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import motet
from motet.config.jobfile import parse_jobs
from motet.core.errors import ConfigError
from motet.observe.report.read import read_job
from motet.runtime.diagnoses import FAR, LEAST
from tests.support.small_runs import metrics

ROWS = [{"prompt": f"{a} + {b} =", "answer": f"so {a + b}"} for a in range(6) for b in range(6)]
SFT: dict[str, Any] = {
    "name": "form",
    "data": {"source": ROWS, "holdout": 0},
    "algorithm": {"type": "sft", "rows_per_step": 12},
    "adapter": {"rank": 8},
    "optimizer": {"lr": 0.01},
    "steps": 12,
    "eval": {"every": 0},
}
RL: dict[str, Any] = {
    "name": "rl",
    "data": {"source": ROWS, "holdout": 4},
    "reward": [
        {"name": "exact"},
        {"name": "length", "args": {"target": 4}},
        {"name": "regex", "args": {"pattern": "so"}},
    ],
    "algorithm": {"group_size": 4, "groups_per_step": 2},
    "adapter": {"rank": 8},
    "sampling": {"max_tokens": 8},
    "optimizer": {"lr": 1e-4},
    "steps": LEAST,
    "eval": {"every": 1},
}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("taught")
    motet.run([SFT], directory=directory, quiet=True)
    return directory / "form" / "versions" / "v12"


def run(directory: Path, **fields: Any) -> tuple[str, ...]:
    """The diagnoses of a job with other fields."""
    motet.run([{**RL, **fields}], directory=directory, quiet=True)
    return read_job(directory / "rl").warnings


def test_who_teaches_the_form_first_is_told_no_more_that_a_part_was_never_earned(tmp_path: Path, taught: Path) -> None:
    told = "part regex was 0 in all 5 steps"
    assert [told in one for one in run(tmp_path / "ill") if "#never" in one] == [True]
    assert not [one for one in run(tmp_path / "well", adapter={"init": str(taught)}) if "#never" in one]


def test_a_policy_that_began_far_from_the_base_is_not_told_that_it_went_there(tmp_path: Path, taught: Path) -> None:
    init, algorithm = {"init": str(taught)}, RL["algorithm"]
    penalties = {
        "base": {"coef": 0.01},
        "start": {"coef": 0.01, "reference": "start"},
        "dir": {"coef": 0.01, "reference": str(taught)},
    }
    kl = {}
    for name, penalty in penalties.items():
        told = run(tmp_path / name, adapter=init, algorithm={**algorithm, "kl": penalty})
        assert not [one for one in told if "#far" in one], name
        kl[name] = [line["kl_base"] for line in metrics(tmp_path / name / "rl") if line.get("kl_base") is not None]
    assert kl["base"][0] > FAR
    assert kl["start"][0] == kl["dir"][0] == 0.0
    assert max(kl["start"]) < FAR / 2


def test_the_reference_of_a_penalty_is_named_where_it_cannot_be(tmp_path: Path) -> None:
    for reference, says in (
        ("http://h:1", "no server is asked here"),
        (str(tmp_path), r"algorithm\.kl\.reference: .*adapter_config.json"),
    ):
        with pytest.raises(ConfigError, match=says):
            motet.run([{**RL, "algorithm": {"kl": {"reference": reference}}}], directory=tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="kl: the penalty would be to the teacher"):
        parse_jobs(
            "base: small\njobs: [{name: a, data: toy:add, algorithm: {type: distill, teacher: base, kl: {reference: start}}}]"
        )
    (tmp_path / "near").mkdir()
    text = "base: small\njobs: [{name: a, data: toy:add, reward: exact, algorithm: {kl: {reference: near}}}]"
    (job,) = parse_jobs(text, directory=tmp_path).jobs
    assert job.algorithm.compared_with == str(tmp_path / "near"), "beside the job file"
