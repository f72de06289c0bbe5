"""Races on several hosts: the decisions and bytes of one process, in any order, whatever dies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from motet.cluster.run import HostedJob, HostedRun
from motet.config import RunConfig
from motet.config.candidates import raced
from motet.jobfile import validate
from motet.running import run_config
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.interrupt import Interrupt
from motet.runtime.progress import JobProgress
from motet.runtime.race import Race, RaceRecord
from motet.runtime.rundir import RunDirectory
from motet.types import JobState
from tests.support.service_run import PATIENCE, Json, tiny
from tests.support.waiting import wait_until

ENGINE = {"samplers": 0, "threads": 1}
RACE = {"candidates": 4, "first": 1, "finalists": 1, "over": {"optimizer.lr": [1e-3, 4e-3, 1.6e-2]}}
DATA = {"source": "toy:sort_letters", "size": 64, "holdout": 12}


def tree(path: Path, **engine: int) -> Json:
    """A race with decisions after two and after three steps of six."""
    job = tiny("say", steps=6, data=DATA, race=RACE, checkpoint={"keep": 100})
    return {"base": "small", "run": str(path), "engine": {**ENGINE, **engine}, "jobs": [job]}


def config(path: Path, **engine: int) -> RunConfig:
    return validate(tree(path, **engine), "the test")


def contents(path: Path) -> dict[str, bytes]:
    """What a race may not owe to hosts, order or interruption."""
    wanted = ("metrics.jsonl", "adapter_model.safetensors", "optimizer.safetensors", "say.race.json")
    files = [file for file in path.rglob("*") if file.name in wanted or file.parent.name == "rollouts"]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The race in one process."""
    path = tmp_path_factory.mktemp("alone")
    assert run_config(config(path)).ok
    record = RaceRecord.read(path / "say.race.json")
    assert [len(rung.standings) for rung in record.rungs] == [4, 2]
    return contents(path)


def steps(run: Path) -> list[int]:
    """The last commit of each candidate that has one."""
    found = [JobDirectory(file.parent).steps() for file in run.glob("*/job.yaml")]
    return [max(one) for one in found if one]


def kill_host(run: Path, number: int) -> None:
    psutil.Process(int((run / f".lock.host-{number}").read_text())).kill()


def test_a_race_decides_the_same_after_a_host_was_killed(tmp_path: Path, alone: dict[str, bytes]) -> None:
    ended = threading.Event()

    def kill() -> bool:
        while 1 not in steps(tmp_path):
            if ended.wait(0.01):
                return False
        kill_host(tmp_path, 1)
        return True

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        try:
            result = run_config(config(tmp_path, hosts=2))
        finally:
            ended.set()
    assert killed.result(), "it ended before a host was killed"
    assert result.ok, result
    assert contents(tmp_path) == alone
    record = result.races["say"]
    assert record == RaceRecord.read(tmp_path / "say.race.json")
    assert {name: result.jobs[name].message for name in record.dropped()} == record.dropped()


def test_a_race_decides_the_same_whichever_host_has_which_candidate(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """One slot a host and the reverse order: the candidates arrive one after another, the last ones first."""
    ordinary, plans = raced(config(tmp_path, hosts=2, slots=1).jobs)
    seen = set[tuple[str, ...]]()

    def observe(progress: Sequence[JobProgress]) -> None:
        seen.add(tuple(one.name for one in progress if one.state is JobState.QUEUED and one.step == 2))

    with contextlib.closing(RunDirectory(tmp_path, "run")) as directory:
        jobs = [HostedJob(one, directory.job(one.name), JobProgress.of(one)) for one in reversed(ordinary)]
        races = [Race(plan, {job.name: job for job in jobs}, tmp_path) for plan in plans]
        wanted = config(tmp_path, hosts=2, slots=1).model_copy(update={"jobs": ordinary})
        run, interrupt = HostedRun(wanted, directory, jobs, races=races), Interrupt()
        interrupt.run(lambda: run.run(interrupt, observe))
    assert contents(tmp_path) == alone
    assert any(0 < len(waiting) < 4 for waiting in seen), "some waited for others"


def test_a_race_on_hosts_that_was_killed_goes_on_with_the_same_decisions(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    """Killed while candidates train to the first decision, right after it, and when a host has died besides."""
    file, run = tmp_path / "jobs.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(tree(run, hosts=2)))
    command = [sys.executable, "-m", "motet", "run", str(file)]
    for moment in (lambda: 1 in steps(run), (run / "say.race.json").exists, lambda: 4 in steps(run)):
        with (tmp_path / "out").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            wait_until(moment, PATIENCE, process)
            if 4 in steps(run):
                kill_host(run, 0)
        finally:
            process.kill()
            process.wait()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(run) == alone
    assert "dropped" in done.stdout
