"""DPO and KTO: their gradients are those of plain PyTorch and `peft`; jobs learn, alone and in company, and resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from peft import PeftModel

import motet
from motet.algorithms.algorithm import StepBatch
from motet.algorithms.dpo import Dpo
from motet.algorithms.kto import Kto
from motet.algorithms.rows import Preference, RowAlgorithm, RowLogprobs
from motet.algorithms.supervised import Supervised
from motet.core.batch import Batch, Example, Row, Segment
from motet.core.errors import ConfigError
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_walls import Walls
from motet.service.jobs.validation import Allowed, validated
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.fake_run import metrics, records, weights
from tests.support.processes import ending
from tests.support.segments import SAMPLE_TYPES, gradient, make_trainer, types
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.tier1

# PEFT 0.21 asks transformers 5.23 for a property by its old name.


def example(prompt: int, answer: int, seed: int) -> Example:
    ids = torch.cat([tiny.tokens(prompt, seed=1000 + prompt), tiny.tokens(answer, seed=seed)]).numpy().astype(np.int32)
    return Example(ids, np.arange(prompt + answer) >= prompt)


def plain_sums(model: Any, examples: list[Example]) -> torch.Tensor:
    """The whole log probability of what is learned of each."""
    sums = []
    for one in examples:
        ids = torch.from_numpy(one.token_ids).long()
        logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float()[:-1], -1)
        chosen = logprobs.gather(-1, ids[1:, None])[:, 0]
        sums.append(chosen[torch.from_numpy(one.loss_mask)[1:]].sum())
    return torch.stack(sums)


PAIRS = [Row((example(5, 9, 1), example(5, 4, 2))), Row((example(8, 3, 3), example(8, 7, 4)))]
THUMBS = [Row((example(5, 9, 1),), True), Row((example(8, 3, 3),), False), Row((example(4, 6, 5),), True)]


def plain_dpo(algorithm: Dpo, policy: Any, reference: Any) -> torch.Tensor:
    """Eq. 7 of the paper, as it stands there."""
    examples = [one for row in PAIRS for one in row.examples]
    lengths = torch.tensor([float(one.n_learned) for one in examples])
    sums = plain_sums(policy, examples)
    with torch.no_grad():
        before = plain_sums(reference, examples)
    gains = (sums - before) / (lengths if algorithm.length_normalised else 1.0)
    losses = -F.logsigmoid(algorithm.beta * (gains[::2] - gains[1::2]))
    return (losses - algorithm.sft * sums[::2] / lengths[::2]).mean()


def plain_kto(algorithm: Kto, policy: Any, reference: Any) -> torch.Tensor:
    """Eq. 8 of the paper; the reference point from each prompt with the next row's answer, with no gradient."""
    examples = [row.examples[0] for row in THUMBS]
    others = []
    for one, following in zip(examples, [*examples[1:], examples[0]], strict=True):
        prompt, answer = one.token_ids[~one.loss_mask], following.token_ids[following.loss_mask]
        others.append(Example(np.concatenate([prompt, answer]), np.arange(len(prompt) + len(answer)) >= len(prompt)))
    with torch.no_grad():
        point = (plain_sums(policy, others) - plain_sums(reference, others)).mean().clamp(min=0)
        before = plain_sums(reference, examples)
    gains = plain_sums(policy, examples) - before
    liked = torch.tensor([row.liked for row in THUMBS])
    up = algorithm.liked_weight * (1 - torch.sigmoid(algorithm.beta * (gains - point)))
    down = algorithm.disliked_weight * (1 - torch.sigmoid(algorithm.beta * (point - gains)))
    return torch.where(liked, up, down).mean()


