"""A team of adapters: roles in one episode, rewards and advantages of each, one version of all, alone as in company."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import motet
from motet.algorithms import Grpo
from motet.chat.template import Chat
from motet.commands.check import check
from motet.commands.verify import verify
from motet.config import EnvironmentConfig
from motet.core.checksums import check_version
from motet.core.errors import AdapterError, ConfigError, EngineError
from motet.core.types import Group, Message, Problem, Rollout
from motet.environments.environments import EnvironmentWorkers
from motet.environments.episode import GroupContext
from motet.environments.team import groups_of
from motet.model.find import find_adapter
from motet.rewards.reward_answers import ScoreOutcome
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_walls import Walls
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.fork import fork
from motet.runtime.receipts import read_receipt, subjects_of
from motet.service.jobs.validation import Allowed, validated
from tests.support.fake_run import metrics, records
from tests.support.processes import ending
from tests.support.scripted_model import CHAT, TOKENIZER, Says, Script, ThreadsOf
from tests.support.waiting import PATIENCE, wait_until

OWN = '''
class Pair:
    """The asker speaks, then the answerer, then both once more."""

    def reset(self, **row):
        self.role, self.said = "asker", []

    def step(self, text):
        self.said.append(text)
        self.role = ("answerer", "asker")[self.role == "answerer"]
        if len(self.said) == 4:
            return None, {"answerer": 0.5}
        return f"said: {text}", {"asker": 0.25}

    def get_reward(self):
        return {"asker": len(self.said[0]) / 100, "answerer": len(self.said[1]) / 10}


class Same(Pair):
    def get_reward(self):
        return 1.0


class Nobody(Pair):
    role = property(lambda self: "judge", lambda self, role: None)


class Strange(Pair):
    def get_reward(self):
        return {"asker": 1.0, "answerer": 1.0, "judge": 2.0}


class Half(Pair):
    def get_reward(self):
        return {"asker": 1.0}


class Halved(Pair):
    def step(self, text):
        super().step(text)
        return "\\ud83d" if text == "x1" else "more", {}


class Silent:
    def step(self, text):
        return None


class Tool:
    def sell(self, item: str) -> str:
        """Sell something."""
        return item


class Lengths:
    """Cheap to learn: each role is paid for the length of its answer, one for long, one for short ones."""

    def reset(self, answer, **row):
        self.role, self.worth = "first", {}

    def step(self, text):
        self.worth[self.role] = len(text) / 20 if self.role == "first" else -len(text) / 20
        if self.role == "second":
            return None
        self.role = "second"
        return f"What is 1 + {len(text)}?"

    def get_reward(self):
        return self.worth
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def played(
    file: Path, name: str, says: Says, n: int = 2, score: Any = None, chat: Chat = CHAT
) -> tuple[tuple[Rollout, ...], dict[str, Script]]:
    """The rollouts of a group, and the models of both roles."""
    scripts = {role: Script(says) for role in ("asker", "answerer")}
    problem = Problem(4, (Message("system", "Be brief."), Message("user", "Begin.")), "7")

    async def main() -> tuple[Rollout, ...]:
        workers = EnvironmentWorkers(EnvironmentConfig(name=f"{file}:{name}"), file.parent / "log", 1)
        try:
            await workers.open()
            context = GroupContext(problem, chat, n, Script(says), score, judged=score is not None, team=scripts)
            return await workers.run_group(context)
        finally:
            await workers.close()

    return asyncio.run(main()), scripts


def test_text_that_no_tokenizer_reads_costs_its_own_rollout(file: Path) -> None:
    bad, good = played(file, "Halved", lambda index, turn, read: "x" * (index + 1) + str(turn))[0]
    assert good.error == ""
    assert "half of a character" in bad.error


def test_what_a_role_hears_is_tokenised_beside_the_event_loop(file: Path) -> None:
    tokenizer = ThreadsOf(TOKENIZER)
    rollouts, _ = played(file, "Pair", lambda index, turn, read: f"x{turn}", chat=Chat(tokenizer))
    assert [len(rollout.turns) for rollout in rollouts] == [4, 4]
    assert tokenizer.threads
    assert threading.current_thread() not in tokenizer.threads


def test_each_role_has_its_own_conversation_and_reward(file: Path) -> None:
    rollouts, scripts = played(file, "Pair", lambda index, turn, read: f"{'x' * (index + 1)}{turn}")
    first = rollouts[0]
    assert first.error == ""
    assert [turn.role for turn in first.turns] == ["asker", "answerer", "asker", "answerer"]
    assert [message.content for message in first.roles["asker"].transcript] == [
        "Be brief.", "Begin.", "x0", "said: x1", "x2",
    ]  # fmt: skip
    assert [message.content for message in first.roles["answerer"].transcript] == [
        "Be brief.", "said: x0", "x1", "said: x2", "x3",
    ]  # fmt: skip
    assert scripts["asker"].calls[0] == ((0, 1), 0), "one request for the group, as all read the same"
    assert {turn for _, turn in scripts["answerer"].read} == {1, 3}
    for role, script in scripts.items():
        own = first.roles[role]
        (branch,) = own.branches
        last = max(turn for index, turn in script.read if index == 0)
        read = script.read[0, last]
        assert branch.token_ids[: len(read)].tolist() == read, "what is trained is what was read"
        assert branch.sampled == sum(len(turn.text) + 1 for turn in own.turns)
    assert first.roles["asker"].reward == pytest.approx(0.75 + 0.02)
    assert first.roles["answerer"].reward == pytest.approx(0.5 + 0.2)
    assert first.reward == pytest.approx((0.77 + 0.7) / 2)
    assert first.sampled == sum(own.sampled for own in first.roles.values())


def test_a_number_counts_for_all_and_so_do_the_jobs_rewards(file: Path) -> None:
    async def score(rollouts: Any) -> list[ScoreOutcome]:
        return [ScoreOutcome(2.0, {"exact": 2.0}) for _ in rollouts]

    rollouts, _ = played(file, "Same", lambda *_: "x", score=score)
    rewards = {role: own.reward for role, own in rollouts[0].roles.items()}
    assert rewards == {"asker": 0.75 + 1 + 2, "answerer": 0.5 + 1 + 2}
    assert rollouts[0].roles["asker"].reward_parts == {"turns": 0.75, "environment": 1.0, "exact": 2.0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nobody", "names the role 'judge'; set self.role in reset() and step() to one of asker, answerer"),
        ("Silent", "names no role"),
        ("Strange", "rewards the role 'judge'"),
        ("Half", "no reward for the role 'answerer'"),
    ],
)
def test_a_mistake_about_roles_fails_the_rollout_and_says_why(file: Path, name: str, words: str) -> None:
    rollouts, _ = played(file, name, lambda *_: "x")
    assert all(words in rollout.error for rollout in rollouts), rollouts[0].error


def test_a_conversation_that_is_too_long_fails_its_episode_alone(file: Path) -> None:
    def says(index: int, turn: int, read: str) -> str:
        if (index, turn) == (1, 2):
            raise EngineError("the prompt is too long")
        return "x"

    rollouts, _ = played(file, "Pair", says)
    assert [(one.error, len(one.turns)) for one in rollouts] == [("", 4), ("the prompt is too long", 2)]


def test_advantages_compare_the_rewards_of_one_role(file: Path) -> None:
    """The answerer's rewards differ by the length of its second word, the asker's not at all."""
    rollouts, _ = played(file, "Pair", lambda index, turn, read: "x" * (index + 1 if turn == 1 else 2), n=2)
    group = Group(rollouts[0].problem, 0, 0, rollouts)
    assert group.has_signal
    assert Grpo().batch(groups_of([group], "asker"), 8).samples == ()
    samples = Grpo().batch(groups_of([group], "answerer"), 8).samples
    assert [float(np.sign(sample.advantages[sample.loss_mask][0])) for sample in samples] == [-1.0, 1.0]
    broken = Group(group.problem, 0, 0, (*rollouts, Rollout(group.problem, 2, (), (), error="lost")))
    assert [len(one.scored) for one in groups_of([broken], "asker")] == [2]


def lengths(file: Path, name: str = "pair", **fields: Any) -> dict[str, Any]:
    job = {
        "name": name,
        "team": {"first": {"rank": 4}, "second": {"lr": 1e-3}},
        "data": {"source": "toy:add", "size": 32, "holdout": 4},
        "environment": {"name": f"{file}:Lengths", "max_turns": 2},
        "adapter": {"rank": 8},
        "sampling": {"max_tokens": 6},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "optimizer": {"lr": 2e-3},
        "steps": 4,
        "eval": {"every": 2},
    }
    return {**job, **fields}


def plain(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"source": "toy:add", "size": 32, "holdout": 0},
        "reward": {"name": "length", "args": {"target": 3}},
        "sampling": {"max_tokens": 5},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "steps": 2,
    }


def run(directory: Path, *jobs: dict[str, Any], slots: int = 4, **options: Any) -> Any:
    engine = {"samplers": 0, "slots": slots}
    return motet.run(list(jobs), base="small", quiet=True, directory=directory, engine=engine, **options)


def files(directory: Path, name: str, step: int) -> dict[str, bytes]:
    """Adapters and moments of all roles in a commit."""
    place = directory / name / "state" / str(step)
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.glob("*/*")}


def test_a_team_alone_in_company_and_in_parts(file: Path, tmp_path: Path) -> None:
    lag = {"algorithm": {"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 1}}
    both = run(tmp_path / "both", lengths(file), plain("other"), lengths(file, "late", **lag))
    assert both.ok, both
    run(tmp_path / "alone", lengths(file, steps=2), lengths(file, "late", **lag, steps=2), slots=2)
    alone = run(tmp_path / "alone", lengths(file), lengths(file, "late", **lag), slots=2, accept_changes=True)
    assert alone.ok, alone
    for name in ("pair", "late"):
        found = files(tmp_path / "alone", name, 4)
        assert set(found) == {
            f"{role}/{each}"
            for role in ("first", "second")
            for each in ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors")
        }
        assert found == files(tmp_path / "both", name, 4)
    assert metrics(tmp_path / "alone", "late") != metrics(tmp_path / "alone", "pair")
    job, line = JobDirectory(tmp_path / "both" / "pair"), records(tmp_path / "both", "pair")[0]
    first, second = (
        json.loads((job.version(4) / role / "adapter_config.json").read_text())["r"] for role in ("first", "second")
    )
    assert (first, second) == (4, 8)
    assert (line["roles"]["first"]["lr"], line["roles"]["second"]["lr"], line["lr"]) == (2e-3, 1e-3, 2e-3)
    assert set(line["eval"]["roles"]) == {"first", "second"}
    rollouts = list(job.each_rollout(0))
    assert {tuple(one["roles"]) for one in rollouts} <= {
        ("first",),
        ("first", "second"),
    }  # a long turn ends the episode
    for one in rollouts:
        assert one["reward"] == pytest.approx(sum(one["role_rewards"].values()) / len(one["roles"]))
    paid = [one["role_rewards"]["first"] for one in rollouts]
    assert line["roles"]["first"]["reward"] == pytest.approx(sum(paid) / len(paid))
    few = run(tmp_path / "few", lengths(file), slots=1)
    assert "raise engine.slots" in few.jobs["pair"].message
    _versions_are_whole(job, tmp_path)


@pytest.mark.soak
def test_a_team_goes_on_to_the_same_bytes_after_kill_9(file: Path, tmp_path: Path) -> None:
    job = lengths(file, steps=6, checkpoint={"every": 1})
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({"base": "small", "jobs": [job]}))
    command = [sys.executable, "-m", "motet", "run", str(tmp_path / "jobs.yaml"), "--set", f"run={tmp_path / 'parts'}"]
    with ending(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)):
        wait_until((tmp_path / "parts" / "pair" / "versions" / "v2").exists, PATIENCE)
    assert not (tmp_path / "parts" / "pair" / "versions" / "v6").exists()
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    subprocess.run([*command[:-1], f"run={tmp_path / 'whole'}"], cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    for found in (metrics, lambda path, name: files(path, name, 6)):
        assert found(tmp_path / "whole", "pair") == found(tmp_path / "parts", "pair")


def _versions_are_whole(job: JobDirectory, tmp_path: Path) -> None:
    """Receipts, sums and forks have all roles."""
    names = {
        f"{role}/{each}"
        for role in ("first", "second")
        for each in ("adapter_config.json", "adapter_model.safetensors")
    }
    assert set(subjects_of(read_receipt(job.version(4) / "receipt.json"))) == names
    assert verify(job.path) == 0
    forked = fork(job, 4, tmp_path / "forked" / "pair", lag=0)
    assert {path.name for path in (forked.path / "state" / "4").iterdir()} >= {"first", "second"}
    with pytest.raises(AdapterError, match=r"give that of one role, such as.*v4/first"):
        find_adapter(job.version(4))
    find_adapter(job.version(4) / "second")
    weights = job.version(4) / "second" / "adapter_model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.unlink()  # the commit has the same file
    weights.write_bytes(changed)
    assert verify(job.path) == 1
    with pytest.raises(AdapterError, match="is not what was saved"):
        check_version(job.version(4) / "second")


def test_who_does_not_know_teams_says_so(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="team: a service trains no teams"):
        validated(lengths(file), Allowed(False, {}, Addresses(), Walls()))
    with pytest.raises(ConfigError, match=r"`motet check` samples no.*steps=1 --run"):
        check([lengths(file)])
    after = {**plain("after"), "adapter": {"init": "pair"}}
    with pytest.raises(ConfigError, match=r"which is a team:.*directory of one role"):
        run(tmp_path / "chain", lengths(file), after)
    with pytest.raises(ConfigError, match=r"has tools; a team.*a class with step"):
        run(tmp_path / "tool", lengths(file, environment=f"{file}:Tool"))


def test_roles_are_not_rewarded_without_a_team(file: Path, tmp_path: Path) -> None:
    alone = lengths(file, steps=1)
    del alone["team"]
    done = run(tmp_path / "run", alone)
    assert "the environment rewards roles, and the job has no team" in done.jobs["pair"].message
