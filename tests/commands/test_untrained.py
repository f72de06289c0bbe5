"""Whoever takes, evaluates or continues a version that equals the adapter of its beginning is told so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from motet.config.jobfile import load_jobs
from motet.hosts.running import run_config
from tests.support.commands import Motet, job_file
from tests.support.small_runs import REWARDS, job

COMMANDS = {
    "export": "export {version} --to {new} --format peft",
    "card": "export {version} --to {new} --format card",
    "eval": "eval {jobs} {job}@best",
    "eval of a directory": "eval {jobs} {version} --task {job}",
    "chat": "chat small --adapter {version}",
    "fork": "fork {jobs} {job}@best {new}",
    "run": "run {next} --run {new}",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 is the last and the best of both jobs. That of `digits` is trained, that of `still` is not."""
    directory = tmp_path_factory.mktemp("untrained")
    rewards = directory / "rewards.py"
    rewards.write_text(f"{REWARDS}\ndef floor(problem, completion):\n    return 0.0\n")
    trains = job("digits", rewards, steps=1, eval={"every": 1})
    jobs = [trains, {**trains, "name": "still", "reward": f"{rewards}:floor"}]
    assert run_config(load_jobs(job_file(directory, *jobs, run=str(directory / "run")))).ok
    return directory


@pytest.mark.parametrize("name", ["still", "digits"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_person_who_takes_an_untrained_version_is_told(
    command: str, name: str, project: Path, tmp_path: Path, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, new = project / f"run/{name}/versions/v1", tmp_path / "new"
    following = job("next", project / "rewards.py", steps=1, adapter={"init": str(version)})
    names = {"version": version, "new": new, "jobs": project / "jobs.yaml", "job": name}
    words = COMMANDS[command].format(**names, next=job_file(tmp_path, following))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, err = says(*words.split())
    assert code == 0, out + err
    told = "v1 of still is untrained: it equals the adapter that the job began with"
    assert (told in " ".join(f"{out} {err}".split())) == (name == "still"), out + err
    if command == "card":
        assert (f"{told}." in (new / "README.md").read_text()) == (name == "still")