@pytest.mark.parametrize(
    ("algorithm", "rows", "plain"),
    [
        (Dpo(beta=0.7), PAIRS, plain_dpo),
        (Dpo(beta=0.7, length_normalised=True, sft=0.3), PAIRS, plain_dpo),
        (Kto(beta=0.7, liked_weight=1.5, disliked_weight=0.5), THUMBS, plain_kto),
    ],
)
def test_gradients_equal_plain_pytorch(algorithm: Preference, rows: list[Row], plain: Any, tmp_path: Path) -> None:
    """Within 2e-5 of the largest: policy "a", reference "b", both adapters of the same base."""
    base = tiny.base("llama")
    trainer = make_trainer(base)
    for name in "ab":
        (tmp_path / name).mkdir()
        trainer.save_adapter(name, tmp_path / name, optimizer=False)
    policy = PeftModel.from_pretrained(tiny.stock("llama"), tmp_path / "a", is_trainable=True)
    loss = plain(algorithm, policy, PeftModel.from_pretrained(tiny.stock("llama"), tmp_path / "b"))
    loss.backward()

    def scored(batch: StepBatch) -> RowLogprobs:
        return RowLogprobs(*([*trainer.forward(Batch((Segment(name, batch.samples),)))[0]] for name in "ab"))

    batch = algorithm.batch(rows)
    figures, weighed = algorithm.figures(batch, scored(batch)), algorithm.weighed(batch, scored(batch))
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for segment in weighed.segments("a", algorithm, 1.0, budget=10):  # a sample to each: a pair need not lie in one cut
        trainer.forward_backward(Batch((segment,)))
    wanted = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.requires_grad}
    for path, pair in inside.arena(trainer, "a").layout.views(gradient(trainer, "a")).items():
        for side, ours in zip("AB", pair, strict=True):
            want = wanted[f"base_model.model.{path}.lora_{side}.default.weight"]
            assert want is not None
            assert float((ours.t() - want).abs().max()) <= 2e-5 * float(want.abs().max()), (path, side)


