"""Supervised fine-tuning, the second loop over the same sessions: it learns, is isolated, resumes, and is evaluated."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import motet
from motet.algorithms.rows import RowLogprobs
from motet.algorithms.supervised import SoftTargets, Supervised
from motet.config import JobConfig
from motet.core.batch import Example, Row
from motet.core.errors import ConfigError
from motet.core.types import JobState, Problem
from motet.data.problems import Problems
from tests.support.fake_run import FakeRun, Setting, job, metrics, records, run_jobs, weights
from tests.support.waiting import until

pytestmark = pytest.mark.tier1


def supervised(name: str, **fields: Any) -> JobConfig:
    """A small supervised job for the fakes."""
    tree = {
        "name": name,
        "data": "in memory",
        "adapter": {"rank": 4, "alpha": 8.0},
        "algorithm": {"type": "sft", "rows_per_step": 5},
        "optimizer": {"lr": 0.05},
        "steps": 4,
        "eval": {"every": 2},
        "seed": 7,
    }
    return JobConfig.model_validate({**tree, **fields})


def test_answers_are_learned_and_nothing_is_sampled(tmp_path: Path) -> None:
    run = run_jobs(tmp_path, [supervised("a", steps=20)])
    assert run.state("a") is JobState.SUCCEEDED
    assert run.engine.requests == []
    lines = records(tmp_path, "a")
    assert [line["step"] for line in lines] == list(range(21))
    nll = [line["eval"]["nll"] for line in lines if "eval" in line]
    assert len(nll) == 11
    assert nll[-1] < nll[0] - 0.1
    assert lines[0]["samples"] == 5
    assert lines[19]["loss"] < lines[0]["loss"]


class Watched(Problems):
    """Problems that know how many were decoded in the thread of the event loop."""

    decoded: ClassVar[Counter[bool]] = Counter()

    def _problem(self, row: int) -> Problem:
        self.decoded[threading.current_thread() is threading.main_thread()] += 1
        return super()._problem(row)


@pytest.mark.parametrize(
    "config", [supervised("a"), job("a"), job("a", algorithm={"type": "grpo", "over_provision": 1.5})]
)
def test_rows_are_decoded_outside_the_event_loop(tmp_path: Path, config: JobConfig) -> None:
    Watched.decoded.clear()
    assert run_jobs(tmp_path, [config], Setting(problems=Watched)).state("a") is JobState.SUCCEEDED
    assert Watched.decoded[False] > 20
    assert Watched.decoded[True] <= 1, "the text of the probe"


def test_company_changes_no_byte(tmp_path: Path) -> None:
    run_jobs(tmp_path / "alone", [supervised("a")])
    run_jobs(tmp_path / "together", [job("x"), supervised("a"), job("y", algorithm="dr_grpo"), supervised("b", seed=1)])
    for found in (metrics, lambda path, name: weights(path, name, 4)):
        assert found(tmp_path / "alone", "a") == found(tmp_path / "together", "a")


def test_one_that_is_paused_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    run_jobs(tmp_path / "whole", [supervised("a", steps=8)])

    async def stop(run: FakeRun) -> None:
        await until(lambda: run.jobs["a"].progress.step >= 3)
        run.pipeline.stop()

    stopped = run_jobs(tmp_path / "parts", [supervised("a", steps=8)], script=stop)
    assert stopped.state("a") is JobState.PAUSED
    run_jobs(tmp_path / "parts", [supervised("a", steps=8)])
    assert metrics(tmp_path / "whole", "a") == metrics(tmp_path / "parts", "a")
    assert weights(tmp_path / "whole", "a", 8) == weights(tmp_path / "parts", "a", 8)


def test_figures_by_hand() -> None:
    """Of tokens, however answers are weighed; a teacher's probabilities of the tokens that it names need not add up to 1."""
    mask, ids = np.array([False, True, True]), np.arange(3, dtype=np.int32)
    rows = [Row((Example(ids, mask),)), Row((Example(ids[:2], mask[:2]),))]
    policy = [np.array([0, -1, -2.0]), np.array([0, -4.5])]
    sft = Supervised(reduction="sequence")
    assert sft.figures(sft.batch(rows), RowLogprobs(policy, ())) == {"nll": 2.5, "tokens": 3}
    shares = np.array([[0.5, 0.5], [0.5, 0.25], [1, 0]], np.float32)
    soft, row = SoftTargets(reduction="sequence"), Row((Example(ids, mask, np.zeros((3, 2), np.int32), shares),))
    scored = RowLogprobs([np.array([[0, 0], [-1.5, -3], [-2, -9]])], ())
    assert soft.figures(soft.batch([row]), scored) == {"nll": 2.0, "tokens": 2}


