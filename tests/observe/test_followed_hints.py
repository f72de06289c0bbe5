"""Who does what a diagnosis says has a job that is accepted and shows it no more."""

from __future__ import annotations

import json
import re
import string
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import motet
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.registry import ALGORITHMS
from motet.config import EngineConfig, JobConfig
from motet.config.jobfile import parse_jobs
from motet.config.mistakes import FIELDS
from motet.core.types import Problem
from motet.hosts.checks import check_reference
from motet.hosts.launch import load
from motet.observe.report.read import diagnoses_of, read_job, read_run
from motet.runtime import answer_signs, diagnoses, evaluations
from motet.runtime.diagnoses import LEAST, RECENT, Diagnoses
from tests.support.fake_run import LINE, Setting, job, run_jobs
from tests.support.following import Tree, followed
from tests.support.hints import never_said
from tests.support.small_runs import REWARDS
from tests.support.small_runs import job as small_job
from tests.support.small_runs import run as small_run

DOTTED = [field for field in FIELDS if "." in field]
MOST = 8
"""Times that a remedy is followed: a third, or twice, may be too little."""


def lowercase(problem: Problem, completion: str) -> float:
    return sum(letter in string.ascii_lowercase for letter in completion) / (1 + len(completion))


def much_lowercase(problem: Problem, completion: str) -> float:
    return 3 * lowercase(problem, completion)


def capitals(problem: Problem, completion: str) -> float:
    return sum(letter in string.ascii_uppercase for letter in completion) / (1 + len(completion))


def noise(problem: Problem, completion: str) -> float:
    """Nothing can be learned from it: each problem likes other answers."""
    return zlib.crc32(f"{problem.id} {completion}".encode()) % 1000 / 1000


def rare(problem: Problem, completion: str) -> float:
    return float(completion[:1] == "a")


FUNCTIONS: dict[str, Callable[[Problem, str], float]] = {
    one.__name__: one for one in (lowercase, much_lowercase, capitals, noise, rare)
}


def trained(path: Path, tree: Tree) -> dict[str, str]:
    """What a real loop on the fakes is told."""
    rewards = [{**one, "function": FUNCTIONS[one["name"]]} for one in tree["rewards"]]
    run = run_jobs(path, [JobConfig.model_validate({**tree, "rewards": rewards})], Setting(holdout=12))
    return run.jobs["a"].progress.diagnoses.warnings


def settings(*rewards: str, **fields: Any) -> Tree:
    """The whole settings of a job with these rewards."""
    tree = job("a", reward=[FUNCTIONS[name] for name in rewards], **fields).model_dump(mode="json")
    return {**tree, "data": "in memory"}


SIX = {"groups_per_step": 6}
CERTAIN = settings("noise", steps=24, algorithm={**SIX, "kl": {"coef": 0.1}}, optimizer={"lr": 0.9})
FAR = settings("noise", steps=20, algorithm={**SIX, "kl": {"coef": 0.04}}, optimizer={"lr": 0.2})
TRADED = settings("much_lowercase", "capitals", steps=20, algorithm=SIX, optimizer={"lr": 0.2})
ILL: dict[str, tuple[Tree, dict[str, tuple[str, ...]]]] = {
    "traded": (TRADED, {"one-part": ("weight of much_lowercase", "weight of capitals")}),
    "collapsed": (settings("noise", steps=24, algorithm=SIX, optimizer={"lr": 0.9}), {"lost": ("optimizer.lr",)}),
    "certain": (CERTAIN, {"alike": ("optimizer.lr", "sampling.temperature"), "entropy": ("optimizer.lr",)}),
    "far": (FAR, {"far": ("optimizer.lr", "algorithm.kl.coef")}),
    "cold": (settings("noise", steps=LEAST, sampling={"temperature": 0.1}), {"identical": ("sampling.temperature",)}),
    "hard": (
        settings("rare", steps=LEAST, algorithm={**SIX, "group_size": 16}, optimizer={"lr": 0.001}),
        {"no-signal": ("algorithm.group_size",)},
    ),
}
"""Jobs with their diagnoses, each with the fields that are changed to be rid of it."""


