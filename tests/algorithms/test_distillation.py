"""Distillation: by an adapter or a server, over the student's own answers; and from a teacher's probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from transformers import AutoTokenizer

import motet
from motet.algorithms.distillation import Distillation
from motet.config import JobConfig
from motet.core.errors import ConfigError
from motet.core.types import JobState
from tests.support.adapter_files import run
from tests.support.fake_run import job, metrics, records, run_jobs, weights
from tests.support.protocol_server import ProtocolServer
from tests.support.rollout_groups import group, rollout
from tests.support.server_run import learn, trainer_of

pytestmark = pytest.mark.tier1


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that answers what `small` does not."""
    rows = [{"prompt": f"Say {i}", "answer": f"Well, {i}."} for i in range(24)]
    job = {
        "name": "teacher",
        "data": {"source": rows, "holdout": 0},
        "algorithm": {"type": "sft", "rows_per_step": 8},
        "adapter": {"rank": 16},
        "optimizer": {"lr": 3e-3},
        "steps": 10,
    }
    return Path(run(tmp_path_factory.mktemp("teacher"), job).jobs["teacher"].adapter)


def student(name: str, teacher: Path | str, **fields: Any) -> dict[str, Any]:
    job = {
        "name": name,
        "data": {"source": [{"prompt": f"Say {i}"} for i in range(24)], "holdout": 0},
        "algorithm": {"type": "distill", "teacher": str(teacher), "group_size": 8, "groups_per_step": 4},
        "sampling": {"max_tokens": 8},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 3e-3},
        "steps": 6,
    }
    return {**job, **fields}


@pytest.mark.cell("distillation", "embedded")
def test_a_student_comes_nearer_to_its_teacher(teacher: Path, tmp_path: Path) -> None:
    pupil = student("a", teacher, steps=36)
    pupil["algorithm"]["groups_per_step"] = 2
    assert run(tmp_path / "run", pupil).ok
    losses = [line["loss"] for line in records(tmp_path / "run", "a")]
    # on fresh samples the mean of log student − log teacher: their KL
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


def test_a_student_learns_the_same_in_company(teacher: Path, tmp_path: Path) -> None:
    other = {
        "name": "add",
        "data": {"source": "toy:add", "size": 32, "holdout": 0},
        "reward": "exact",
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "steps": 2,
    }
    both = run(tmp_path / "both", student("a", teacher, steps=4), other)
    assert both.ok, both
    alone = run(tmp_path / "alone", student("a", teacher, steps=2))
    assert alone.ok
    assert run(tmp_path / "alone", student("a", teacher, steps=4), accept_changes=True).ok  # in two parts
    for found in (metrics, lambda path, name: weights(path, name, 4)):
        assert found(tmp_path / "alone", "a") == found(tmp_path / "both", "a")


def test_without_a_reward_the_best_version_is_the_newest(tmp_path: Path) -> None:
    """Nothing rewards answers, so no version is better than another, and the untrained one is not kept as the best."""
    pupil = {**job("a", algorithm={"type": "distill", "teacher": "base", "group_size": 2}).model_dump(), "rewards": []}
    done = run_jobs(tmp_path, [JobConfig.model_validate(pupil)])
    assert done.state("a") is JobState.SUCCEEDED, done.jobs["a"].progress.message
    assert done.jobs["a"].directory.version_named("best").name == "v4"
    lines = records(tmp_path, "a")
    assert {line["eval"]["reward"] for line in lines if "eval" in line} == {None}
    assert {line["reward"] for line in lines if "loss" in line} == {None}


def test_advantages_are_what_the_teacher_thinks_more() -> None:
    algorithm = Distillation(teacher="base")
    batch = algorithm.batch([group(rollout(1.0, 3), rollout(None)), group(rollout(0.0, 2))], 8)
    assert [sample.n_trainable for sample in batch.samples] == [3, 2]
    reference = [np.linspace(-3, 0, sample.n_tokens, dtype=np.float32) for sample in batch.samples]
    weighed = algorithm.weighed(batch.with_logprobs("reference_logprobs", reference))
    for sample, before, values in zip(weighed.samples, batch.samples, reference, strict=True):
        wanted = np.where(before.loss_mask, values - before.logprobs, 0).astype(np.float32)
        np.testing.assert_array_equal(sample.advantages, wanted)


