"""Candidates of a search, or of a race of an earlier release, are jobs of their run though its job file lists none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from motet.commands.candidates import known_jobs
from motet.commands.evaluate import Asked, find_models, task_of
from motet.config import JobConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError, RunError
from motet.hosts.running import run_config
from motet.runtime.identity import of_config
from tests.support.commands import Motet, job_file
from tests.support.service_run import tiny

OTHER: dict[str, Any] = {
    "adapter": {"rank": 4},
    "optimizer": {"lr": 0.004, "lr_factors": {1: 0.3}},
    "algorithm": {"group_size": 2, "groups_per_step": 4},
    "eval": {"every": 1, "confirm": True},
    "seed": 7,
}
NAME = "sort-c=01-lr=0.004-rank=4"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a job, beside the run of a candidate of it."""
    directory = tmp_path_factory.mktemp("searched")
    where = {"run": str(directory / "run"), "engine": {"samplers": 0}}
    assert run_config(load_jobs(job_file(directory, tiny(NAME) | OTHER, **where))).ok
    return Path(job_file(directory, tiny("sort", seed=7), tiny("other"), **where))


def test_a_candidate_is_verified_with_its_job_file_and_replayed(searched: Path, says: Motet) -> None:
    code, out, err = says("verify", searched.parent / "run", "--jobs", searched)
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"{NAME}: 2 kept commits, 3 versions, 4 receipts, all as they were saved"]
    code, out, _ = says("replay", searched, f"{NAME}@3")
    assert (code, "the same bytes, and the same rollouts" in out) == (0, True), out
    code, _, err = says("replay", searched, NAME[:-1])
    assert f"there is no job {NAME[:-1]!r}; did you mean {NAME!r}?" in err


def test_a_candidate_is_a_model_and_a_task(searched: Path) -> None:
    config = load_jobs(searched)
    versions = searched.parent / "run" / NAME / "versions"
    (one,) = find_models(config, [f"{NAME}@2"])
    assert one.path == versions / "v2"
    assert task_of(config, [f"{NAME}@2"], Asked()).name == NAME
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {NAME}?")):
        find_models(config, [NAME[:-1]])


def test_a_candidate_has_the_settings_of_its_directory_and_the_rest_of_its_job(searched: Path) -> None:
    config = load_jobs(searched)
    found = known_jobs(config.jobs, searched.parent / "run")
    assert list(found) == ["sort", "other", NAME]
    trained = load_jobs(job_file(searched.parent / "run", tiny(NAME) | OTHER)).jobs[0]
    assert found[NAME].model_dump() == trained.model_dump()


def test_a_candidate_begins_where_its_job_does(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    job = JobConfig.model_validate(tiny("sort", adapter={"init": str(tmp_path / "adapter"), "rank": 8}))
    candidate = JobConfig.model_validate(tiny(NAME, adapter={"init": str(tmp_path / "adapter"), "rank": 4}, seed=7))
    stored = of_config(candidate)["job"]
    assert stored["adapter"]["init"] == "adapter"
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "job.yaml").write_text(json.dumps({"job": stored}))
    assert known_jobs([job], tmp_path)[NAME].adapter == candidate.adapter


def test_a_damaged_candidate_is_named(searched: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    for text in ("job: [", "job: {seed: 1}", "a text"):
        (tmp_path / NAME / "job.yaml").write_text(text)
        with pytest.raises(RunError, match=r"job\.yaml is damaged .*; put it back"):
            known_jobs(load_jobs(searched).jobs, tmp_path)
    (tmp_path / NAME).rename(tmp_path / "unknown-c=01")
    assert list(known_jobs(load_jobs(searched).jobs, tmp_path)) == ["sort", "other"]
