"""A job keeps the rules and the date that it began with, whoever goes on with it, wherever and when."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from motet import AdamW, Message, Problem, Verbs
from motet.algorithms import datum
from motet.algorithms.algorithm import StepBatch
from motet.algorithms.client import batch_of
from motet.commands.cli import app
from motet.commands.verify import verify
from motet.config.jobfile import merge, validate
from motet.core.batch import Sample
from motet.core.checksums import sealed, unsealed
from motet.core.errors import RunError
from motet.core.rules import NEWEST, Rules
from motet.hosting.running import run_config
from motet.model.find import SMALL_BASE
from motet.runtime.beginning import rules_at
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.fork import fork
from motet.runtime.receipts import read_receipt
from motet.tasks.clock import moment
from motet.view.results import RunResult
from tests.support import tiny_models as tiny
from tests.support.small_runs import fingerprint

FIRST, LAST = "Pacific/Kiritimati", "Pacific/Niue"
"""Zones that never have the same date."""
JOB: dict[str, Any] = {
    "name": "dated",
    "data": {"source": "toy:add", "size": 32, "holdout": 2},
    "reward": {"name": "regex", "args": {"pattern": "[1-5]"}},
    "environment": "retry",
    "steps": 4,
    "adapter": {"rank": 4},
    "optimizer": {"lr": 0.01},
    "sampling": {"max_tokens": 6},
    "algorithm": {"group_size": 2, "groups_per_step": 2},
    "eval": {"every": 2},
    "checkpoint": {"keep": 100},
}


ENGINE = {"micro_batch_tokens": 256, "train_tokens": 512, "threads": 1}


@contextlib.contextmanager
def in_zone(name: str) -> Iterator[None]:
    """This machine is in a zone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose template writes the date, as Llama 3's does."""
    place = tmp_path_factory.mktemp("bases") / "dated"
    shutil.copytree(SMALL_BASE, place)
    template = place / "chat_template.jinja"
    date = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    template.write_text(
        f"{date}{{{{ '<|im_start|>system\\nToday: ' + date_string + '<|im_end|>\\n' }}}}{template.read_text()}"
    )
    return place


@pytest.fixture(scope="module")
def train(base: Path) -> Callable[..., RunResult]:
    def run(directory: Path, steps: int = 4, *, accept_changes: bool = False, **fields: Any) -> RunResult:
        jobs = [merge(JOB, {"steps": steps, **fields})]
        config = validate({"base": str(base), "run": str(directory), "engine": ENGINE, "jobs": jobs}, "test")
        return run_config(config, accept_changes=accept_changes)

    return run


def rollouts(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run.glob("dated/rollouts/*.jsonl")}


def clock_of(job: Path) -> str:
    return str(yaml.safe_load((job / "job.yaml").read_text())["clock"])


def change(job: Path, **fields: Any) -> None:
    """Write other values into the commits of a job, or with None remove them."""
    for file in job.glob("state/*/state.json"):
        values = {**unsealed(file.read_bytes()), **fields}
        file.write_bytes(sealed({name: value for name, value in values.items() if value is not None}))


