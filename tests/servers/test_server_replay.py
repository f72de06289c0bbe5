"""The trainer's half of runs whose rollouts servers sampled is trained again, bit for bit, without the servers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from motet.commands.cli import app
from motet.config import EngineConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import RunError
from motet.core.types import Branch, FinishReason, Message, Problem, Rollout, ToolCall, Turn, TurnParts
from motet.hosting.launch import load
from motet.hosting.running import run_config
from motet.runtime.checkpoint import dump_line
from motet.runtime.recorded import RecordedRollout
from tests.support.base_servers import base_servers
from tests.support.cases import few

STEPS = 3
ENGINE = {"micro_batch_tokens": 128, "block_size": 16, "threads": 1}
REWARD = """
def vowels(problem, completion):
    return sum(letter in "aeiou" for letter in completion) / 8
"""
Row = dict[str, Any]
Edit = Callable[[Row], None]


def job(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name, "data": "toy:sort_letters", "reward": "rewards.py:vowels", "steps": STEPS, "adapter": {"rank": 4},
        "optimizer": {"lr": 0.01}, "sampling": {"max_tokens": 6}, "checkpoint": {"keep": 2}, "eval": {"every": 2, "n": 1},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "max_failed_fraction": 1}, **fields,
    }  # fmt: skip


JOBS = [
    job("plain"),
    job("late", algorithm={"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 1}),
    job("turns", environment="retry", algorithm={"type": "ppo", "group_size": 2, "groups_per_step": 2}),
]


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.soak)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its run, whose servers are gone."""
    project = tmp_path_factory.mktemp(request.param)
    (project / "rewards.py").write_text(REWARD)
    with base_servers(load("small", EngineConfig(threads=1)), 1, request.param) as (server,):
        rollout = {"engine": request.param, "urls": [server.url], "directory": str(project / "served")}
        tree = {"base": "small", "run": str(project / "run"), "engine": ENGINE, "rollout": rollout, "jobs": JOBS}
        (project / "jobs.yaml").write_text(yaml.safe_dump(tree))
        result = run_config(load_jobs(project / "jobs.yaml"))
    assert result.ok, [one.message for one in result.jobs.values()]
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy to edit."""
    again = tmp_path / "project"
    shutil.copytree(trained, again)
    text = (again / "jobs.yaml").read_text()
    (again / "jobs.yaml").write_text(text.replace(str(trained / "run"), str(again / "run")))
    return again


def motet(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def rows(project: Path, step: int) -> list[Row]:
    return [json.loads(line) for line in (project / f"run/plain/rollouts/{step}.jsonl").read_bytes().splitlines()]


def write(project: Path, step: int, rows: list[Row]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (project / f"run/plain/rollouts/{step}.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    "steps",
    few((f"{job}@{steps}" for job in ("plain", "late", "turns") for steps in ("0..3", "3")), "late@0..3", "turns@3"),
)
def test_the_trainers_half_is_trained_again_with_the_same_bytes(steps: str, trained: Path) -> None:
    code, output = motet("replay", trained / "jobs.yaml", steps)
    assert code == 0, output
    assert "the trainer's half of these steps" in output
    assert "the same bytes, trained again from the recorded rollouts" in output


def change(field: str, value: Callable[[Any], Any]) -> Edit:
    def edit(row: Row) -> None:
        assert row[field] != value(row[field])
        row[field] = value(row[field])

    return edit


EDITS: dict[str, Edit] = {
    "reward": change("reward", lambda reward: reward + 0.5),
    "logprobs": change("logprobs", lambda logprobs: [logprobs[0] - 0.1, *logprobs[1:]]),
    "token_texts": change("token_texts", lambda texts: ["?!", *texts[1:]]),
    "trained_on": change("trained_on", lambda whole: {**whole, "reward": whole["reward"] + 1e-9}),
    "version": change("version", lambda version: version + 1),
}


@pytest.mark.parametrize("field", EDITS)
def test_an_edit_of_a_recorded_rollout_is_found_and_named(field: str, project: Path) -> None:
    edited = rows(project, 2)
    EDITS[field](edited[5])
    write(project, 2, edited)
    code, output = motet("replay", project / "jobs.yaml", "plain@0..3")
    assert code == 1
    assert f"the rollouts of step 2 are not what was recorded: row 5, field {field} (" in output


def test_rows_that_changed_places_are_found(project: Path) -> None:
    write(project, 1, rows(project, 1)[::-1])
    code, output = motet("replay", project / "jobs.yaml", "plain@0..3")
    assert (code, "step 1 are not what was recorded: rows were added, removed or moved" in output) == (1, True), output


def test_an_edit_whose_sums_were_made_to_fit_gives_other_bytes(project: Path) -> None:
    """The sums of rows, files and receipts do not help an edit: the steps are trained again from it."""
    log, checksums = project / "run/plain/rollouts/1.jsonl", project / "run/plain/checksums.jsonl"
    before, edited = hashlib.sha256(log.read_bytes()).hexdigest(), rows(project, 1)
    for row in edited[:4]:
        row["trained_on"]["reward"] = float(row["index"] % 2)
    write(project, 1, edited)
    after = hashlib.sha256(log.read_bytes()).hexdigest()
    for path in (checksums, *(project / "run/plain/receipts").iterdir()):
        path.write_text(path.read_text().replace(before, after))
    code, output = motet("replay", project / "jobs.yaml", "plain@0..3")
    assert code == 1
    assert "the runs first differ in step 1, in its rollouts: row " in output
    assert "field reward: was" in output


def test_rollouts_that_were_deleted_cannot_be_replayed(project: Path) -> None:
    (project / "run/plain/rollouts/0.jsonl").unlink()
    with pytest.raises(RunError, match=r"0\.jsonl was deleted, and servers' answers cannot be sampled again"):
        motet("replay", project / "jobs.yaml", "plain@1")
    assert motet("replay", project / "jobs.yaml", "plain@3")[0] == 0


def test_rollouts_of_an_earlier_motet_are_refused(project: Path) -> None:
    write(
        project,
        2,
        [{name: row[name] for name in row if name not in ("trained_on", "sums")} for row in rows(project, 2)],
    )
    with pytest.raises(RunError, match="does not hold exactly what the step was trained on"):
        motet("replay", project / "jobs.yaml", "plain@3")


def test_a_run_on_servers_is_forked(project: Path) -> None:
    code, output = motet("fork", project / "jobs.yaml", "plain@2", project / "new", "--name", "other")
    assert code == 0, output
    assert (project / "new/other/state/2").is_dir()


def test_a_rollout_is_read_as_it_was() -> None:
    """Also one whose tokens several versions sampled, with a failed reward, a tool and a role."""
    none = np.zeros(0, np.int32)
    branches = (
        Branch(
            np.array([5, 6, 7, 8, 9, 10], np.int32),
            np.array([0, 0, 1, 1, 0, 1], np.bool_),
            np.array([0, 0, -0.1, -0.2345678, 0, -3], np.float32),
            np.array([-1, -1, 2, 3, -1, -1], np.int32),
        ),
        Branch(none, none.astype(np.bool_), none.astype(np.float32), none, turn=1, after=0),
    )
    call = Turn(
        "look", FinishReason.STOP, TurnParts(calls=(ToolCall("look", {"at": 1}),)), (Message("tool", "Error"),), 0.5
    )
    problem = Problem(3, (Message("user", "x"),), "y")
    own = Rollout(problem, 1, branches[:1], (call,), 0.25, {"a": 0.25})
    before = Rollout(problem, 1, branches, (call,), float("nan"), {"a": 0.1}, "slow", (), {"solver": own})
    line = dump_line(msgspec.to_builtins(RecordedRollout.of(before)))
    after = msgspec.convert(json.loads(line), RecordedRollout).rollout(problem, 1)
    for old, new in ((before, after), (own, after.roles["solver"])):
        assert repr(old.reward) == repr(new.reward)
        assert (old.turns, old.reward_parts, old.error) == (new.turns, new.reward_parts, new.error)
        for was, is_ in zip(old.branches, new.branches, strict=True):
            assert (was.turn, was.after) == (is_.turn, is_.after)
            for field in ("token_ids", "loss_mask", "logprobs", "versions"):
                pair = getattr(was, field), getattr(is_, field)
                assert pair[0].dtype == pair[1].dtype
                assert np.array_equal(*pair), field
