"""Run directories that earlier Motets left halfway open, are shown, verified, evaluated and exported.

Jobs of today's rules go on to the bytes that they would have had; others are refused, or go on as `inexact`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from digests import processor
from motet.commands.cli import app
from motet.commands.verify import verify
from motet.config.jobfile import load_jobs
from motet.core.errors import RunError
from motet.core.types import ADAPTER_WEIGHTS, JobState
from motet.hosts.running import run_config
from motet.observe.results import RunResult
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import RULES
from tests.support.earlier import COMMITS, KNOWN, OTHER_RULES, SAME_RULES, unpack

pytestmark = pytest.mark.bits

JOBS = ("done", "half", "pairs")


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The project as a commit left it."""
    return unpack(request.param, "project", tmp_path)


def rules_of(request: pytest.FixtureRequest) -> int:
    """The number of the rules of the commit that left the project."""
    return OTHER_RULES.get(request.node.callspec.params["project"], RULES)


def told(*words: str) -> str:
    """What a command prints that must succeed."""
    shown = CliRunner().invoke(app, list(words))
    assert shown.exit_code == 0, shown.output
    return shown.output


def go_on(project: Path, *, accept_changes: bool) -> RunResult:
    return run_config(load_jobs(project / "jobs.yaml", [f"run={project / 'run'}"]), accept_changes=accept_changes)


def identity(project: Path, job: str) -> dict[str, Any]:
    stored: dict[str, Any] = yaml.safe_load((project / "run" / job / "job.yaml").read_text())
    return stored


@pytest.mark.parametrize("project", COMMITS, indirect=True)
def test_it_is_undamaged_and_has_a_report(project: Path) -> None:
    assert verify(project / "run", None) == 0
    told("report", str(project / "run"))
    page = (project / "run/report.html").read_text()
    assert all(re.search(rf"\b{name}\b", page) for name in JOBS)


@pytest.mark.parametrize("project", COMMITS, indirect=True)
def test_its_versions_are_evaluated_and_exported(project: Path) -> None:
    said = told("eval", str(project / "jobs.yaml"), "half", "pairs", "--set", f"run={project / 'run'}")
    assert re.search(r"half\b.*\d\.\d\d", said), said
    for job in ("done", "half", "pairs"):
        version, out = JobDirectory(project / "run" / job).version_named("best"), project / "exported" / job
        told("export", str(version), "--to", str(out), "--format", "peft", "--base", "small")
        assert (out / ADAPTER_WEIGHTS).read_bytes() == (version / ADAPTER_WEIGHTS).read_bytes()


@pytest.mark.parametrize("project", COMMITS, indirect=True)
def test_its_receipts_are_compared_with_what_is_here(
    request: pytest.FixtureRequest, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        verify(project / "run", project / "jobs.yaml", [f"run={project / 'run'}"])
        return " ".join(capsys.readouterr().out.split())

    number, first = rules_of(request), shown()
    other = number != RULES
    assert (f"its rows were not compared, as Motet 0.1.0 read them by rules {number}" in first) == other
    assert not re.search(r"(data|code|base)/\S+ is not what it was|job\.", first)
    (project / "rows.jsonl").write_text((project / "rows.jsonl").read_text().replace("word", "words"))
    assert ("half: data/train is not what it was" in shown()) != other


@pytest.mark.parametrize("project", [SAME_RULES], indirect=True)
def test_jobs_of_todays_rules_go_on_to_the_bytes_that_they_would_have_had(project: Path) -> None:
    """Wherever a job says that it is exact; elsewhere than where it began, it may say that it is not."""
    before, known = {name: identity(project, name) for name in JOBS}, KNOWN[SAME_RULES]
    result = go_on(project, accept_changes=True)
    assert {name: job.state for name, job in result.jobs.items()} == dict.fromkeys(JOBS, JobState.SUCCEEDED)
    for name in ("half", "pairs"):
        now = identity(project, name)
        as_there = all(now[one] == before[name][one] for one in ("versions", "kernels", "device"))
        assert bool(result.jobs[name].inexact) != as_there
    if known["processor"] == processor():
        exact = {place for place in known["adapters"] if not result.jobs[place.partition("/")[0]].inexact}
        kept = {place for place in exact if (project / "run" / place / ADAPTER_WEIGHTS).is_file()}
        assert {f"{name}/versions/v10" for name in ("half", "pairs")} & exact <= kept
        files = {place: (project / "run" / place / ADAPTER_WEIGHTS).read_bytes() for place in kept}
        found = {place: hashlib.sha256(content).hexdigest() for place, content in files.items()}
        assert found == {place: known["adapters"][place] for place in kept}
    assert verify(project / "run", None) == 0


@pytest.mark.parametrize("project", OTHER_RULES, indirect=True)
def test_jobs_of_other_rules_are_refused_and_go_on_as_inexact_where_that_is_accepted(
    request: pytest.FixtureRequest, project: Path
) -> None:
    number = rules_of(request)
    with pytest.raises(RunError) as refused:
        go_on(project, accept_changes=False)
    for name in ("half", "pairs"):
        assert re.search(
            rf"/{name} was trained by Motet 0\.1\.0 with rules {number}, and this is Motet \S+ with rules {RULES}",
            str(refused.value),
        )
    assert "run/done" not in str(refused.value)
    result = go_on(project, accept_changes=True)
    assert {name: job.state for name, job in result.jobs.items()} == dict.fromkeys(JOBS, JobState.SUCCEEDED)
    for name, job in result.jobs.items():
        done = JobDirectory(project / "run" / name).newest()
        assert done is not None
        assert done.rules == (number if name == "done" else RULES)
        assert any(line.startswith(f"the rules changed from {number} to {RULES}") for line in job.inexact) == (
            name != "done"
        )
    assert verify(project / "run", None) == 0


@pytest.mark.parametrize("project", OTHER_RULES, indirect=True)
def test_steps_of_other_rules_are_trained_again_by_their_motet_alone(
    request: pytest.FixtureRequest, project: Path
) -> None:
    words = ["replay", str(project / "jobs.yaml"), "done@0..2", "--set", f"run={project / 'run'}"]
    why = CliRunner().invoke(app, words).exception
    assert isinstance(why, RunError)
    assert f"version 1 of done was trained by Motet 0.1.0 with rules {rules_of(request)}, and this is Motet" in str(why)


@pytest.mark.parametrize("project", [SAME_RULES], indirect=True)
def test_its_steps_are_derived_again_by_a_motet_in_another_place(project: Path) -> None:
    words = ["replay", str(project / "jobs.yaml"), "done@0..2", "--set", f"run={project / 'run'}"]
    shown = CliRunner().invoke(app, words)
    as_there = not re.search(r"(kernels|device|versions\.\w+): was", shown.output)
    if KNOWN[SAME_RULES]["processor"] == processor() and as_there:
        assert "done, versions 1 to 2: the same bytes, and the same rollouts" in shown.output, shown.output
    assert re.search("the runs first differ in step|the same bytes, and the same rollouts", shown.output), shown.output