@pytest.fixture(scope="module")
def whole(train: Callable[..., RunResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that nothing happened to, in the first zone; kept after its second step too, under `half`."""
    directory = tmp_path_factory.mktemp("whole")
    with in_zone(FIRST):
        train(directory / "run", 2)
        shutil.copytree(directory / "run", directory / "half")
        train(directory / "run")
    return directory


def goes_on(train: Callable[..., RunResult], whole: Path, place: Path, **fields: Any) -> RunResult:
    """Continue a copy of the job in the other zone."""
    if not place.exists():
        shutil.copytree(whole / "half", place)
    with in_zone(LAST):
        return train(place, **fields)


def test_a_job_has_one_date_wherever_it_goes_on(
    train: Callable[..., RunResult], whole: Path, base: Path, tmp_path: Path
) -> None:
    result = goes_on(train, whole, tmp_path / "resumed")
    assert not result.jobs["dated"].inexact
    wanted = fingerprint(whole / "run/dated")
    assert fingerprint(tmp_path / "resumed/dated") == wanted
    assert verify(tmp_path / "resumed", None) == 0
    fork(JobDirectory(whole / "run/dated"), 2, tmp_path / "forked/dated", 0)
    assert not goes_on(train, whole, tmp_path / "forked").jobs["dated"].inexact
    assert rollouts(tmp_path / "forked") == rollouts(whole / "run")
    assert goes_on(train, whole, tmp_path / "changed", accept_changes=True, eval={"every": 0}).jobs["dated"].inexact
    with in_zone(LAST):
        assert train(tmp_path / "anew").jobs["dated"].state == "succeeded"
        file = tmp_path / "jobs.yaml"
        file.write_text(yaml.safe_dump({"base": str(base), "run": str(whole / "run"), "engine": ENGINE, "jobs": [JOB]}))
        shown = CliRunner().invoke(app, ["replay", str(file), "dated@0..2"])
    assert "the same bytes, and the same rollouts" in shown.output, shown.output
    clocks = {name: clock_of(tmp_path / name / "dated") for name in ("resumed", "forked", "changed", "anew")}
    assert clocks == dict.fromkeys(clocks, clock_of(whole / "run/dated")) | {"anew": clocks["anew"]}
    assert clocks["anew"][:10] < clocks["resumed"][:10]
    assert rollouts(tmp_path / "anew") != rollouts(whole / "run")
    inner = read_receipt(whole / "run/dated/receipts/v4.json")["predicate"]["buildDefinition"]["internalParameters"]
    assert (inner["rules"], inner["clock"]) == (NEWEST, clocks["resumed"])


def test_a_job_by_an_older_release_has_the_date_of_its_first_commit(
    train: Callable[..., RunResult], whole: Path, tmp_path: Path
) -> None:
    for name in ("older", "dated"):
        shutil.copytree(whole / "half", tmp_path / name)
        (tmp_path / name / "dated/manifest.jsonl").unlink()
    then = datetime(2020, 2, 29, 23, 30, tzinfo=UTC).timestamp()
    os.utime(tmp_path / "older/dated/receipts/v0.json", (then, then))
    with in_zone(LAST):
        change(tmp_path / "older/dated", rules=None, clock=None, after="")
        change(tmp_path / "dated/dated", rules=0, clock=moment(then), after="")
    for name in ("older", "dated"):
        assert not goes_on(train, whole, tmp_path / name).jobs["dated"].inexact
    assert rollouts(tmp_path / "older") == rollouts(tmp_path / "dated") != rollouts(whole / "run")
    done = JobDirectory(tmp_path / "older/dated").newest()
    assert done is not None
    assert (done.rules, done.clock) == (0, "2020-02-29T12:30-11:00")
    assert "rules" not in yaml.safe_load((tmp_path / "older/dated/job.yaml").read_text())


def test_rules_that_are_not_known_yet_are_refused_and_a_job_that_starts_over_has_todays(
    train: Callable[..., RunResult], whole: Path, tmp_path: Path
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(whole / "half", newer)
    change(newer / "dated", rules=NEWEST + 1)
    with pytest.raises(RunError, match=f"begun by a newer Motet, with rules {NEWEST + 1}.* install that release"):
        train(newer)
    begun = tmp_path / "begun/dated"
    shutil.copytree(whole / "half/dated", begun)
    for step in (1, 2):
        shutil.rmtree(begun / "state" / str(step))
    known = yaml.safe_load((begun / "job.yaml").read_text())
    today = Rules(clock="2030-01-01T00:00+00:00")
    assert rules_at(JobDirectory(begun), {"job": known["job"]}, today).clock == clock_of(whole / "run/dated")
    assert rules_at(JobDirectory(begun), {"job": {**known["job"], "seed": 5}}, today) == today
    assert rules_at(JobDirectory(tmp_path / "none"), {}, today) == today


def test_a_loop_of_ones_own_has_the_date_of_its_adapters(base: Path, tmp_path: Path) -> None:
    problem = Problem(0, (Message("user", "Hi"),), "")

    def prompt(zone: str, *names: str) -> dict[str, list[int]]:
        with in_zone(zone), Verbs(str(base), directory=tmp_path / "loop", longest=64) as verbs:
            for name in names:
                verbs.add_adapter(name, rank=2)
            groups = verbs.sample({name: [problem] for name in names}, 1, seed=0, max_tokens=1)
            return {name: group.rollouts[0].prompt_ids.tolist() for name, (group,) in groups.items()}

    first = prompt(FIRST, "a")["a"]
    again = prompt(LAST, "a", "b")
    assert again["a"] == first != again["b"]


def test_a_loop_that_an_older_release_began_adds_its_data_in_order(tmp_path: Path) -> None:
    tokens = [tiny.tokens(length, seed=length).numpy() for length in (9, 40, 17, 3, 33)]
    data = [datum(ids[:-1], ids[1:], weights=np.linspace(-1, 1, len(ids) - 1)) for ids in tokens]

    def stepped(name: str, given: Sequence[Sample] | StepBatch, rules: int = NEWEST) -> bytes:
        """The adapter after a second step; a run of another number of `rules` began it."""
        place = tmp_path / name
        if (tmp_path / "begun").exists():
            shutil.copytree(tmp_path / "begun", place)
            (place / "a/manifest.jsonl").unlink()
            change(place / "a", rules=rules, after="")
        with Verbs(directory=place, longest=64) as verbs:
            verbs.add_adapter("a", rank=4)
            verbs.forward_backward({"a": given}, "cross_entropy")
            verbs.optim_step("a", AdamW(1e-3))
            verbs.save_adapter("a", place / "saved")
        assert [done.rules for done in [JobDirectory(place / "a").newest()] if done is not None] == [rules]
        return (place / "saved/adapter_model.safetensors").read_bytes()

    stepped("begun", data)
    shutil.rmtree(tmp_path / "begun/saved")
    in_order = stepped("in-order", batch_of(data, by_sample=False))
    assert stepped("older", data, 1) == in_order != stepped("today", data)
