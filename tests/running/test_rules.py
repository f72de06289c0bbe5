"""A job keeps the date that it began with, wherever it goes on, and goes on by the rules that it began with alone."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import motet
from motet import AdamW, Message, Problem, Verbs
from motet.algorithms import datum
from motet.commands.cli import app
from motet.commands.verify import verify
from motet.config import JobConfig
from motet.config.jobfile import check_fields, merge, validate
from motet.core.checksums import sealed, unsealed
from motet.core.errors import RunError
from motet.hosts.running import run_config
from motet.model.find import SMALL_BASE
from motet.observe.results import RunResult
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import RULES, Given
from motet.runtime.fork import fork
from motet.runtime.receipts import read_receipt
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
    assert (inner["rules"], inner["clock"]) == (RULES, clocks["resumed"])


def of_other_rules(whole: Path, place: Path, number: int) -> Path:
    """A copy of the job, which another number of rules trained."""
    shutil.copytree(whole / "half", place)
    (place / "dated/manifest.jsonl").unlink()
    change(place / "dated", rules=number, after="")
    return place


@pytest.mark.parametrize("number", [RULES - 1, RULES + 1])
def test_a_job_of_other_rules_is_refused_with_the_motet_that_has_them_and_goes_on_as_inexact(
    train: Callable[..., RunResult], whole: Path, tmp_path: Path, number: int
) -> None:
    place = of_other_rules(whole, tmp_path / "other", number)
    told = rf"was trained by Motet {version('motet')} with rules {number}, and this is Motet \S+ with rules {RULES}: finish it"
    with pytest.raises(RunError, match=f"{told} with that Motet, or continue it .* --accept-changes .* inexact"):
        goes_on(train, whole, place)
    assert fingerprint(place / "dated") == fingerprint(whole / "half/dated")
    assert goes_on(train, whole, place, accept_changes=True).jobs["dated"].inexact == (
        f"the rules changed from {number} to {RULES} at step 2",
    )
    assert clock_of(place / "dated") == clock_of(whole / "run/dated")
    assert [done.rules for done in [JobDirectory(place / "dated").newest()] if done is not None] == [RULES]
    again = goes_on(train, whole, place, steps=5)  # it is one of today's rules, and says what was before
    assert again.jobs["dated"].inexact == (f"the rules changed from {number} to {RULES} at step 2",)


def test_other_rules_matter_to_no_job_that_has_ended_or_done_no_step(
    train: Callable[..., RunResult], whole: Path, tmp_path: Path
) -> None:
    ended = train(of_other_rules(whole, tmp_path / "ended", RULES - 1), 2).jobs["dated"]
    assert (ended.state, ended.message, ended.inexact) == ("succeeded", "done before", ())
    begun = of_other_rules(whole, tmp_path / "begun", RULES - 1)
    for step in (1, 2):
        shutil.rmtree(begun / "dated/state" / str(step))
        shutil.rmtree(begun / "dated/versions" / f"v{step}")
    assert not goes_on(train, whole, begun).jobs["dated"].inexact
    assert rollouts(begun) == rollouts(whole / "run")


def test_a_fork_of_a_job_of_other_rules_goes_on_by_todays(
    train: Callable[..., RunResult], whole: Path, tmp_path: Path
) -> None:
    other = of_other_rules(whole, tmp_path / "other", RULES - 1)
    fork(JobDirectory(other / "dated"), 2, tmp_path / "forked/dated", 0)
    assert goes_on(train, whole, tmp_path / "forked").jobs["dated"].inexact == (
        f"the rules changed from {RULES - 1} to {RULES} at step 2",
    )


def test_a_job_that_starts_over_has_the_present_time(whole: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun/dated"
    shutil.copytree(whole / "half/dated", begun)
    for step in (1, 2):
        shutil.rmtree(begun / "state" / str(step))
    config, now = check_fields(JobConfig, {**JOB, "steps": 2}, "test"), "2030-01-01T00:00+00:00"
    assert Given(config, JobDirectory(begun), now=now).clock == clock_of(whole / "run/dated")
    assert Given(config.model_copy(update={"seed": 5}), JobDirectory(begun), now=now).clock == now
    assert Given(config, JobDirectory(tmp_path / "none"), now=now).clock == now


def test_a_field_that_left_is_no_change_of_a_job(train: Callable[..., RunResult], whole: Path, tmp_path: Path) -> None:
    """Also in a list; what a person names freely counts."""
    place = tmp_path / "older"
    for reward, told in ({"left": 1}, ""), ({"args": {"pattern": "[1-5]", "left": 1}}, r"job.rewards"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole / "half", place)
        (place / "dated/manifest.jsonl").unlink()
        change(place / "dated", after="")
        stored = yaml.safe_load((place / "dated/job.yaml").read_text())
        stored["job"] |= {"left": True, "eval": {**stored["job"]["eval"], "left": [1]}}
        stored["job"]["algorithm"]["left"] = 2
        stored["job"]["rewards"][0] |= reward
        (place / "dated/job.yaml").write_text(yaml.safe_dump(stored, sort_keys=False))
        if told:
            with pytest.raises(RunError, match=told):
                goes_on(train, whole, place)
        else:
            assert not goes_on(train, whole, place).jobs["dated"].inexact


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


def test_a_loop_of_ones_own_that_other_rules_trained_is_refused(tmp_path: Path) -> None:
    def stepped(*, accept_changes: bool = False) -> int:
        with Verbs(directory=tmp_path / "loop", longest=64, accept_changes=accept_changes) as verbs:
            done = verbs.add_adapter("a", rank=4)
            ids = tiny.tokens(9, seed=9).numpy()
            verbs.forward_backward({"a": [datum(ids[:-1], ids[1:])]}, "cross_entropy")
            verbs.optim_step("a", AdamW(1e-3))
            return done

    stepped()
    (tmp_path / "loop/a/manifest.jsonl").unlink()
    change(tmp_path / "loop/a", rules=RULES - 1, after="")
    with pytest.raises(RunError, match=rf"with rules {RULES - 1}, and this is .* \(accept_changes=True"):
        stepped()
    assert stepped(accept_changes=True) == 1
    assert stepped() == 2


def test_who_changes_the_meaning_of_the_rules_raises_their_number_and_the_version() -> None:
    """A message names the version that finishes a job, so that no two numbers have the same one from here on."""
    assert (RULES, motet.__version__) in {(4, "0.2.0")}
