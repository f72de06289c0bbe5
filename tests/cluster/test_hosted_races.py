"""Races on several hosts: the decisions and bytes of one process, in any order, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from motet.cluster.host_link import HostChild
from motet.cluster.messages import (
    AddJob,
    FromHost,
    HostReady,
    JobChanged,
    JobStepped,
    Released,
    StartHost,
    Stop,
    Stopped,
)
from motet.cluster.run import HostedJob, HostedRun
from motet.config import JobConfig, RunConfig
from motet.config.candidates import raced
from motet.config.jobfile import validate
from motet.core.types import JobState
from motet.hosting.running import run_config
from motet.process.channel import ChannelMessage
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.interrupt import Interrupt
from motet.runtime.progress import JobProgress
from motet.runtime.race import Race
from motet.runtime.race_record import RaceRecord
from motet.runtime.rundir import RunDirectory
from tests.support.fake_run import Setting, records, run_jobs
from tests.support.fake_run import job as fake_job
from tests.support.service_run import Json, host_process, tiny
from tests.support.waiting import PATIENCE, wait_until

ENGINE = {"samplers": 0, "threads": 1}
RACE = {"candidates": 4, "first": 1, "finalists": 1, "over": {"optimizer.lr": [1e-3, 4e-3, 1.6e-2]}, "exploit": [0.3]}
DATA = {"source": "toy:sort_letters", "size": 64, "holdout": 12}


def tree(path: Path, **engine: int) -> Json:
    """A race with decisions after two and after three steps of six; the first one copies the leader."""
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
    assert [len(rung.copies) for rung in record.rungs] == [1, 0]
    return contents(path)


def _no_copies(config: JobConfig) -> HostedJob:
    raise AssertionError(f"{config.name}: this race makes no copies")


def steps(run: Path) -> list[int]:
    """The last commit of each candidate that has one."""
    found = [JobDirectory(file.parent).steps() for file in run.glob("*/job.yaml")]
    return [max(one) for one in found if one]


@pytest.mark.soak
def test_a_race_decides_the_same_after_a_host_was_killed(tmp_path: Path, alone: dict[str, bytes]) -> None:
    ended = threading.Event()

    def kill() -> bool:
        while 1 not in steps(tmp_path):
            if ended.wait(0.01):
                return False
        host_process(tmp_path, 1).kill()
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


def test_a_race_decides_the_same_whichever_host_has_which_candidate(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, alone: dict[str, bytes]
) -> None:
    """One slot a host and the reverse order: the candidates arrive one after another, the last ones first.

    A race beside it is refused when rows with long prompts have been left out: too few held-out rows are there.
    """
    rows = [{"prompt": f"Add {i}" + " and one more" * 20 * (i == 5), "answer": "1"} for i in range(12)]
    evaluation = tmp_path_factory.mktemp("rows") / "evaluation.jsonl"
    evaluation.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"source": "toy:add", "size": 24, "eval_source": str(evaluation), "max_prompt_tokens": 30}
    both = tree(tmp_path, hosts=2, slots=1)
    both["jobs"].append({"name": "few", "data": data, "reward": "exact", "race": 4, "sampling": {"max_tokens": 2}})
    ordinary, plans = raced(validate(both, "the test").jobs)
    seen = set[tuple[str, ...]]()

    def observe(progress: Sequence[JobProgress]) -> None:
        seen.add(tuple(one.name for one in progress if one.state is JobState.QUEUED and one.step == 2))

    with contextlib.closing(RunDirectory(tmp_path, "run")) as directory:

        def join(one: JobConfig) -> HostedJob:
            return HostedJob(one, directory.job(one.name), JobProgress.of(one))

        jobs = [join(one) for one in reversed(ordinary)]
        races = [Race(plan, {job.name: job for job in jobs}, tmp_path, join) for plan in plans]
        wanted = config(tmp_path, hosts=2, slots=1).model_copy(update={"jobs": ordinary})
        run, interrupt = HostedRun(wanted, directory, jobs, races=races), Interrupt()
        interrupt.run(lambda: run.run(interrupt, observe))
    assert contents(tmp_path) == alone
    why = "race: 11 held-out rows are too few.*; raise data.holdout or data.max_prompt_tokens"
    refused = [job for job in jobs if job.name.startswith("few")]
    assert len(refused) == 4
    assert all(re.fullmatch(why, job.progress.message) for job in refused), refused
    assert any(0 < len(waiting) < 4 for waiting in seen), "some waited for others"


@pytest.mark.soak
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
                host_process(run, 0).kill()
        finally:
            process.kill()
            process.wait()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(run) == alone
    assert "dropped" in done.stdout


# --- the owner of hosts, with hosts that a test plays -------------------------------------------------------------------

STEPS = 8


def racing(**fields: Any) -> JobConfig:
    race = {"candidates": 6, "first": 2, "over": {"optimizer.lr": [0.01, 0.05, 0.2, 0.5]}}
    return fake_job("say", steps=STEPS, race=race, eval={"every": 2}, checkpoint={"keep": 100}, **fields)


@pytest.fixture(scope="module")
def on_fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A race of the fakes, in one process."""
    path = tmp_path_factory.mktemp("fakes")
    run_jobs(path, [racing()], Setting(holdout=15))
    return path