LONG = ("traded", "far")
"""Those of several seconds."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in ILL])
def test_a_job_is_well_after_each_remedy(name: str, tmp_path: Path) -> None:
    ill, fields = ILL[name]
    before, after = trained(tmp_path / "ill", ill), dict[str, dict[str, str]]()
    for kind, field in [(kind, field) for kind, known in fields.items() for field in known]:
        tree, told, cause = ill, before, before[kind].partition(" (")[0]
        for _ in range(MOST):
            tree = followed(tree, told[kind])[field]
            key = json.dumps(tree)
            if key not in after:
                after[key] = trained(tmp_path / str(len(after)), tree)
            told = after[key]
            if cause not in told.get(kind, ""):
                break
        assert cause not in told.get(kind, ""), field


def test_an_adapter_whose_norm_runs_away_stays_after_the_remedy(tmp_path: Path) -> None:
    """A real run with a learning rate that is far too high: the same in live views and in the report."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    ill = small_job("wild", rewards, steps=6, optimizer={"lr": 0.05})
    base = load("small", EngineConfig(threads=1))
    small_run(base, tmp_path / "run", [ill])
    (wild,) = read_run(tmp_path / "run").jobs
    (told,) = (one for one in wild.warnings if "the adapter's norm runs away (" in one)
    once = followed(ill, told)["optimizer.lr"]
    small_run(base, tmp_path / "next", [followed(once, told.replace("0.05)", "0.0166667)"))["optimizer.lr"]])
    (calm,) = read_run(tmp_path / "next").jobs
    assert not any("norm" in one for one in calm.warnings)


WORDS = [zlib.crc32(str(n).encode()) % 1000 for n in range(41)]
PAIRS = [{"prompt": f"Say {n}", "chosen": str(WORDS[n]), "rejected": str(WORDS[n + 1])} for n in range(40)]
"""Nothing that other pairs teach about a pair: the more certain the policy is of it, the larger is the loss."""


def test_the_held_out_loss_of_preferences_rises_no_more_after_each_remedy(tmp_path: Path) -> None:
    ill = {
        "name": "liked",
        "data": {"source": PAIRS, "holdout": 8},
        "algorithm": {"type": "dpo", "rows_per_step": 8, "beta": 0.1},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 0.0017},
        "steps": 6,
        "eval": {"every": 1},
    }
    motet.run([ill], directory=tmp_path / "ill", quiet=True)
    (told,) = (one for one in read_job(tmp_path / "ill" / "liked").warnings if "the held-out loss rises (" in one)
    remedies = followed(ill, told)
    assert remedies.keys() == {"optimizer.lr", "steps"}
    for field, tree in remedies.items():
        motet.run([tree], directory=tmp_path / field, quiet=True)
        assert not any("loss" in said for said in read_job(tmp_path / field / "liked").warnings), field


NOW: dict[str, Tree] = {
    "failed": {"failed": 3, "errors": {"KeyError (rewards.py:1)": 3}},
    "thought": {"in_thought": 60, "truncated": 0.9},
    "stops in thought": {"in_thought": 60, "truncated": 0.1},
    "lost": {"reward": 0.0, "no_signal": 1.0},
    "identical": {"distinct": 0.13},
    "no-signal": {"no_signal": 0.9},
    "too hard": {"no_signal": 0.9, "reward_range": [0.0, 1.0]},
    "too easy": {"no_signal": 0.9, "reward_range": [0.0, 0.3]},
    "never any": {"no_signal": 0.9, "reward_range": [0.0, 0.0]},
    "alike": {"distinct": 0.3},
    "entropy": {"entropy": 0.09},
    "far": {"kl_base": 2.0},
    "norm": {"adapter_norm": 9.0},
    "length": {"length": 50, "truncated": 0.9},
    "one-part": {"reward": 0.9, "reward_parts": {"exact": 0.9, "regex": 0.0}},
    "a part below 0": {"reward": 0.9, "reward_parts": {"exact": 0.0, "length": 0.0}},
    "gamed": {"reward": 0.9, "length": 90, "truncated": 0.9, "reward_parts": {"contains": 0.0}},
}
"""What the newest lines of a job have, for each kind of diagnosis."""
EVALUATED: dict[str, list[Tree]] = {
    "worse": [{"reward": 0.2}, {"reward": 0.9}, {"reward": 0.1}],
    "harm": [{"reward": 0.9}, {"reward": 0.2}, {"reward": 0.1}],
    "flat": [{"reward": 0.2}, {"reward": 0.2}, {"reward": 0.2}],
    "loss": [{"nll": 2.0}, {"nll": 1.0}, {"nll": 3.0}],
    "loss from the start": [
        {"loss": 0.7, "accuracy": 0.5},
        {"loss": 0.8, "accuracy": 0.5},
        {"loss": 2, "accuracy": 0.5},
    ],
}
"""The held-out figures at the start, in the middle and at the end."""
READ = ("failed", "length", "gamed", "worse", "flat", "untrained")
"""What these say is to look at something or to take a version; it is no field of a job."""


