"""`motet diff`: what differs between two jobs is named, field by field, step by step, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Motet
from tests.support.small_runs import REWARDS, job, run

pytestmark = pytest.mark.tier1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `same` has equal jobs in both; `rate` and `data` differ in what they are called for."""
    from motet.config import EngineConfig
    from motet.hosts.launch import load

    directory = tmp_path_factory.mktemp("diff")
    first, second = directory / "rewards.py", directory / "other" / "rewards.py"
    second.parent.mkdir()
    first.write_text(REWARDS)
    second.write_text(REWARDS.replace("/ 8", "/ 4"))
    base, held_out = load("small", EngineConfig(kernels="auto")), {"size": 64, "holdout": 8}

    def of(name: str, rewards: Path = first, **fields: Any) -> dict[str, Any]:
        return job(name, rewards, eval={"every": 1}, seed=7, **{"data": held_out, **fields})

    assert run(base, directory / "a", [of("same"), of("rate"), of("data")]).ok
    others = [of("same"), of("rate", second, optimizer={"lr": 0.02}), of("data", data={**held_out, "seed": 1})]
    assert run(base, directory / "b", others).ok
    return directory


def told(trained: Path, tmp_path: Path, says: Motet, job: str, *words: object) -> tuple[str, dict[str, Any]]:
    report = tmp_path / "diff.json"
    code, out, err = says("diff", trained / "a" / job, trained / "b" / job, *words, "--json", report)
    assert (code, err) == (0, "")
    return out, json.loads(report.read_text())


def test_equal_jobs_have_no_difference(trained: Path, tmp_path: Path, says: Motet) -> None:
    out, facts = told(trained, tmp_path, says, "same")
    assert "settings: equal" in out
    assert "base, data and code: equal" in out
    assert facts["rollouts_differ_from"] is None
    assert [one["versions"] for one in facts["held_out"]] == [[n, n] for n in range(4)]
    assert all(one["difference"] == {"n": 8, "mean": 0, "half": 0} for one in facts["held_out"])


def test_settings_code_and_the_step_where_they_part_are_named(trained: Path, tmp_path: Path, says: Motet) -> None:
    out, facts = told(trained, tmp_path, says, "rate")
    settings = {one["setting"]: (one["first"], one["second"]) for one in facts["settings"]}
    assert settings == {"learning_rate": (0.01, 0.02), "optimizer.lr": (0.01, 0.02)}
    (material,) = facts["materials"]
    assert material["material"] == "code/rewards.py"
    assert f"code/rewards.py  {material['first'][:12]}  {material['second'][:12]}" in out
    assert facts["rollouts_differ_from"] == 0  # the reward is recorded with an answer
    assert "recorded rollouts differ from step 0 on" in out


def test_data_that_differ_are_named_and_have_no_common_problems(trained: Path, tmp_path: Path, says: Motet) -> None:
    code, out, err = says("diff", trained / "a" / "data", trained / "b" / "data")
    assert (code, err) == (0, "")
    assert "data/train" in out
    assert "data/holdout" in out
    assert out.count("other problems") == 4


def test_versions_of_one_job(trained: Path, tmp_path: Path, says: Motet) -> None:
    place = trained / "a" / "rate"
    code, out, _ = says("diff", f"{place}@1", f"{place}@latest")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith((" v", "v"))] == [
        "version",
        "v0",
        "v1",
        "v1,",
    ]
    for wrong, why in ((f"{place}@4", "has done 3 steps: there is no version 4"), (f"{place}@new", "names no job")):
        code, _, err = says("diff", wrong, place)
        assert code == 2
        assert why in err


def test_a_run_and_a_job_that_is_not_there_are_refused(trained: Path, says: Motet) -> None:
    jobs = " or ".join(str(trained / "a" / name) for name in ("data", "rate", "same"))
    for wrong, why in (
        (trained / "a", f"{trained / 'a'} is no job's directory: write {jobs}"),
        (f"{trained / 'a' / 'none'}@best", "none is no job's directory: write RUN/JOB"),
    ):
        code, out, err = says("diff", wrong, trained / "b")
        assert (code, out) == (2, "")
        assert why in err


def test_recorded_answers_are_shown_side_by_side(trained: Path, tmp_path: Path, says: Motet) -> None:
    out, facts = told(trained, tmp_path, says, "rate", "--rollouts", "--limit", 3)
    assert "answers of rollouts/eval-3.jsonl, 3 of 8 problems, the largest differences first" in out
    apart = [abs(one["answers"][1][0]["reward"] - one["answers"][0][0]["reward"]) for one in facts["rollouts"]]
    assert apart == sorted(apart, reverse=True)
    assert len(apart) == 3
    for side, run_ in enumerate("ab"):
        path = trained / run_ / "rate" / "rollouts" / "eval-3.jsonl"
        recorded = {line["prompt"]: line["completion"] for line in map(json.loads, path.read_text().splitlines())}
        for one in facts["rollouts"]:
            assert one["answers"][side][0]["completion"] == recorded[one["prompt"]]
            assert repr(recorded[one["prompt"]]) in out
    assert "answers of rollouts/0.jsonl" in told(trained, tmp_path, says, "rate", "--rollouts", "--step", 0)[0]
    code, _, err = says("diff", trained / "a" / "rate", trained / "b" / "rate", "--rollouts", "--step", 9)
    assert code == 2
    assert "no problem has answers of both jobs in rollouts/9.jsonl" in err
