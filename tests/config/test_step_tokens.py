"""How many tokens a step may have: what counts, what fits, and that nothing usual is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.registry import ALGORITHMS
from motet.algorithms.rows import RowAlgorithm
from motet.config import OF_CLIENT, JobConfig
from motet.config.jobfile import load_jobs
from motet.config.step_tokens import MOST_BYTES, check_calls, check_command, check_decoded, check_step, tokens_of_step
from motet.core.errors import LimitError
from motet.hosts.base_speed import LEAST

pytestmark = pytest.mark.tier1

EXAMPLES = Path(__file__).parents[2] / "examples"
CONTEXT = {"small": 1024, "smollm2": 8192}


def job(**fields: Any) -> JobConfig:
    tree = {"name": "a", "data": {"source": "toy:add", "holdout": 5}, "reward": "exact"}
    tree |= {"algorithm": {"groups_per_step": 4, "group_size": 8}, "sampling": {"max_tokens": 10}, "eval": {"n": 2}}
    return JobConfig.model_validate({**tree, **fields})


def rows(kind: str, **fields: Any) -> JobConfig:
    tree = {
        "name": "a",
        "data": {"source": "rows.jsonl", "holdout": 5},
        "algorithm": {"type": kind, "rows_per_step": 6},
    }
    return JobConfig.model_validate({**tree, **fields})


def of_algorithm(**fields: Any) -> JobConfig:
    return job(algorithm={"groups_per_step": 4, "group_size": 8, **fields})


COUNTED: dict[str, tuple[JobConfig, int, int]] = {
    # 32 rollouts with prompts of 7 tokens and answers of 10, sampled once and trained once
    "rollouts": (job(), 2 * 32 * 17, 5 * 2 * 17),
    "several turns": (job(environment="retry"), 2 * 32 * 27, 5 * 2 * 27),
    "turns that are as long as the base's longest sequence": (
        job(environment={"name": "agent", "max_turns": 20}), 2 * 32 * 100, 5 * 2 * 100,
    ),
    "more problems than are trained": (of_algorithm(oversampling=2), (64 + 32) * 17, 5 * 2 * 17),
    "more groups than are waited for": (of_algorithm(over_provision=1.5), (48 + 32) * 17, 5 * 2 * 17),
    "several updates": (of_algorithm(updates_per_batch=3), (1 + 3) * 32 * 17, 5 * 2 * 17),
    "a critic": (of_algorithm(type="ppo", critic={}), (1 + 2) * 32 * 17, 5 * 2 * 17),
    "rows": (rows("sft"), 6 * 7, 5 * 7),
    "pairs": (rows("dpo"), 6 * 7, 5 * 7),  # both answers are examples of a row
    "ratings": (rows("kto"), 2 * 6 * 7, 2 * 5 * 7),
    "a client": (
        JobConfig.model_validate({"name": "a", "algorithm": "client", "data": {"source": OF_CLIENT, "chat_template": False}}),
        0, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", COUNTED)
def test_all_that_a_step_reads_samples_and_trains_counts(what: str) -> None:
    config, trained, evaluated = COUNTED[what]
    assert tokens_of_step(config, longest=7, context=100, held_out=5) == (trained, evaluated)


def test_what_the_base_reads_and_writes_to_judge_counts() -> None:
    trained, evaluated = tokens_of_step(job(), 7, 100, 5)
    assert tokens_of_step(job(), 7, 100, 5, judged=20) == (trained + 32 * 20, evaluated + 5 * 2 * 20)


def test_less_is_known_before_data_is_read() -> None:
    assert tokens_of_step(job(), held_out=5) == (2 * 32 * 10, 5 * 2 * 10)
    assert tokens_of_step(rows("sft")) == (6, 5)


@pytest.mark.parametrize("config", [job(), rows("sft"), of_algorithm(updates_per_batch=3)])
def test_the_number_that_a_refusal_names_fits_and_no_larger_one(config: JobConfig) -> None:
    trained, evaluated = tokens_of_step(config, 7, 100)
    total = trained + evaluated
    check_step(config, total, 7, 100)
    with pytest.raises(LimitError, match="motet tenants limit --step-tokens") as error:
        check_step(config, total - 1, 7, 100)
    assert f"up to {total} tokens, {evaluated} of these in its evaluation" in str(error.value)
    name, text = str(error.value).split("algorithm.")[1].split(": ", 1)
    fits = int(text.split()[0])

    def lowered(units: int) -> int:
        tree = config.model_dump(exclude_unset=True)
        tree["algorithm"] = {**tree["algorithm"], "type": config.algorithm.type, name: units}
        return sum(tokens_of_step(JobConfig.model_validate(tree), 7, 100))

    assert lowered(fits) <= total - 1 < lowered(fits + 1)
    lower = r"lower data\.holdout, or an" if name == "rows_per_step" else r"lower data\.holdout, eval\.n or sampling"
    with pytest.raises(LimitError, match=lower):
        check_step(config, evaluated - 1, 7, 100)


def test_calls_that_do_not_continue_each_other_count_until_the_limit_with_training_on_them() -> None:
    assert not check_calls(job(), "train", 50, 100)
    assert "let calls continue earlier ones, lower algorithm.groups_per_step" in check_calls(job(), "train", 51, 100)
    assert check_calls(of_algorithm(updates_per_batch=3), "train", 26, 100)
    assert not check_calls(job(), "eval", 100, 100)
    assert "lower data.holdout or eval.n" in check_calls(job(), "eval", 101, 100)


def test_a_clients_gradients_count_together_until_its_step() -> None:
    assert not check_command(60, 40, 100)
    assert "call optim_step before it" in check_command(61, 40, 100)
    assert "send at most 100" in check_command(101, 0, 100)


USUAL = [64, 256, 512, 1024]
"""Tokens of prompts, and of rows with their answers."""
SAMPLED = [name for name, kind in ALGORITHMS.items() if issubclass(kind, PolicyGradient)]
LEARNED = [name for name, kind in ALGORITHMS.items() if issubclass(kind, RowAlgorithm)]


@pytest.mark.parametrize("base", CONTEXT)
@pytest.mark.parametrize("longest", USUAL)
def test_no_default_job_is_refused_on_the_bases_that_are_here(base: str, longest: int) -> None:
    """Of any algorithm in any environment, even on a machine that does as little as can be measured in ten minutes."""
    sampled = {"name": "a", "data": "toy:add", "reward": "exact"}
    needs: dict[str, dict[str, Any]] = {"distill": {"teacher": "base"}}
    usual = [
        {**sampled, "algorithm": {"type": algorithm, **needs.get(algorithm, {})}, **environment}
        for algorithm in SAMPLED
        for environment in ({}, {"environment": "retry"}, {"environment": {"name": "agent"}})
    ]
    usual += [{"name": "a", "data": "rows.jsonl", "algorithm": algorithm} for algorithm in LEARNED]
    assert len(usual) > 20
    for tree in usual:
        check_step(JobConfig.model_validate(tree), LEAST, min(longest, CONTEXT[base]), CONTEXT[base])


def test_no_example_is_refused_on_the_bases_that_are_here() -> None:
    """Other examples are for a larger base, on a card."""
    runs = [run for file in sorted(EXAMPLES.glob("*.yaml")) if (run := load_jobs(file)).base in CONTEXT]
    assert len(runs) > 12
    for run in runs:
        for config in run.jobs:
            check_step(config, LEAST, 1024, CONTEXT[run.base])


MB = 2**20
NONE = np.zeros(0, np.int64)


@pytest.mark.parametrize(
    ("config", "sizes", "held_out", "told"),
    [
        (
            of_algorithm(groups_per_step=1500),
            [900_000] * 4,
            [],
            "algorithm.groups_per_step is 1500, and .* set it to 74,",
        ),
        (of_algorithm(groups_per_step=8), [MB], [], ""),
        (
            of_algorithm(groups_per_step=8, max_off_policy_steps=15),
            [MB, 10],
            [],
            "groups_per_step is 8, .* set it to 7,",
        ),
        (
            of_algorithm(groups_per_step=2, max_off_policy_steps=63),
            [2 * MB],
            [],
            "lower algorithm.max_off_policy_steps",
        ),
        (
            of_algorithm(groups_per_step=8192, max_off_policy_steps=60),
            [50],
            [],
            "groups_per_step is 8192, .* set it to 537,",
        ),
        (
            rows("sft", algorithm={"type": "sft", "rows_per_step": 131_072}),
            [40] * 9,
            [],
            "rows_per_step is .* set it to 32768,",
        ),
        (rows("sft", algorithm={"type": "sft", "rows_per_step": 32_768}), [40] * 9, [40], ""),
        (job(), [40], [900_000] * 292, "data.holdout is 292, .* set it to 74,"),
    ],
)
def test_rows_that_are_in_memory_at_once_have_a_limit(
    config: JobConfig, sizes: list[int], held_out: list[int], told: str
) -> None:
    given = np.array(sizes), np.array(held_out, np.int64)
    with pytest.raises(LimitError, match=told) if told else contextlib.nullcontext():
        check_decoded(config, *given)


def test_the_number_of_rows_that_is_named_fits() -> None:
    sizes = np.array([3 * MB, MB])
    for n, fits in ((32, True), (33, False)):
        with contextlib.nullcontext() if fits else pytest.raises(LimitError, match="set it to 32,"):
            check_decoded(of_algorithm(groups_per_step=n), sizes, NONE)
        assert (sum([3 * MB, MB][i % 2] for i in range(n)) <= MOST_BYTES) == fits