class Player:
    """A host's process that reports what candidates committed, in any order; it may die before it releases one."""

    over_network = False

    def __init__(self, stage: Stage, dies: bool) -> None:
        self._stage, self._dies, self._says = stage, dies, asyncio.Queue[FromHost | None]()

    def send(self, message: ChannelMessage) -> None:
        """Do what it says, some time later."""
        match message:
            case StartHost():
                self._says.put_nowait(HostReady([]))
            case AddJob():
                asyncio.get_running_loop().call_later(0.03 * self._stage.rng.random(), self._train, message)
            case Stop():
                self._says.put_nowait(Stopped())

    def _train(self, message: AddJob) -> None:
        name, until, stage = str(message.job["name"]), message.until, self._stage
        if name == stage.fails and len(stage.had) < 5:  # it is the last one
            asyncio.get_running_loop().call_later(0.1, self._train, message)
            return
        stage.had.append((name, until))
        lines = records(stage.run, name)[message.first_step : until or STEPS + 1]
        said: list[FromHost] = [JobChanged(name, JobState.RUNNING, ""), *(JobStepped(name, line) for line in lines)]
        if self._dies:
            end: list[FromHost | None] = [None]
        elif name == stage.fails:
            end = [JobChanged(name, JobState.FAILED, "out of order")]
        elif until is None:
            end = [JobChanged(name, JobState.SUCCEEDED, "")]
        else:
            end = [JobChanged(name, JobState.QUEUED, "waits"), Released(name)]
        for one in (*said, *end):
            self._says.put_nowait(one)

    async def messages(self) -> AsyncIterator[FromHost]:
        """What it says."""
        while (message := await self._says.get()) is not None:
            yield message

    def close_input(self) -> None:
        """End."""
        self._says.put_nowait(None)

    async def kill(self) -> None:
        """End."""
        self.close_input()


@dataclass
class Stage:
    """A race of which all is committed and nothing decided, and what hosts had of it."""

    run: Path
    rng: random.Random
    dying: tuple[int, ...] = ()
    """Which of the processes die, by the order of their starts."""
    fails: str = ""
    """A candidate that fails after the others have arrived."""
    had: list[tuple[str, int | None]] = field(default_factory=list)
    """Candidates, and the steps after which they were to be released."""

    @classmethod
    def of(cls, raced: Path, path: Path, seed: int, **fields: Any) -> Stage:
        """Take back what was decided."""
        run = Path(shutil.copytree(raced, path / "run"))
        for file in (run / "say.race.json", *run.glob("*/status.json")):
            file.unlink()
        return cls(run, random.Random(seed), **fields)

    def play(self) -> list[HostedJob]:
        """Race on two hosts."""
        ordinary, plans = raced([racing(reward="exact")])
        started = itertools.count()

        async def launch(start: StartHost, log: Path) -> HostChild:
            return cast(HostChild, Player(self, next(started) in self.dying))

        with contextlib.closing(RunDirectory(self.run, "run")) as directory:
            jobs = [HostedJob(one, directory.job(one.name), JobProgress.of(one)) for one in ordinary]
            self.rng.shuffle(jobs)
            races = [Race(plan, {job.name: job for job in jobs}, self.run, _no_copies) for plan in plans]
            hosted, interrupt = HostedRun(config(self.run, hosts=2), directory, jobs, launch, races=races), Interrupt()
            interrupt.run(lambda: asyncio.wait_for(hosted.run(interrupt, None), PATIENCE))
        return jobs


@pytest.mark.parametrize("seed", range(6))
def test_neither_the_order_of_arrival_nor_the_death_of_hosts_changes_a_decision(
    seed: int, on_fakes: Path, tmp_path: Path
) -> None:
    """In each second case hosts die when candidates have committed a rung, before they have said that these wait."""
    stage = Stage.of(on_fakes, tmp_path, seed, dying=(1, 3) if seed % 2 else ())
    jobs = stage.play()
    assert (stage.run / "say.race.json").read_bytes() == (on_fakes / "say.race.json").read_bytes()
    record = RaceRecord.read(stage.run / "say.race.json")
    out = {one.name: rung.step for rung in record.rungs for one in rung.standings if not one.stays}
    for job in jobs:
        dropped = record.dropped().get(job.name)
        assert job.state is (JobState.CANCELLED if dropped else JobState.SUCCEEDED)
        assert job.directory.read_status().get("message") == dropped
        assert [until for name, until in stage.had if name == job.name][-1] == out.get(job.name)
        assert len(job.progress.rewards) == out.get(job.name, STEPS), "all steps are known here"


def test_the_others_go_on_as_soon_as_the_last_candidate_has_failed(on_fakes: Path, tmp_path: Path) -> None:
    stage = Stage.of(on_fakes, tmp_path, 0, fails="say-c=00")
    stage.play()
    record = RaceRecord.read(stage.run / "say.race.json")
    assert [one.name for one in record.rungs[0].standings if one.verdict == "failed"] == ["say-c=00"]
    assert record.outcome is not None


def test_a_commit_that_a_shared_directory_shows_late_is_waited_for(on_fakes: Path, tmp_path: Path) -> None:
    """A decision with a budget counts the tokens of the last commits."""
    ordinary, _ = raced([racing()])
    first = RaceRecord.read(on_fakes / "say.race.json").rungs[0]
    dropped = next(one.name for one in first.standings if not one.stays)
    shutil.copytree(on_fakes / dropped, tmp_path / dropped)
    candidate = next(one for one in ordinary if one.name == dropped)
    job = HostedJob(candidate, JobDirectory(tmp_path / dropped), JobProgress.of(candidate), until=first.step)
    last = tmp_path / dropped / "state" / str(first.step)

    def arrived(step: int) -> bool:
        job.progress.step = step
        return job.arrived

    assert [arrived(0), arrived(first.step)] == [False, True]
    last.rename(tmp_path / "late")
    assert not arrived(first.step)