def test_a_teacher_on_a_server_is_the_same_teacher(tmp_path: Path) -> None:
    """The fake base behind vLLM's protocol, and the same base here: equal bytes; with a reward that is watched."""
    algorithm = {"type": "distill", "group_size": 2, "kl": {"coef": 0.0}}
    with ProtocolServer() as server:
        for name, teacher in (("here", "base"), ("there", server.url)):
            done = run_jobs(tmp_path / name, [job("a", algorithm={**algorithm, "teacher": teacher}, steps=3)])
            assert done.state("a") is JobState.SUCCEEDED, done.jobs["a"].progress.message
    lines = [record for record in records(tmp_path / "there", "a") if "loss" in record]
    assert [line["kl_base"] for line in lines] == pytest.approx([0.0] * 3, abs=1e-9)
    assert weights(tmp_path / "here", "a", 3) == weights(tmp_path / "there", "a", 3)
    assert done.jobs["a"].progress.inexact == ["a server judges what is learned (algorithm.teacher)"]


def test_a_server_may_know_its_teacher_by_a_name(tmp_path: Path) -> None:
    """The first model that it lists is another; a name that it does not know is told."""
    algorithm = {"type": "distill", "group_size": 2}
    taught = trainer_of("teacher")
    learn(taught, "teacher")
    with ProtocolServer() as server:
        (tmp_path / "teacher").mkdir()
        taught.save_adapter("teacher", tmp_path / "teacher", optimizer=False)
        loaded = {"lora_name": "teacher", "lora_path": str(tmp_path / "teacher")}
        assert httpx2.post(f"{server.url}/v1/load_lora_adapter", json=loaded).is_success
        for name, model in (("first", None), ("base", "fake-base"), ("adapter", "teacher"), ("none", "no-such")):
            teacher = {**algorithm, "teacher": server.url, "teacher_model": model}
            done = run_jobs(tmp_path / name, [job("a", algorithm=teacher, steps=2)])
            if name == "none":
                assert "`no-such` does not exist" in done.jobs["a"].progress.message
    assert weights(tmp_path / "first", "a", 2) == weights(tmp_path / "base", "a", 2)
    assert weights(tmp_path / "first", "a", 2) != weights(tmp_path / "adapter", "a", 2)


def test_probabilities_of_a_teacher_are_targets(tmp_path: Path) -> None:
    """A teacher that is sure of one token teaches what `sft` teaches; one that is in doubt between two ends between them."""
    tokenizer = AutoTokenizer.from_pretrained(Path(motet.__file__).parent / "assets" / "small-base")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def row(i: int, doubt: float) -> dict[str, Any]:
        ids = [*tokenizer.encode(f"{i}.", add_special_tokens=False), end]
        other = tokenizer.encode("x", add_special_tokens=False)[0]
        logprobs = [np.log([1 - doubt, doubt + 1e-30]).tolist() for _ in ids]
        return {
            "prompt": f"Say {i}",
            "token_ids": ids,
            "top_ids": [[one, other] for one in ids],
            "top_logprobs": logprobs,
        }

    def taught(name: str, rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "name": name,
            "seed": 3,
            "data": {"source": rows, "holdout": 4},
            "algorithm": {"type": kind, "rows_per_step": 4},
            "adapter": {"rank": 8},
            "optimizer": {"lr": 3e-3},
            "steps": 4,
        }

    answers = [{"prompt": f"Say {i}", "answer": f"{i}."} for i in range(16)]
    jobs = [taught("sft", answers, "sft")]
    jobs += [
        taught(name, [row(i, doubt) for i in range(16)], "soft_targets")
        for name, doubt in (("sure", 0.0), ("doubt", 0.3))
    ]
    assert run(tmp_path, *jobs).ok
    nll = {job["name"]: [one["eval"]["nll"] for one in records(tmp_path, job["name"]) if "eval" in one] for job in jobs}
    assert nll["sure"] == pytest.approx(nll["sft"], rel=1e-4)
    assert nll["doubt"][-1] < 0.9 * nll["doubt"][0]
    assert nll["doubt"][-1] > nll["sure"][-1]


def test_stop_rules_that_distillation_can_follow_are_taken() -> None:
    """Others are refused: `tests/messages.toml`."""
    tree = {"name": "a", "data": "toy:add", "algorithm": {"type": "distill", "teacher": "base"}}
    for rule in ("held_out_above", "reward_above"):
        JobConfig.model_validate({**tree, "reward": "exact", "stop_when": {rule: 0.5}})
    JobConfig.model_validate({**tree, "stop_when": {"kl_above": 1}})


def test_what_cannot_teach_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher: there is no directory .*nowhere"):
        run(tmp_path, student("a", tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"temperature: must.*a teacher on a server"):
        run(tmp_path, student("a", "http://127.0.0.1:9", sampling={"temperature": 0.5}))
    failed = run(tmp_path / "away", student("a", "http://127.0.0.1:9"))
    assert "the teacher at http://127.0.0.1:9/v1/models does not answer" in failed.jobs["a"].message