@pytest.mark.parametrize(
    ("algorithm", "rows", "gains", "over", "factors"),
    [
        (Dpo(beta=0.5), PAIRS, [2, 1, 1, 1], [0.5, 0], [1, 1]),
        (
            Kto(beta=2, liked_weight=1.5, disliked_weight=0.5),
            THUMBS,
            [1, 1, 0.5, 1.5, 0, 0],
            [1, -1, 0],
            [1.5, 0.5, 1.5],
        ),
        (Kto(beta=2), THUMBS, [1, 1, -1, -9, 0, 0], [2, -2, -2], [1, 1, 1]),
        (Kto(beta=2), THUMBS[:1], [1], [2], [1]),
    ],
    ids=["pairs", "ratings", "other answers got less likely", "no other answer"],
)
def test_figures_by_hand(
    algorithm: Preference, rows: list[Row], gains: list[float], over: list[float], factors: list[float]
) -> None:
    """Whatever leaves the odds as they are is by half on the right side."""
    batch = algorithm.batch(rows)
    reference = [np.where(sample.loss_mask, -1.0, 0.0).astype(np.float32) for sample in batch.samples]
    policy = [one + np.eye(1, len(one), len(one) - 1)[0] * gain for one, gain in zip(reference, gains, strict=True)]
    figures = algorithm.figures(batch, RowLogprobs(policy, reference))
    sigma = 1 / (1 + np.exp(over))
    losses = np.array(factors) * (-np.log(1 - sigma) if isinstance(algorithm, Dpo) else sigma)
    assert figures["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert figures["accuracy"] == np.mean((np.sign(over) + 1) / 2)
    assert figures.get("margin") == (np.mean(over) if isinstance(algorithm, Dpo) else None)


@pytest.mark.parametrize(
    ("prompts", "others"),
    [([5, 8, 4], [1, 2, 0]), ([5, 5, 8, 8], [2, 2, 0, 0]), ([5, 8, 5], [1, 2, 1]), ([5, 5, 5], []), ([5], [])],
)
def test_the_reference_point_pairs_a_prompt_with_an_answer_to_another(prompts: list[int], others: list[int]) -> None:
    """Rows of one prompt that are neighbours, as without shuffling: an answer to a prompt says nothing as its own."""
    rows = [Row((example(prompt, 3, place),), place % 2 == 0) for place, prompt in enumerate(prompts)]
    samples = Kto().batch(rows).samples[len(rows) :]
    whole = [row.examples[0].token_ids.tolist() for row in rows]
    assert [sample.token_ids[-3:].tolist() for sample in samples] == [whole[other][-3:] for other in others]
    assert [sample.token_ids[:-3].tolist() for sample in samples] == [ids[:-3] for ids in whole[: len(others)]]


@pytest.mark.parametrize(("algorithm", "rows"), [(Dpo(), PAIRS), (Kto(), THUMBS)], ids=str)
def test_a_policy_that_equals_its_reference_is_right_by_half(algorithm: Preference, rows: list[Row]) -> None:
    """Otherwise labels at random would make it better."""
    batch = algorithm.batch(rows)
    same = [np.where(sample.loss_mask, -1.0, 0.0).astype(np.float32) for sample in batch.samples]
    assert algorithm.figures(batch, RowLogprobs(same, same))["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("algorithm", "rows"), [(Dpo(), PAIRS), (Kto(), THUMBS), (Supervised(reduction="sequence"), PAIRS)], ids=str
)
def test_arrays_of_samples_are_small(algorithm: RowAlgorithm, rows: list[Row]) -> None:
    batch = algorithm.batch(rows)
    zeros = [np.zeros(sample.n_tokens, np.float32) for sample in batch.samples]
    made = algorithm.weighed(batch, RowLogprobs(zeros, zeros)).samples
    assert {types(sample) for sample in (*batch.samples, *made)} == {SAMPLE_TYPES}


def test_a_row_of_several_examples_counts_once() -> None:
    together, alone = Row((example(5, 9, 1), example(5, 3, 2))), Row((example(8, 3, 3),))
    batch = Supervised(reduction="sequence").batch([together, alone])
    assert batch.denominator == 2
    shares = [float(np.sum(one.weights, dtype=np.float64)) for one in batch.samples if one.weights is not None]
    assert shares == pytest.approx([9 / 12, 3 / 12, 1])
    assert Supervised().batch([together, alone]).denominator == 15


def test_likelihoods_of_answers_are_summed_in_float64() -> None:
    batch = Dpo().batch(PAIRS)
    values = [np.where(sample.loss_mask, np.float32(-1), np.float32(9)) for sample in batch.samples]
    values[1][5] = -(2.0**24)
    assert RowLogprobs(values, values).sums(batch.samples)[0].tolist() == [-9.0, -(2.0**24) - 3, -3.0, -7.0]


def preferences(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {i}", "chosen": f"Well, {i}.", "rejected": f"No: {i}!"} for i in range(n)]


def dpo(name: str, **fields: Any) -> dict[str, Any]:
    job = {
        "name": name,
        "data": {"source": preferences(40), "holdout": 8},
        "algorithm": {"type": "dpo", "rows_per_step": 4, "beta": 0.3},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 1e-3},
        "steps": 4,
        "eval": {"every": 2},
    }
    return {**job, **fields}


@pytest.mark.cell("preferences", "embedded")
def test_a_real_base_learns_what_was_liked_better(tmp_path: Path) -> None:
    """Preferences and thumbs on `small`, in company, and from an adapter that is the reference; the same bytes as alone."""
    thumbs = [
        {"prompt": row["prompt"], "completion": row[column], "label": column == "chosen"}
        for row in preferences(20)
        for column in ("chosen", "rejected")
    ]
    kto = dpo("kto", data={"source": thumbs, "holdout": 4}, algorithm={"type": "kto", "rows_per_step": 6, "beta": 0.3})
    both = motet.run([dpo("dpo"), kto], base="small", quiet=True, directory=tmp_path / "both")
    alone = motet.run([dpo("dpo")], base="small", quiet=True, directory=tmp_path / "alone")
    assert both.ok
    for found in (metrics, lambda path, name: weights(path, name, 4)):
        assert found(tmp_path / "alone", "dpo") == found(tmp_path / "both", "dpo")
    for name in ("dpo", "kto"):
        evaluated = [line["eval"] for line in records(tmp_path / "both", name) if "eval" in line]
        assert evaluated[-1]["loss"] < 0.9 * evaluated[0]["loss"]
        assert evaluated[-1]["accuracy"] > 0.9
    first = records(tmp_path / "alone", "dpo")[0]
    assert (first["margin"], first["loss"]) == (0.0, pytest.approx(np.log(2)))  # it begins as its own reference

    further = dpo("further", adapter={"rank": 8, "init": str(alone.jobs["dpo"].adapter)}, steps=1)
    compared = {
        name: motet.run(
            [further | {"algorithm": {**further["algorithm"], "reference": reference}}],
            base="small",
            quiet=True,
            directory=tmp_path / name,
        )
        for name, reference in (("start", "start"), ("base", "base"), ("named", str(alone.jobs["dpo"].adapter)))
    }
    assert all(run.ok for run in compared.values())
    margins = {name: records(tmp_path / name, "further")[0]["margin"] for name in compared}
    assert margins["start"] == margins["named"] == 0.0
    assert margins["base"] > 0.5


def test_a_prompt_with_the_answer_to_another_fits_into_the_base(tmp_path: Path) -> None:
    """A base with learned positions has no others."""
    long, short = "x" * 180, "y"
    thumbs = [
        {"prompt": prompt, "completion": answer, "label": label}
        for prompt, answer, label in ((long, short, True), (short, long, False))
    ]
    algorithm = {"type": "kto", "rows_per_step": 2}
    job = dpo("kto", data={"source": thumbs, "chat_template": False}, algorithm=algorithm, steps=1)
    del job["eval"]
    run = motet.run([job], base=str(tiny.directory("opt")), quiet=True, directory=tmp_path)
    assert run.ok, run.jobs["kto"].message


@pytest.mark.soak
def test_thumbs_go_on_to_the_same_bytes_after_kill_9(tmp_path: Path) -> None:
    thumbs = [{"prompt": f"Say {i}", "completion": f"Well, {i}.", "label": i % 2 == 0} for i in range(24)]
    job = dpo("a", data={"source": "thumbs.jsonl", "holdout": 4}, algorithm={"type": "kto", "rows_per_step": 6})
    (tmp_path / "thumbs.jsonl").write_text("\n".join(map(json.dumps, thumbs)))
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({"base": "small", "jobs": [job]}))
    command = [sys.executable, "-m", "motet", "run", str(tmp_path / "jobs.yaml"), "--set", f"run={tmp_path / 'parts'}"]
    with ending(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)):
        wait_until((tmp_path / "parts" / "a" / "versions" / "v2").exists, PATIENCE)
    assert not (tmp_path / "parts" / "a" / "versions" / "v4").exists()
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    subprocess.run([*command[:-1], f"run={tmp_path / 'whole'}"], cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    for found in (metrics, lambda path, name: weights(path, name, 4)):
        assert found(tmp_path / "whole", "a") == found(tmp_path / "parts", "a")


def test_one_that_is_paused_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole = motet.run([dpo("a")], base="small", quiet=True, directory=tmp_path / "whole")
    assert whole.ok
    motet.run([dpo("a", steps=2)], base="small", quiet=True, directory=tmp_path / "parts")
    motet.run([dpo("a")], base="small", quiet=True, directory=tmp_path / "parts", accept_changes=True)
    assert weights(tmp_path / "whole", "a", 4) == weights(tmp_path / "parts", "a", 4)


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    for fields, message in (
        ({"data": {"source": [{"prompt": "Sky?", "chosen": "Blue."}] * 4, "holdout": 0}}, "row 1 has no rejected"),
        (
            {"algorithm": {"type": "dpo", "reference": str(tmp_path / "nowhere")}},
            "reference: there is no directory .*nowhere",
        ),
        (
            {"algorithm": {"type": "dpo", "reference": "http://127.0.0.1:1"}},
            "reference: no server is asked here, only in `distill`; give `start`",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            motet.run([dpo("a", **fields)], base="small", quiet=True, directory=tmp_path / "run")


def test_a_service_compares_with_nothing_of_its_disk_or_network(tmp_path: Path) -> None:
    allowed = Allowed(False, {}, Addresses(()), Walls(required=True))
    pairs = {"name": "a", "data": "toy:add"}
    assert validated({**pairs, "algorithm": {"type": "dpo", "reference": "base"}}, allowed).slots == 1
    for algorithm in (
        {"type": "dpo", "reference": str(tmp_path)},
        {"type": "distill", "teacher": "http://169.254.169.254"},
        {"type": "distill", "teacher": "job@best"},
    ):
        with pytest.raises(ConfigError, match="cannot be compared with here"):
            validated({**pairs, "algorithm": algorithm}, allowed)
