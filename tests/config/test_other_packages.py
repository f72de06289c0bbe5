"""The page for people who come from TRL or verl says what the messages say, and names settings that exist."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.algorithms.advantages import AdvantageKind, advantages, normalisation
from motet.algorithms.losses import KL_ESTIMATORS
from motet.config import JobConfig
from motet.config.mistakes import FIELDS, OTHERS_WORDS, no_such_field

pytestmark = pytest.mark.tier1

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "from-trl-and-verl.md").read_text()
ALGORITHMS = (DOCS / "algorithms.md").read_text()


def _rows(text: str) -> list[list[str]]:
    """Cells of the table rows of a text, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]


def test_page_and_messages_say_the_same() -> None:
    told: dict[str, str] = {}
    for names, meaning in _rows(PAGE.split("<!-- names")[1]):
        told |= dict.fromkeys(re.findall(r"`([^`]+)`", names), meaning)
    assert set(OTHERS_WORDS) <= set(told)
    for name, meaning in told.items():
        assert no_such_field(name, JobConfig).endswith(meaning), name


def test_settings_on_the_page_exist() -> None:
    rows = _rows(_section(PAGE, "What means the same"))[1:]
    for cell, *_ in rows:
        path = re.findall(r"`([\w.]+)", cell)[0]
        assert path in FIELDS, path


def test_defaults_are_those_of_the_page() -> None:
    told = {row[0]: row[1] for row in _rows(_section(PAGE, "Defaults that differ"))}
    job = JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": "exact"})
    optimizer, adapter = job.optimizer, job.adapter
    assert told["learning rate"] == f"`{optimizer.lr}`, {optimizer.schedule}"
    assert told["AdamW's betas"] == ", ".join(map(str, optimizer.betas))
    assert told["weight decay"] == f"{optimizer.weight_decay:g}"
    assert told["clip above"] == f"{job.rl.clip_high:g}"
    assert told["adapter"] == f"rank {adapter.rank}, alpha {adapter.alpha:g}, all linear layers"
    assert adapter.target_modules == "all-linear"
    assert told["answers"] == f"{job.sampling.max_tokens} tokens"
    assert (told["KL penalty"], job.rl.kl.coef) == ("none", 0)
    assert (told["advantage"], job.rl.advantage) == ("/ deviation of the group", "grpo")


@pytest.mark.parametrize("kind", ["grpo", "centered", "rloo"])
def test_advantages_of_a_group_are_those_of_the_page(kind: AdvantageKind) -> None:
    heading = "The same group in six packages"
    (row,) = [row for row in _rows(_section(ALGORITHMS, heading)) if row[0] == f"Motet `{kind}`"]
    assert float(row[1]) == pytest.approx(float(advantages([[1.0, 0.0]], kind)[0][0]), abs=5e-4)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_penalties_are_those_of_the_page(kind: str) -> None:
    heading = "The same group in six packages"
    (row,) = [row for row in _rows(_section(ALGORITHMS, heading)) if row[0] == f"Motet `{kind}`"]
    for own, cell in zip((-2.0, -4.0, -20.0), row[1:], strict=True):
        logprob = torch.tensor([own], dtype=torch.float64, requires_grad=True)
        value = KL_ESTIMATORS[kind](-1.0 - logprob)
        value.sum().backward()
        assert logprob.grad is not None
        for found, written in zip((value.item(), logprob.grad.item()), cell.split(", "), strict=True):
            assert math.isclose(found, float(written.replace("−", "-")), rel_tol=0.02), (cell, found)


def test_answers_that_are_masked_take_nothing_from_the_others() -> None:
    """Half of the answers are masked: the weight of each token of the others does not fall."""
    for reduction in ("token", "sequence", "constant"):
        some, of_some = normalisation([4, 0, 4, 0], reduction, 8)
        all_of_them, of_all = normalisation([4, 4], reduction, 8)
        assert np.array_equal(some[[0, 2]] / of_some, all_of_them / of_all)
