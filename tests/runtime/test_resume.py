"""Runs that are stopped, killed and taken up again end with the bytes of a run that nothing happened to."""

from __future__ import annotations

import cProfile
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from motet.commands.verify import verify
from motet.config import JobConfig
from motet.core.types import JobState, Problem
from motet.runtime.manifest import MANIFEST
from tests.support.cases import few
from tests.support.fake_run import FakeRun, Setting, job, metrics, run_jobs, vowels
from tests.support.processes import ending
from tests.support.waiting import until

pytestmark = pytest.mark.tier1

ROOT = Path(__file__).resolve().parents[2]


def files(path: Path) -> dict[str, bytes]:
    """What a job leaves, apart from what depends on time: metrics, rollouts, every version and commit."""
    kept = ("timings.jsonl", "status.json", "control", MANIFEST)
    found = {str(item.relative_to(path)): item for item in sorted(path.rglob("*")) if item.is_file()}
    return {name: item.read_bytes() for name, item in found.items() if name not in kept and "state.json" not in name}


def jobs(lag: int, every: int) -> list[JobConfig]:
    shared: dict[str, Any] = {"steps": 9, "checkpoint": {"every": every, "keep": 2}}
    return [
        job("a", algorithm={"max_off_policy_steps": lag}, **shared),
        job("b", algorithm={"type": "dr_grpo", "kl": {"coef": 0.05}}, environment="retry", eval={"every": 4}, **shared),
    ]


@pytest.mark.parametrize(
    ("lag", "every"),
    [(0, 1), pytest.param(0, 4, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow), (2, 4)],
)
def test_stop_saves_and_the_next_run_goes_on(lag: int, every: int, tmp_path: Path) -> None:
    configs = jobs(lag, every)
    run_jobs(tmp_path / "whole", configs)

    for stop_at in (0, 2, 5, 7):

        async def script(run: FakeRun, stop_at: int = stop_at) -> None:
            await until(lambda: max(one.progress.step for one in run.jobs.values()) >= stop_at)
            run.pipeline.stop()

        run = run_jobs(tmp_path / "cut", configs, Setting(jitter=stop_at), script)
        assert {one.state for one in run.jobs.values()} <= {JobState.PAUSED, JobState.SUCCEEDED}
        for one in run.jobs.values():
            committed = one.directory.newest()
            assert (committed.step if committed else 0) == one.progress.step, "a step that was done is not saved"
        assert run.engine.loaded == frozenset()
    run = run_jobs(tmp_path / "cut", configs)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    for name in "ab":
        assert metrics(tmp_path / "cut", name) == metrics(tmp_path / "whole", name)
    if every == 1:  # otherwise the stops made commits of their own
        assert files(tmp_path / "cut" / "b") == files(tmp_path / "whole" / "b")


@pytest.mark.parametrize(("threads", "exact"), [(1, True), (2, False)])
def test_another_number_of_threads_is_remembered(threads: int, exact: bool, tmp_path: Path) -> None:
    """A sum over a whole gradient depends on it, so the job says that its bytes may differ, for good."""

    async def script(run: FakeRun) -> None:
        await until(lambda: run.jobs["a"].progress.step >= 1)
        run.pipeline.stop()

    configs = jobs(0, 1)[:1]
    run_jobs(tmp_path, configs, Setting(threads=1), script)
    for setting in (Setting(threads=threads), Setting(threads=threads)):
        run = run_jobs(tmp_path, configs, setting)
    assert run.state("a") is JobState.SUCCEEDED
    inexact = run.jobs["a"].directory.read_status()["inexact"]
    assert (inexact == []) is exact, inexact
    assert exact or "threads changed from 1 to 2" in inexact[0]


def test_a_stop_before_anything_began(tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        run.pipeline.stop()

    run = run_jobs(tmp_path, jobs(0, 1), Setting(slots=1), script)
    assert {one.state for one in run.jobs.values()} == {JobState.PAUSED}
    assert all(one.state is JobState.SUCCEEDED for one in run_jobs(tmp_path, jobs(0, 1)).jobs.values())


PROGRAM = """
import functools, sys
from pathlib import Path
from tests.support.fake_trainer import FakeTrainer
from tests.support.fake_run import Setting, run_jobs
from tests.runtime.test_resume import jobs
trainer = functools.partial(FakeTrainer, seconds=0.002)
run_jobs(Path(sys.argv[1]), jobs(int(sys.argv[2]), int(sys.argv[3])), Setting(trainer=trainer, jitter=int(sys.argv[4])))
"""


def start(path: Path, lag: int, every: int, jitter: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(lag), str(every), str(jitter)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("attempts", few([2, 8], 2))
@pytest.mark.parametrize(("lag", "every"), [(0, 3), (2, 1)])
def test_kill_9_at_any_moment(lag: int, every: int, attempts: int, tmp_path: Path) -> None:
    """Killed again and again, at moments that differ from run to run: whatever was half-written must not show."""
    configs, moments = jobs(lag, every), random.Random()
    run_jobs(tmp_path / "whole", configs)
    cut, kills = tmp_path / "cut", 0
    for attempt in range(attempts):
        with ending(start(cut, lag, every, attempt)) as process:
            while process.poll() is None and not list(cut.glob("*/state/[0-9]*")):
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.15))
        kills += process.returncode == -signal.SIGKILL
        assert verify(cut) == 0
    run = run_jobs(cut, configs)
    assert kills, "every run had ended before it was killed: let it take longer"
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    for name in "ab":
        assert files(cut / name) == files(tmp_path / "whole" / name)


def test_a_crash_between_commit_and_version_leaves_no_hole(tmp_path: Path) -> None:
    """The commit is there, its PEFT directory is not: taking the job up makes it, also where nothing is left to train."""
    version = tmp_path / "a" / "versions" / "v4"

    def cut_off(problem: Problem, completion: str) -> float:
        owner = (tmp_path / ".owner-a").read_text()
        (version.with_name(f".tmp-{owner}-v4")).touch()  # where the version is about to be made
        return vowels(problem, completion)

    run = run_jobs(tmp_path, [job("a", reward={"name": "vowels", "function": cut_off})])
    assert (run.state("a"), run.jobs["a"].directory.steps()[-1]) == (JobState.FAILED, 4)
    assert not version.exists()
    assert verify(tmp_path) == 0
    assert run_jobs(tmp_path, [job("a")]).state("a") is JobState.SUCCEEDED
    assert (version / "adapter_model.safetensors").is_file()
    assert verify(tmp_path) == 0


def test_a_job_that_resumes_is_read_without_yaml_s_python_parser(tmp_path: Path) -> None:
    """It takes most of the time of opening a job, and a host opens all its jobs when it resumes."""
    run_jobs(tmp_path, [job("a", steps=1)])
    with cProfile.Profile() as profile:
        run_jobs(tmp_path, [job("a", steps=2)])
    files = {Path(one.code.co_filename).as_posix() for one in profile.getstats() if not isinstance(one.code, str)}
    assert any(name.endswith("runtime/directory_checks.py") for name in files)
    assert [name for name in files if name.endswith("yaml/scanner.py")] == []


def test_versions_of_two_attempts_never_meet(tmp_path: Path) -> None:
    first = run_jobs(tmp_path, [job("a")])
    second = run_jobs(tmp_path, [job("a")])
    assert first.engine.loads
    assert not set(first.engine.loads) & set(second.engine.loads)