def ill_signs(tree: Tree) -> Iterator[Diagnoses]:
    """Diagnoses of a job with these settings, for each diagnosis."""
    for now in NOW.values() if "group_size" in tree["algorithm"] else ():
        made = diagnoses_of(tree)
        for step in range(2 * RECENT):
            more = {"kl_base": 0.1, "adapter_norm": 5.0, "length": 20, "truncated": 0.1, "step": step}
            before = {"reward_parts": {"exact": 0.3 + step % 2 / 100, "regex": 0.9, "contains": 0.9, "length": 1.0}}
            made.see({**LINE, **more, **before, **(now if step > RECENT else {})})
        for version, reward in ((0, 0.5), (2 * RECENT, 0.1)):
            made.see_evaluation(version, {"reward": reward, "reward_stderr": 0.05})
        yield made
    if "group_size" in tree["algorithm"]:
        made = diagnoses_of(tree)
        for step in range(RECENT):
            made.see(
                {**LINE, "version": step, "kl_base": 8.0 + step, "reward_parts": dict.fromkeys(("exact", "regex"), 0.0)}
            )
        yield made
    for figures in EVALUATED.values():
        made = diagnoses_of(tree)
        for n, figure in enumerate(figures):
            made.see_evaluation(n * RECENT, {"reward_stderr": 0.01, **figure})
        yield made
    for still in (5, 20):
        made = diagnoses_of(tree)
        for step in range(20):
            made.see({**LINE, "step": step, "grad_norm": 0.0 if step < still else 1.0})
        for version in (0, 5, 20):
            made.see_evaluation(version, {"reward": 0.5 + version / 100, "reward_stderr": 0.01})
        made.choose(5 if still == 5 else None)
        yield made


def tree_of(**fields: Any) -> Tree:
    """The whole settings of a job, as job.yaml has them."""
    weights = {"exact": 1, "regex": 1, "contains": 0}
    rewards = [{"name": name, "weight": weight} for name, weight in weights.items()]
    rewards[1]["args"] = {"pattern": "4"}
    tree = {"name": "a", "data": "toy:add", "rewards": rewards, "steps": 2 * RECENT, **fields}
    if fields.get("algorithm", {}).get("type") in ("sft", "dpo", "kto"):
        del tree["rewards"]
    return JobConfig.model_validate(tree).model_dump(mode="json")


TREES: dict[str, Tree] = {
    "": tree_of(),
    "rate": tree_of(optimizer={"lr": 0.01, "lr_multiplier": 3, "schedule": "linear"}, sampling={"stop": ["\n"]}),
    "penalty": tree_of(algorithm={"kl": {"coef": 0.2}}, optimizer={"lr": 0.03, "lr_factors": {3: 0.5}}),
    "punished": tree_of(
        rewards=[{"name": "exact", "weight": 0.5}, {"name": "length", "weight": -2, "args": {"target": 9}}]
    ),
    "server": tree_of(algorithm={"type": "distill", "teacher": "http://localhost:1"}),
    "teacher": tree_of(algorithm={"type": "distill", "teacher": "base"}),
    **{
        name: tree_of(algorithm={"type": name})
        for name, kind in ALGORITHMS.items()
        if (issubclass(kind, PolicyGradient) and name != "distill") or name in ("sft", "dpo", "kto")
    },
}


@pytest.mark.parametrize("name", TREES)
def test_a_job_takes_each_remedy(name: str) -> None:
    """Every field that a diagnosis names has its value now, and a job with this algorithm takes the new one."""
    for one in ill_signs(TREES[name]):
        for diagnosis in one.diagnoses:
            remedies = followed(TREES[name], diagnosis.says)
            named = {field for field in DOTTED if re.search(rf"\b{re.escape(field)}(?![.\w])", diagnosis.says)}
            assert named <= remedies.keys(), diagnosis
            assert bool(remedies) or diagnosis.kind in READ or "(algorithm: sft)" in diagnosis.says, diagnosis
            for field, tree in remedies.items():
                (taken,) = parse_jobs(yaml.safe_dump({"base": "small", "jobs": [tree]})).jobs
                check_reference(taken)
                if field.startswith("weight of "):  # a weight below 0 becomes less by growing
                    top = f"by {field.removeprefix('weight of ')} alone" in diagnosis.says
                    pairs = zip(TREES[name]["rewards"], tree["rewards"], strict=True)
                    assert [a["weight"] / b["weight"] for b, a in pairs if a != b] == [0.5 if top else 2.0], diagnosis
                if "lr" in field:
                    assert all(
                        a < b for a, b in zip(rates(taken), rates(JobConfig.model_validate(TREES[name])), strict=True)
                    )


def rates(one: JobConfig) -> list[float]:
    """Of each step but the last."""
    rate = one.optimizer.lr_multiplier * (0.003 if isinstance(one.optimizer.lr, str) else one.optimizer.lr)
    return [one.optimizer.rate(rate, step, one.steps) for step in range(one.steps - 1)]


def test_every_remedy_is_followed_above() -> None:
    """A text that comes to these modules is met here, and a field in it has a training that shows that it cures."""
    found = [one for tree in TREES.values() for made in ill_signs(tree) for one in made.diagnoses]
    said = [one.says for one in found]
    assert [never_said(module, said) for module in (diagnoses, answer_signs, evaluations)] == [[], [], []]
    cured = {kind for _, fields in ILL.values() for kind in fields} | {"norm", "loss", "thought", "never"}
    assert {one.kind for one in found} == cured | set(READ)