def test_a_row_is_its_prompt_and_its_answer() -> None:
    algorithm = Supervised(reduction="sequence")
    lengths = ((5, 3), (4, 3))
    examples = (Example(np.arange(tokens, dtype=np.int32), np.arange(tokens) >= prompt) for tokens, prompt in lengths)
    batch = algorithm.batch([Row((example,)) for example in examples])
    assert [sample.loss_mask.tolist() for sample in batch.samples] == [[0, 0, 0, 1, 1], [0, 0, 0, 1]]
    assert [sample.weights.tolist() for sample in batch.samples if sample.weights is not None] == [
        [0, 0, 0, 0.5, 0.5],
        [0, 0, 0, 1],
    ]
    assert batch.denominator == 2


def rows(n: int) -> list[dict[str, Any]]:
    """Conversations that end with the assistant's answer."""
    return [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"Well, {i}."}]}
        for i in range(n)
    ]


def test_a_real_base_learns_json_lines(tmp_path: Path) -> None:
    """`small`, from a file, beside a job that is rewarded; the same bytes as alone."""
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(64)))
    one = {
        "name": "answers",
        "data": {"source": str(file), "holdout": 8},
        "algorithm": {"type": "sft", "rows_per_step": 8},
        "optimizer": {"lr": 3e-3},
        "steps": 6,
        "eval": {"every": 3},
    }
    other = {
        "name": "add",
        "data": {"source": "toy:add", "size": 32, "holdout": 2},
        "reward": "exact",
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "steps": 3,
    }
    both = motet.run([one, other], base="small", quiet=True, directory=tmp_path / "both")
    alone = motet.run([one], base="small", quiet=True, directory=tmp_path / "alone")
    assert both.jobs["answers"].state == alone.jobs["answers"].state == "succeeded"
    nll = [line["eval"]["nll"] for line in records(tmp_path / "both", "answers") if "eval" in line]
    assert nll[-1] < 0.8 * nll[0]
    for found in (metrics, lambda path, name: weights(path, name, 6)):
        assert found(tmp_path / "alone", "answers") == found(tmp_path / "both", "answers")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "user", "content": "And this?"}]}, "has no answer to learn: sft wants rows"),
        (
            {"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "much " * 3000}]},
            r"has \d+ tokens with its answer, more than the 1024 positions",
        ),
    ],
    ids=["no answer", "no room"],
)
def test_rows_that_cannot_be_learned_are_named(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    job = {"name": "a", "data": {"source": [*rows(3), row], "holdout": 1}, "algorithm": "sft"}
    with pytest.raises(ConfigError, match=f"row 4 {told}"):
        motet.run([job], base="small", quiet=True, directory=tmp_path)


def test_holdout_is_evaluated_by_what_was_saved(tmp_path: Path) -> None:
    """The best version is the trained one with the lowest NLL, also where the untrained one has less."""
    run = run_jobs(tmp_path, [supervised("a", optimizer={"lr": 0.9}, steps=8)])
    done = run.jobs["a"].directory.newest()
    assert done is not None
    nll = {line["version"]: line["eval"]["nll"] for line in records(tmp_path, "a") if "eval" in line}
    assert min(nll, key=lambda version: nll[version]) == 0
    trained = {version: value for version, value in nll.items() if version}
    assert done.best_version == min(trained, key=lambda version: trained[version])
    assert (done.best_reward, done.best_by) == (-min(trained.values()), "log-lik")
