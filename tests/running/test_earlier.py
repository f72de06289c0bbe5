"""A run directory that an earlier Motet left halfway opens, goes on, verifies and is derived again."""

from __future__ import annotations

import hashlib
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from digests import processor
from motet.commands.cli import app
from motet.commands.verify import verify
from motet.config.jobfile import load_jobs
from motet.core.types import JobState
from motet.hosting.running import run_config
from motet.runtime.checkpoint import JobDirectory
from motet.view.results import RunResult
from tests.support.earlier import KNOWN, unpack

JOBS = ("done", "half", "pairs")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it was left."""
    return unpack("project", tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def continued(left: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """A copy whose jobs were trained to their ends; elsewhere than where it was made, with accepted changes."""
    project = tmp_path_factory.mktemp("continued") / "project"
    shutil.copytree(left, project)
    config = load_jobs(project / "jobs.yaml", [f"run={project / 'run'}"])
    return project, run_config(config, accept_changes=not _as_there(left))


def _has_its_versions(project: Path) -> bool:
    versions = yaml.safe_load((project / "run/half/job.yaml").read_text())["versions"]
    return all(version(name) == versions[name] for name in versions)


def _as_there(project: Path) -> bool:
    """Whether this machine computes the bits of the one that made it for sure; another processor may."""
    return KNOWN["processor"] == processor() and _has_its_versions(project)


def test_it_is_undamaged_and_has_a_report(left: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(left, project)
    assert verify(project / "run", None) == 0
    shown = CliRunner().invoke(app, ["report", str(project / "run")])
    assert shown.exit_code == 0, shown.output
    page = (project / "run/report.html").read_text()
    assert all(re.search(rf"\b{name}\b", page) for name in JOBS)


def test_its_jobs_go_on_to_the_bytes_that_they_would_have_had(continued: tuple[Path, RunResult]) -> None:
    project, result = continued
    assert {name: job.state for name, job in result.jobs.items()} == dict.fromkeys(JOBS, JobState.SUCCEEDED)
    kept = {place: project / "run" / place / "adapter_model.safetensors" for place in KNOWN["adapters"]}
    if _as_there(project):
        found = {place: hashlib.sha256(path.read_bytes()).hexdigest() for place, path in kept.items() if path.is_file()}
        assert found == KNOWN["adapters"]
        assert not any(job.inexact for job in result.jobs.values())
    else:
        inexact = {bool(result.jobs[name].inexact) for name in ("half", "pairs")}
        assert inexact == {not _has_its_versions(project)}
    assert verify(project / "run", None) == 0


def test_they_keep_the_rules_that_they_began_with(continued: tuple[Path, RunResult]) -> None:
    project, _ = continued
    for name in JOBS:
        done = JobDirectory(project / "run" / name).newest()
        assert done is not None
        assert (done.rules, done.clock) == (0, "")
        assert not {"rules", "clock"} & yaml.safe_load((project / "run" / name / "job.yaml").read_text()).keys()


def test_its_steps_are_derived_again_by_a_motet_in_another_place(left: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(left, project)
    words = ["replay", str(project / "jobs.yaml"), "done@0..2", "--set", f"run={project / 'run'}"]
    shown = CliRunner().invoke(app, words)
    if _as_there(left):
        assert shown.exit_code == 0, shown.output
        assert "done, versions 1 to 2: the same bytes, and the same rollouts" in shown.output
    else:
        assert re.search("the runs first differ in step|the same bytes, and the same rollouts", shown.output)
