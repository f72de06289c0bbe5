"""How many tokens a step may have: what counts, what fits, and that nothing usual is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.config import OF_CLIENT, JobConfig
from motet.config.jobfile import load_jobs
from motet.config.step_tokens import check_command, tokens_of_step
from motet.core.errors import LimitError
from motet.hosting.base_speed import LEAST

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
    # prompts of 7 tokens: 4 that are read, 4 · 8 answers of 10, and as many samples of 17 that are trained
    "rollouts": (job(), 4 * (7 + 80) + 32 * 17, 5 * (7 + 20)),
    "several turns": (job(environment="retry"), 4 * (7 + 160) + 32 * 27, 5 * (7 + 40)),
    "turns that are as long as the base's longest sequence": (
        job(environment={"name": "agent", "max_turns": 20}), 4 * (7 + 8 * 93) + 32 * 100, 5 * (7 + 2 * 93),
    ),
    "more problems than are trained": (of_algorithm(oversampling=2), 8 * (7 + 80) + 32 * 17, 5 * 27),
    "more groups than are waited for": (of_algorithm(over_provision=1.5), 6 * (7 + 80) + 32 * 17, 5 * 27),
    "several updates": (of_algorithm(updates_per_batch=3), 4 * (7 + 80) + 3 * 32 * 17, 5 * 27),
    "a critic": (of_algorithm(type="ppo", critic={}), 4 * (7 + 80) + 2 * 32 * 17, 5 * 27),
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
    found = tokens_of_step(config, longest=7, context=100, held_out=5)
    assert (found.trained, found.evaluated) == (trained, evaluated)


def test_less_is_known_before_data_is_read() -> None:
    assert tokens_of_step(job(), held_out=5).total == tokens_of_step(job(), 7, 100, 5).total - 4 * 7 - 32 * 7 - 5 * 7
    assert tokens_of_step(rows("sft")).total == 6 + 5


@pytest.mark.parametrize("config", [job(), rows("sft"), of_algorithm(updates_per_batch=3)])
def test_the_number_that_a_refusal_names_fits_and_no_larger_one(config: JobConfig) -> None:
    found = tokens_of_step(config, 7, 100)
    found.check(found.total)
    with pytest.raises(LimitError, match="motet tenants limit --step-tokens") as error:
        found.check(found.total - 1)
    assert f"up to {found.total} tokens, {found.evaluated} of these in its evaluation" in str(error.value)
    fits = int(str(error.value).split(f"algorithm.{found.field}: ")[1].split()[0])

    def lowered(units: int) -> int:
        tree = config.model_dump(exclude_unset=True)
        tree["algorithm"] = {**tree["algorithm"], "type": config.algorithm.type, found.field: units}
        return tokens_of_step(JobConfig.model_validate(tree), 7, 100).total

    assert lowered(fits) <= found.total - 1 < lowered(fits + 1)
    lower = (
        r"lower data\.holdout, or an" if found.field == "rows_per_step" else r"lower data\.holdout, eval\.n or sampling"
    )
    with pytest.raises(LimitError, match=lower):
        found.check(found.evaluated - 1)


def test_a_clients_gradients_count_together_until_its_step() -> None:
    assert not check_command(60, 40, 100)
    assert "call optim_step before it" in check_command(61, 40, 100)
    assert "send at most 100" in check_command(101, 0, 100)


def test_no_default_job_and_no_example_is_refused_on_the_bases_that_are_here() -> None:
    """Their prompts and rows have less than 512 tokens. Other examples are for a larger base, on a card."""
    runs = [run for file in sorted(EXAMPLES.glob("*.yaml")) if (run := load_jobs(file)).base in CONTEXT]
    assert len(runs) > 12
    jobs = [(one, CONTEXT[run.base]) for run in runs for one in run.jobs]
    usual = [JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": "exact"})]
    usual += [
        JobConfig.model_validate({"name": "a", "data": "rows.jsonl", "algorithm": kind})
        for kind in ("sft", "dpo", "kto")
    ]
    for one, context in [*jobs, *((one, context) for one in usual for context in CONTEXT.values())]:
        tokens_of_step(one, min(512, context), context).check(LEAST)
