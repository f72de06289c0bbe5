"""Runs whose rollouts servers sampled: their logs, and that only what Motet sampled is sampled again."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from motet.commands.cli import app
from motet.config import EngineConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError
from motet.core.types import Branch, FinishReason, Message, Problem, Rollout, ToolCall, Turn, TurnParts
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.runtime.checkpoint import dump_line
from motet.runtime.replay_log import RecordedRollout
from tests.support.base_servers import base_servers

STEPS = 3
ENGINE = {"micro_batch_tokens": 128, "block_size": 16, "threads": 1}
REWARD = """
def vowels(problem, completion):
    return sum(letter in "aeiou" for letter in completion) / 8
"""


JOBS = [
    {
        "name": "plain", "data": "toy:sort_letters", "reward": "rewards.py:vowels", "steps": STEPS, "adapter": {"rank": 4},
        "optimizer": {"lr": 0.01}, "sampling": {"max_tokens": 6}, "checkpoint": {"keep": 2}, "eval": {"every": 2, "n": 1},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "max_failed_fraction": 1},
    },
    {
        "name": "rows", "data": "toy:sort_letters", "steps": STEPS, "adapter": {"rank": 4}, "optimizer": {"lr": 0.01},
        "algorithm": {"type": "sft", "rows_per_step": 4}, "checkpoint": {"keep": 2}, "eval": {"every": 2},
    },
]  # fmt: skip


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


def motet(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("steps", ["plain", "plain@3", "plain@0..3"])
def test_rollouts_of_servers_are_not_sampled_again(steps: str, trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampled the rollouts of.*again: replay"):
        motet("replay", trained / "jobs.yaml", steps)


def test_rows_are_learned_again_without_the_servers(trained: Path) -> None:
    code, output = motet("replay", trained / "jobs.yaml", "rows@0..3")
    assert (code, "rows, versions 1 to 3: the same bytes" in output) == (0, True), output


def test_logs_of_servers_hold_what_was_trained_on(trained: Path) -> None:
    """With a sum of each field."""
    lines = (trained / "run/plain/rollouts/2.jsonl").read_bytes().splitlines()
    assert len(lines) == 8
    for row in map(json.loads, lines):
        (branch,) = row["trained_on"]["branches"]
        ((first, last, version),) = branch["sampled"]
        logprobs = np.frombuffer(base64.b64decode(branch["logprobs"]), "<f4")
        assert (last - first, version) == (len(row["logprobs"]), row["version"])
        assert logprobs == pytest.approx(row["logprobs"], abs=1e-4)
        assert len(base64.b64decode(branch["token_ids"])) == 4 * last
        assert row["trained_on"]["reward"] == row["reward"]
        assert row["sums"].keys() == row.keys() - {"sums"}
        known = hashlib.sha256(dump_line({"": row["reward"]})).hexdigest()
        assert known.startswith(row["sums"]["reward"])


def test_a_run_on_servers_is_forked(trained: Path, tmp_path: Path) -> None:
    code, output = motet("fork", trained / "jobs.yaml", "plain@2", tmp_path / "new", "--name", "other")
    assert code == 0, output
    assert (tmp_path / "new/other/state/2").is_dir()


def test_a_rollout_is_recorded_exactly() -> None:
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
    line = json.loads(dump_line(msgspec.to_builtins(RecordedRollout.of(before))))
    assert (line["reward"], line["reward_parts"], line["error"]) == (None, {"a": 0.1}, "slow")
    assert line["turns"] == line["roles"]["solver"]["turns"] == json.loads(dump_line(msgspec.to_builtins([call])))
    assert line["roles"]["solver"]["branches"] == line["branches"][:1]
    first, second = line["branches"]
    assert np.frombuffer(base64.b64decode(first["token_ids"]), "<i4").tolist() == [5, 6, 7, 8, 9, 10]
    assert np.array_equal(
        np.frombuffer(base64.b64decode(first["logprobs"]), "<f4"), branches[0].logprobs[branches[0].loss_mask]
    )
    assert first["sampled"] == [[2, 3, 2], [3, 4, 3], [5, 6, -1]]
    assert second == {"token_ids": "", "logprobs": "", "sampled": [], "turn": 1, "after": 0}
