"""Observers of steps: what they receive, that a bad one harms nobody, and TensorBoard's files read by its own loader."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import motet
from motet.config import ObserverConfig
from motet.config.jobfile import parse_jobs
from motet.core.errors import ConfigError, RunError
from motet.core.types import JobState
from motet.hosts.messages import JobChanged, JobStepped
from motet.observe.follow import Followers, job_of_run, send
from motet.observe.observing import ObservedJob, ObservedStep, numbers
from motet.observe.report.read import read_lines
from motet.observe.trackers import load, write_parquet
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import open_job
from motet.service.jobs.recorder import EventRecorder
from tests.support.house import open_house
from tests.support.pages import fences
from tests.support.run_directory import step_line, timing_line, write_job, write_run
from tests.support.service_run import tiny

TENSORBOARD = [ObserverConfig(name="tensorboard")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "evening")


def events(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag → (step, value, wall time), as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(directory.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                found.setdefault(value.tag, []).append((event.step, number, event.wall_time))
    return found


def _values(lines: list[tuple[int, float, float]]) -> dict[int, float]:
    assert len({step for step, _, _ in lines}) == len(lines)
    return {step: value for step, value, _ in lines}


class Noted:
    """Writes down what it receives."""

    def __init__(self, job: ObservedJob, into: list[Any]) -> None:
        self.job, self.into = job, into

    def step(self, step: ObservedStep) -> None:
        self.into.append((self.job.name, step.number, step.metrics.get("reward"), len(list(step.rollouts()))))

    def end(self, state: str) -> None:
        self.into.append((self.job.name, state))


def noted(into: list[Any]) -> ObserverConfig:
    return ObserverConfig(name="noted", function=Noted, args={"into": into})


def test_tensorboard_receives_the_metrics_once(run: Path) -> None:
    send(run, TENSORBOARD)
    found = events(run / "tensorboard" / "add")
    lines: list[Mapping[str, Any]] = [line for line in read_lines(run / "add" / "metrics.jsonl") if "reward" in line]
    assert _values(found["reward"]) == pytest.approx({line["step"]: line["reward"] for line in lines})
    assert set(_values(found["eval/reward"])) == {0, 10, 20, 30, 40}
    assert "reward_parts/exact" in found
    assert "step" not in found
    assert found["reward"][3][2] == pytest.approx(read_lines(run / "add" / "timings.jsonl")[3]["time"])
    entropy = _values(events(run / "tensorboard" / "count_letters")["entropy"])
    assert set(entropy) == {step for step in range(26) if step % 4 != 1}
    send(run, TENSORBOARD)
    assert events(run / "tensorboard" / "add") == found


def test_an_observer_follows_a_job_that_grows_stops_and_resumes(tmp_path: Path) -> None:
    rng, got = random.Random(0), list[Any]()
    directory = write_job(tmp_path, "add", done=3, steps=9, top=0.9, state="running", every=0)
    job = job_of_run(tmp_path, "add")
    with Followers([noted(got)], tmp_path) as followers:
        followers.move(job, JobState.QUEUED)
        followers.move(job, JobState.RUNNING)
        _until(lambda: len(got) >= 3)
        with directory.metrics.open("ab") as file:
            file.write(b'{"step": 3, "reward"')
    assert [one[1] for one in got] == [0, 1, 2, "paused"], "half a line is no step"
    got.clear()
    kept = directory.metrics.read_bytes().splitlines(keepends=True)[:2]
    directory.metrics.write_bytes(b"".join(kept))  # the next process resumes from an earlier commit
    with Followers([noted(got)], tmp_path) as followers:
        followers.move(job, JobState.RUNNING)
        for step in (2, 3):
            directory.append(directory.metrics, step_line(step, 0.5, rng))
            directory.append(directory.timings, timing_line(step, 5.0, rng))
        followers.move(job, JobState.SUCCEEDED)
    assert [one[1] for one in got] == [3, "succeeded"], "a step that was sent is not sent again"


def test_a_job_that_ended_while_its_observer_was_away_is_sent_later(tmp_path: Path) -> None:
    got, away = list[Any](), True
    write_job(tmp_path, "add", done=2, steps=2, top=0.9, state="succeeded", every=0)
    job = job_of_run(tmp_path, "add")

    class Away(Noted):
        def step(self, step: ObservedStep) -> None:
            if away:
                raise OSError("no network")
            super().step(step)

    def look(*states: JobState) -> list[Any]:
        got.clear()
        one = ObserverConfig(name="away", function=Away, args={"into": got})
        for state in states:
            with Followers([one], tmp_path) as followers:
                followers.move(job, state)
        return [one[1] for one in got]

    assert look(JobState.RUNNING) == []
    away = False
    assert look(JobState.QUEUED, JobState.PAUSED) == [0, 1, "paused"]
    assert look(JobState.SUCCEEDED) == ["succeeded"], "a paused job that has ended"
    assert look(JobState.SUCCEEDED, JobState.PAUSED) == [], "nothing is new"


def test_steps_before_a_fault_are_not_sent_again(tmp_path: Path) -> None:
    got, away = list[Any](), True
    write_job(tmp_path, "add", done=3, steps=9, top=0.9, state="running", every=0)

    class Away(Noted):
        def step(self, step: ObservedStep) -> None:
            if away and step.number == 2:
                raise OSError("no network")
            super().step(step)

    def look() -> None:
        with Followers([ObserverConfig(name="away", function=Away, args={"into": got})], tmp_path) as followers:
            followers.move(job_of_run(tmp_path, "add"), JobState.RUNNING)

    look()
    away = False
    look()
    assert [one[1] for one in got] == [0, 1, 2, "paused"]


def test_a_fault_is_told_once_and_stays_with_its_job(run: Path) -> None:
    got, told = list[Any](), list[str]()

    class Faulty(Noted):
        def step(self, step: ObservedStep) -> None:
            if self.job.name != "add":
                raise OSError("no network")
            super().step(step)

    one = ObserverConfig(name="faulty", function=Faulty, args={"into": got})
    with Followers([one], run, told.append) as followers:
        for path in run.glob("*/metrics.jsonl"):
            followers.move(job_of_run(run, path.parent.name), JobState.RUNNING)
    assert len(told) == 1
    assert "observer faulty failed and is off for job " in told[0]
    assert "OSError: no network" in told[0]
    assert {one[0] for one in got} == {"add"}
    assert got[-1] == ("add", "paused")


def test_nobody_waits_for_an_observer_that_hangs(run: Path) -> None:
    hangs, told = threading.Event(), list[str]()

    class Hanging(Noted):
        def step(self, step: ObservedStep) -> None:
            hangs.wait()

    got = list[Any]()
    both = [ObserverConfig(name="hanging", function=Hanging, args={"into": got}), noted(got)]
    followers = Followers(both, run, told.append)
    followers.start()
    followers.move(job_of_run(run, "add"), JobState.RUNNING)
    _until(lambda: len(got) >= 40)  # the other one has all
    followers.close(0.05)
    hangs.set()
    assert told[:1] == ["observer hanging has not received all steps; the next run of this directory sends the rest"]


@pytest.mark.parametrize(
    ("observer", "says"),
    [
        ({"name": "tensorbord"}, "there is no observer 'tensorbord': did you mean 'tensorboard'"),
        ({"name": "tensorboard", "args": {"dir": "x"}}, "unexpected keyword argument 'dir'"),
        ({"name": "three", "function": 3}, "give a class or a function"),
        ({"name": "nowhere.py:Mine"}, "observer file 'nowhere.py' does not exist"),
    ],
)
def test_what_cannot_observe_is_refused_first(observer: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        load(ObserverConfig(**observer))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'motet\[wandb\]'"):
        load(ObserverConfig(name="wandb"))


def test_two_observers_of_one_name_are_refused() -> None:
    text = "base: small\nobservers: [parquet, parquet]\njobs: [{name: a, data: 'toy:add', reward: exact}]\n"
    with pytest.raises(ConfigError, match=r"two observers have.*'parquet'; keep one"):
        parse_jobs(text)


def test_jobs_of_similar_names_have_ids_of_their_own(tmp_path: Path) -> None:
    names = ["a.1", "a=1", "a_1", "a-1"]
    ids = [job_of_run(tmp_path, name).id for name in names]
    assert len(set(ids)) == len(names)
    assert ids == [job_of_run(tmp_path, name).id for name in names]


@pytest.mark.parametrize("shared", ["/all", "../all"])
def test_runs_that_share_a_directory_replace_no_files_of_each_other(shared: str, tmp_path: Path) -> None:
    jobs = [job_of_run(tmp_path / run, "add") for run in ("morning", "evening")]
    place = f"{tmp_path}{shared}" if shared == "/all" else shared
    places = [one.directory(place).resolve() for one in [*jobs, *jobs]]
    assert places[:2] == places[2:]
    assert len(set(places)) == 2
    assert {one.parent for one in places} == {tmp_path / "all"}
    assert jobs[0].directory("mine") == tmp_path / "morning" / "mine" / "add"


def test_steps_of_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no metrics"):
        send(tmp_path, TENSORBOARD)


def test_numbers_are_finite_and_named_by_their_path() -> None:
    line = {"step": 3, "reward": 0.5, "loss": float("nan"), "lr": None, "eval": {"step": 1, "parts": {"a": True}}}
    assert dict(numbers(line)) == {"reward": 0.5, "eval/step": 1.0, "eval/parts/a": 1.0}


OWN = """
import json
from pathlib import Path

class Mine:
    def __init__(self, job, note):
        self.job, self.note = job, note

    def step(self, step):
        rollouts = [one["reward"] for one in step.rollouts() if one["purpose"] == "train"]
        with (self.job.directory("mine") / "steps").open("a") as file:
            print(json.dumps([self.note, step.number, step.metrics["reward"], sum(rollouts) / len(rollouts)]), file=file)

    def end(self, state):
        (self.job.directory("mine") / "end").write_text(state)

def broken(job):
    raise RuntimeError("is not ready")
"""
JOB: dict[str, Any] = {
    "data": {"source": "toy:add", "size": 16, "holdout": 0},
    "reward": {"name": "length", "args": {"target": 3}},
    "algorithm": {"group_size": 4, "groups_per_step": 2},
    "sampling": {"max_tokens": 6},
    "seed": 5,
}


def test_a_run_has_observers_from_python_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    got, engine = list[Any](), {"samplers": 0, "threads": 1}
    alone = motet.run([{**JOB, "name": "a", "steps": 2}], directory="alone", engine=engine, quiet=True)
    observers = [
        lambda job: Noted(job, got),
        {"name": "own.py:Mine", "args": {"note": "x"}},
        "own.py:broken",
        "parquet",
    ]
    for steps in (1, 2):  # the second run resumes the first
        jobs = [{**JOB, "name": "a", "steps": steps}]
        watched = motet.run(
            jobs, directory="watched", engine=engine, quiet=True, observers=observers, accept_changes=True
        )
    assert watched.ok
    assert (watched.directory / "a/metrics.jsonl").read_bytes() == (alone.directory / "a/metrics.jsonl").read_bytes()
    assert capfd.readouterr().out.count("observer own.py:broken failed and is off for job a: RuntimeError: is not") == 2
    rewards = [line["reward"] for line in read_lines(watched.directory / "a/metrics.jsonl")]
    assert got == [("a", 0, rewards[0], 8), ("a", "succeeded"), ("a", 1, rewards[1], 8), ("a", "succeeded")]
    own = watched.directory / "mine" / "a"
    assert (own / "end").read_text() == "succeeded"
    lines = [json.loads(line) for line in (own / "steps").read_text().splitlines()]
    assert lines == [["x", step, rewards[step], pytest.approx(rewards[step])] for step in (0, 1)]
    rows = pyarrow.parquet.read_table(watched.directory / "parquet" / "a" / "1.parquet").to_pylist()
    assert [row["step"] for row in rows] == [1] * 8
    assert sum(row["reward"] for row in rows) / 8 == pytest.approx(rewards[1])
    assert json.loads(rows[0]["reward_parts"]) == {"length": rows[0]["reward"]}


def test_the_observer_of_the_page_follows_jobs_with_evaluations_and_jobs_of_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "runs.md").read_text("utf-8")
    (mine,) = [example for example in fences(page, "py") if "class Mine" in example]
    (tmp_path / "mine.py").write_text(mine)
    jobs = [
        {**JOB, "name": "a", "steps": 1, "data": {"source": "toy:add", "size": 16, "holdout": 2}},
        {"name": "rows", "steps": 1, "data": {"source": "toy:add", "size": 16, "holdout": 2}, "algorithm": "sft"},
    ]
    observers = [f"{tmp_path / 'mine.py'}:Mine"]
    assert motet.run(jobs, directory=tmp_path / "run", engine={"samplers": 0}, quiet=True, observers=observers).ok
    said = capfd.readouterr().out
    assert "failed and is off" not in said
    for line in (
        r"a 0 \{'reward': .*'eval/reward': .*\} 1\d",
        r"a 1 \{'eval/reward': .*\} 2",
        "a succeeded",
        "rows succeeded",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)


def test_a_run_that_ended_before_is_sent_by_the_next_one(tmp_path: Path) -> None:
    got, jobs = list[Any](), [{**JOB, "name": "a", "steps": 1}]
    for observers in ([], [lambda job: Noted(job, got)], [lambda job: Noted(job, got)]):
        assert motet.run(jobs, directory=tmp_path / "run", engine={"samplers": 0}, quiet=True, observers=observers).ok
    assert [one[1] for one in got] == [0, "succeeded"]


def test_a_job_that_is_removed_and_trained_again_is_another_one(tmp_path: Path) -> None:
    got, ids, run = list[Any](), list[str](), tmp_path / "run"

    def make(job: ObservedJob) -> Noted:
        ids.append(job.id)
        return Noted(job, got)

    for _ in range(3):
        jobs = [{**JOB, "name": "a", "steps": 1}]
        assert motet.run(jobs, directory=run, engine={"samplers": 0}, quiet=True, observers=[make]).ok
        assert [one[1] for one in got] == [0, "succeeded"]
        assert job_of_run(run, "a").id == ids[-1]
        got.clear()
        shutil.rmtree(run / "a")
    assert ids == [ids[0], f"{ids[0]}-2", f"{ids[0]}-3"]


def _until(holds: Any) -> None:
    wait = threading.Event()
    while not holds():
        wait.wait(0.02)


def test_a_service_keeps_tenants_apart(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN.replace('"note"', '"mine"'))
    observers = [{"name": f"{own}:Mine", "args": {"note": "x"}}, "tensorboard"]
    with open_house(tmp_path / "service", observers=observers) as house:
        followers = house.part(Followers)
        followers.start()
        jobs = {key: house.ask("POST", "/v1/jobs", key, json=tiny("one")).json()["id"] for key in ("ours", "theirs")}
        for job_id, reward in zip(jobs.values(), (0.25, 0.75), strict=True):
            directory = house.storage.job(job_id)
            open_job(directory, {"job": {"rewards": [{"name": "http", "args": {"headers": {"Key": "secret"}}}]}})
            line = {"step": 0, "loss": 0.0, "reward": reward, "rollouts": 1}
            directory.write_rollouts("0", [{"purpose": "train", "reward": reward}])
            directory.append(directory.metrics, line)
            directory.append(directory.timings, {"step": 0, "time": 5.0})
            house.recorder.record_event(JobStepped(job_id, line))
            house.recorder.record_event(JobChanged(job_id, JobState.PAUSED, ""))
        house.recorder.record_state(jobs["ours"], JobState.CANCELLED, "")  # by its owner, while no host has it
        followers.close()
        home = tmp_path / "service" / "observers"
        ends = "cancelled", "paused"
        for tenant, job_id, reward, end in zip(("us", "them"), jobs.values(), (0.25, 0.75), ends, strict=True):
            place = home / "mine" / tenant / f"one-{job_id}"
            assert json.loads((place / "steps").read_text()) == ["x", 0, reward, reward]
            assert (place / "end").read_text() == end
            assert events(home / "tensorboard" / tenant / f"one-{job_id}")["reward"] == [(0, reward, 5.0)]
        job = ObservedJob(jobs["ours"], "one", "", "us", house.storage.job(jobs["ours"]).path, home)
        assert job.project("motet") == "motet-us"
        assert job.config["job"] == {"rewards": [{"name": "http", "args": {"headers": None}}]}


def test_a_service_sends_at_its_start_what_observers_missed(tmp_path: Path) -> None:
    got = list[Any]()
    with open_house(tmp_path / "service") as house:
        directory, service = house.storage.job(house.job["id"]), house.service
        directory.append(directory.metrics, {"step": 0, "reward": 0.5})
        with Followers([noted(got)], tmp_path / "observers") as followers:
            parts = house.store, house.storage, service.ledger, service.stored, service.bus, ()
            EventRecorder(*parts, followers).observe_ended()
    assert [one[1] for one in got] == [0, "succeeded"]


def _written(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def test_what_observers_keep_goes_with_the_job_and_the_tenant(tmp_path: Path) -> None:
    with open_house(tmp_path / "service", observers=["tensorboard", "parquet"]) as house:
        house.part(Followers).start()
        home, names = tmp_path / "service" / "observers", (("us", "one"), ("us", "two"), ("them", "one"))
        jobs = dict[tuple[str, str], str]()
        for tenant, name in names:
            key = {"us": "ours", "them": "theirs"}[tenant]
            job_id = jobs[tenant, name] = house.ask("POST", "/v1/jobs", key, json=tiny(name)).json()["id"]
            directory = house.storage.job(job_id)
            open_job(directory, {})
            directory.write_rollouts("0", [{"purpose": "train", "reward": 0.5, "text": "a prompt"}])
            directory.append(directory.metrics, {"step": 0, "reward": 0.5})
            house.recorder.record_state(job_id, JobState.SUCCEEDED, "")
            job = ObservedJob(job_id, name, "", tenant, directory.path, home)
            for place in (job.shared("wandb") / "wandb" / f"run-1-{job_id}", job.shared("mlruns") / name):
                place.mkdir(parents=True)
                (place / "note").write_text(name)
        house.part(Followers).close()
        before = _written(home)
        gone = {path for path in before if jobs["us", "one"] in path}
        assert {path.split("/")[0] for path in gone} == {".observed", "tensorboard", "parquet", "wandb"}
        assert house.ask("DELETE", f"/v1/jobs/{jobs['us', 'one']}").status_code == 204
        assert _written(home) == before - gone
        assert house.ask("DELETE", "/v1/tenants/us", "admin").json()["erased"]
        theirs = {path for path in before if "/them/" in path or jobs["them", "one"] in path}
        assert _written(home) == theirs
        assert not list(home.glob("*/us"))
        assert len(theirs) == 6


def test_an_observer_that_is_at_work_leaves_nothing_of_a_deleted_job(tmp_path: Path) -> None:
    works, deleted = threading.Event(), threading.Event()

    class Late(Noted):
        def step(self, step: ObservedStep) -> None:
            works.set()
            deleted.wait()
            (self.job.directory("late") / "note").write_text("a prompt")

    path = write_job(tmp_path / "run", "add", done=1, steps=2, top=0.9, state="failed", every=0).path
    job = ObservedJob("job-1", "add", "", "us", path, tmp_path / "observers")
    with Followers([ObserverConfig(name="late", function=Late, args={"into": []})], job.home) as followers:
        followers.move(job, JobState.FAILED)
        works.wait()
        followers.delete(job)
        deleted.set()
    assert _written(job.home) == set()


def test_settings_that_observers_receive_hold_no_keys(tmp_path: Path) -> None:
    url = "https://me:secret@scores.example/v1/score?key=secret#secret"
    settings = {
        "environment": {"name": "mcp", "args": {"command": ["npx"], "env": {"GITHUB_TOKEN": "secret"}}},
        "rewards": [
            {"name": "http", "args": {"url": url}},
            {"name": "own.py:f", "args": {"api_key": "secret", "k": 3}},
        ],
        "data": {"source": url, "size": 16},
        "steps": 3,
    }
    open_job(JobDirectory(tmp_path), {"job": settings})
    job = ObservedJob("1", "a", "", "", tmp_path, tmp_path)
    assert job.config["job"] == {
        "environment": {"name": "mcp", "args": {"command": None, "env": None}},
        "rewards": [
            {"name": "http", "args": {"url": None}},
            {"name": "own.py:f", "args": {"api_key": None, "k": None}},
        ],
        "data": {"source": "https://scores.example/v1/score", "size": 16},
        "steps": 3,
    }
    assert "secret" not in str(job.config)


def test_half_a_letter_does_not_end_a_table(tmp_path: Path) -> None:
    """Such as an emoji that was cut in two; a file of rows may hold it, and parquet may not."""
    write_parquet(tmp_path / "rows.parquet", [{"answer": "a \ud83d", "turns": ["\ud83d"], "tokens": 3}])
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == [
        {"answer": "a ?", "turns": '["?"]', "tokens": 3}
    ]
