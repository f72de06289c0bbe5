"""Who does what a hint says has a job that is no longer refused, and whose rewards are those that were meant."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from motet.config.jobfile import validate
from motet.core.errors import MotetError
from motet.data.shared import Sources
from motet.hosts.checks import check_run
from motet.rewards import reward_forms, reward_loading
from motet.rewards.reward_answers import AnswerContext, TrainerState, columns_of
from motet.rewards.reward_pool import RewardPool
from tests.support.hints import never_said

ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 2?", "answer": "4", "level": "easy"},
    {"prompt": "2 + 3?", "answer": "5", "level": "hard"},
    {"prompt": "2 + 4?", "answer": "6", "level": "hard"},
]
VERL: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": n},
    }
    for n, row in enumerate(ROWS)
]
SAYS = "def reward({}):\n    return {}\n"
COMPARES = "[float(a == b) for a, b in zip(completions, {})]"


@dataclass(frozen=True)
class Case:
    """A job that is refused, and the same job after its hint."""

    file: str
    """rewards.py, which has `reward`."""
    hint: str
    """What is said, as a pattern."""
    then: str = ""
    """rewards.py as the hint has it; as before if empty."""
    job: Mapping[str, Any] = field(default_factory=dict)
    then_job: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the hint changes."""
    scores: tuple[float, ...] = (1.0, 0.0)
    """Of the answers 4 and 5 to the first row."""


def case(before: tuple[str, str], hint: str, after: tuple[str, str] | None = None, **fields: Any) -> Case:
    """Parameters and the value that is returned, before and after."""
    return Case(SAYS.format(*before), hint, SAYS.format(*after) if after else "", **fields)


EQUAL = "float(completion == problem.answer)"
SUMS = ("solution_str, ground_truth, data_source", "float(solution_str == ground_truth)")
CASES: dict[str, Case] = {
    "tokens": case(
        ("completions, completion_ids", "[float(len(ids) == 1) for ids in completion_ids]"),
        r"requires completion_ids, and rewards get text, not tokens: leave the parameter out and measure the text, such as "
        r"len\(completion.split\(\)\)",
        ("completions, **columns", "[float(len(completion.split()) == 1) for completion in completions]"),
        scores=(1.0, 1.0),
    ),
    "column of TRL": case(
        ("completions, solution", COMPARES.format("solution")),
        r"asks for the column 'solution', and not every row has one \(columns of all rows: answer, level\): name the "
        "parameter as its column is named, or add the column to the data",
        ("completions, answer", COMPARES.format("answer")),
    ),
    "column that some rows lack": case(
        ("completions, hint", COMPARES.format("hint")),
        r"asks for the column 'hint', and not every row has one .*or add the column to the data",
        job={"data": {"source": [{**ROWS[0], "hint": "4"}, *ROWS[1:]], "holdout": 0}},
        then_job={"data": {"source": [{**row, "hint": row["answer"]} for row in ROWS], "holdout": 0}},
    ),
    "answer in our form": case(
        ("problem, completion, answer", "float(completion == answer)"),
        "takes answer, which differs by row: leave the parameter out, and read problem.answer in the function",
        ("problem, completion", "float(completion == problem.answer)"),
    ),
    "a column in our form": case(
        ("problem, completion, level", "float(level == 'easy') * float(completion == '4')"),
        r"takes level, which differs by row: leave the parameter out, and read problem.metadata\['level'\] in the function",
        ("problem, completion", "float(problem.metadata['level'] == 'easy') * float(completion == '4')"),
    ),
    "an argument": case(
        ("problem, completion, bonus", "float(completion == problem.answer) + bonus"),
        r"needs args that the job does not give: write \{name: rewards.py:reward, args: \{bonus: …\}\}",
        then_job={"reward": {"name": "rewards.py:reward", "args": {"bonus": 2}}},
        scores=(3.0, 2.0),
    ),
    "a wrong argument": case(
        ("problem, completion, bonus=0", "float(completion == problem.answer) + bonus"),
        "has no argument 'bonis'; did you mean 'bonus'",
        job={"reward": {"name": "rewards.py:reward", "args": {"bonis": 1}}},
        then_job={"reward": {"name": "rewards.py:reward", "args": {"bonus": 1}}},
        scores=(2.0, 1.0),
    ),
    "the form": case(
        ("completion", "float(completion == '4')"),
        r"takes completion first; write def reward\(problem, completion\), or TRL's def reward\(completions, \*\*columns\)",
        ("problem, completion", "float(completion == '4')"),
    ),
    "the form, as TRL's": case(
        ("completion", "float(completion == '4')"),
        r"or TRL's def reward\(completions, \*\*columns\)",
        ("completions, **columns", "[float(one == '4') for one in completions]"),
    ),
    "no function": Case(
        "reward = 3\n", "'rewards.py:reward' is int, not a function", SAYS.format("problem, completion", EQUAL)
    ),
    "the problem second": case(
        ("answer, problem", "float(answer == problem.answer)"),
        r"takes problem second; write def reward\(problem, completion\)",
        ("problem, completion", EQUAL),
    ),
    "one truth for all rows": case(
        SUMS,
        "'rewards.py:reward': each row has its own ground_truth: take it out of args",
        job={
            "data": {"source": VERL, "holdout": 0},
            "reward": {"name": "rewards.py:reward", "args": {"ground_truth": "4"}},
        },
        then_job={"reward": "rewards.py:reward"},
    ),
    "no truth": case(
        SUMS,
        "asks for the column 'ground_truth', .*: name the column with the reference answers in data.answer",
        job={
            "data": {"source": [{"prompt": row["prompt"], "right": row["answer"], "data_source": "x"} for row in ROWS]}
        },
        then_job={"data": {"answer": "right", "holdout": 0}},
    ),
    "no data source": case(
        SUMS,
        r"asks for the column 'data_source', and not every row has one \(columns of all rows: answer, level\): add it to "
        "the data",
        job={"data": {"source": ROWS, "holdout": 0}},
        then_job={"data": {"source": [{**row, "data_source": "sums"} for row in ROWS], "holdout": 0}},
    ),
    "a part of verl": case(
        ("solution_str, ground_truth, reward_model_tokenizer", "1.0"),
        "requires reward_model_tokenizer, which is a part of verl: leave the parameter out. To ask a model, take the reward "
        "`judge`",
        ("solution_str, ground_truth", "float(solution_str == ground_truth)"),
        job={"data": {"source": VERL, "holdout": 0}},
    ),
    "an argument of verl's function": case(
        ("solution_str, ground_truth, method", "float(solution_str == ground_truth and method == 'strict')"),
        r"needs args that the job does not give: write \{name: rewards.py:reward, args: \{method: …\}\}",
        job={"data": {"source": VERL, "holdout": 0}},
        then_job={"reward": {"name": "rewards.py:reward", "args": {"method": "strict"}}},
    ),
    "labels": case(
        ("queries, prompts, labels", "[float(q[len(p):] == label) for q, p, label in zip(queries, prompts, labels)]"),
        "asks for the column 'labels', .*: name the column with the reference answers in data.answer",
        job={"data": {"source": [{"prompt": row["prompt"], "right": row["answer"]} for row in ROWS]}},
        then_job={"data": {"answer": "right", "holdout": 0}},
    ),
    "the answer in verl's form": case(
        ("solution_str, answer", "float(solution_str == answer)"),
        "takes answer, which differs by row: call it ground_truth$",
        ("solution_str, ground_truth", "float(solution_str == ground_truth)"),
    ),
    "another answer in verl's form": case(
        ("solution_str, label", "float(solution_str == label)"),
        "takes label, which differs by row: call it ground_truth, and set data.answer to label",
        ("solution_str, ground_truth", "float(solution_str == ground_truth)"),
        job={"data": {"source": [{**row, "answer": "?", "label": row["answer"]} for row in ROWS], "holdout": 0}},
        then_job={"data": {"answer": "label", "holdout": 0}},
    ),
    "the answer twice in verl's form": case(
        ("solution_str, ground_truth, answer", "float(solution_str == answer)"),
        "takes answer, which differs by row: leave the parameter out, and read ground_truth, the reference answer",
        ("solution_str, ground_truth", "float(solution_str == ground_truth)"),
    ),
    "a column in verl's form": case(
        ("solution_str, level", "float(solution_str == '4' and level == 'easy')"),
        r"takes level, which differs by row: take TRL's form, def reward\(completions, level\)",
        ("completions, level", "[float(a == '4' and b == 'easy') for a, b in zip(completions, level)]"),
    ),
    "the answer in OpenRLHF's form": case(
        ("queries, prompts, answer", "[float(q[len(p):] == one) for q, p, one in zip(queries, prompts, answer)]"),
        "takes answer, which differs by row: call it labels$",
        ("queries, prompts, labels", "[float(q[len(p):] == one) for q, p, one in zip(queries, prompts, labels)]"),
    ),
    "labels in args": case(
        ("queries, prompts, labels", "[float(q[len(p):] == label) for q, p, label in zip(queries, prompts, labels)]"),
        "'rewards.py:reward': each row has its own labels: take them out of args",
        job={"reward": {"name": "rewards.py:reward", "args": {"labels": ["4"]}}},
        then_job={"reward": "rewards.py:reward"},
    ),
    "environments": case(
        ("completions, environments", "[1.0]"),
        r"takes environments, which are not where rewards run: leave it out. What the environment's get_reward\(\) returns "
        "counts without a reward, and self.reward where it has neither that nor step",
        ("completions, **columns", "[float(one == '4') for one in completions]"),
    ),
    "the state of TRL": case(
        ("problem, completion, trainer_state=None", "1.0"),
        r"takes trainer_state, which functions of TRL's form get, with completions; leave it out, or write def "
        r"reward\(completions, trainer_state, \*\*kwargs\)",
        ("completions, trainer_state=None, **kwargs", "[float(one == '4') for one in completions]"),
    ),
    "no answers": case(
        ("problem, completion", "1.0"),
        "reward 'exact' compares with a reference answer, .*; name its column in data.answer",
        job={
            "data": {"source": [{"prompt": row["prompt"], "right": row["answer"]} for row in ROWS]},
            "reward": "exact",
        },
        then_job={"data": {"answer": "right", "holdout": 0}},
    ),
    "no numbers": case(
        ("problem, completion", "1.0"),
        "reward 'numeric' compares numbers, and no answer of .* has one, such as 'four'; .* write them in digits",
        job={"data": {"source": [{"prompt": "2 + 2?", "answer": "four"}], "holdout": 0}, "reward": "numeric"},
        then_job={"data": {"source": [{"prompt": "2 + 2?", "answer": "4"}], "holdout": 0}},
    ),
    "no tests": case(
        ("problem, completion", "1.0"),
        r"no row of .* has tests in the column 'tests'; name theirs in args \(column: …; the columns: io\)",
        job={
            "data": {"source": [{"prompt": "print 4", "io": [{"input": "", "output": "4"}]}], "holdout": 0},
            "reward": "code",
        },
        then_job={"reward": {"name": "code", "args": {"column": "io"}, "wall_seconds": 100}},
        scores=(0.0, 0.0),
    ),
    "a part that answers lack": case(
        ("problem, completion", "1.0"),
        "of must be text, speech or thought, got 'answer'",
        job={"reward": {"name": "regex", "args": {"pattern": "4", "of": "answer"}}},
        then_job={"reward": {"name": "regex", "args": {"pattern": "4", "of": "speech"}}},
    ),
    "a scorer": case(
        ("problem, completion", "1.0"),
        "only reasoning-gym:NAME data has a scorer; name a reward, such as `exact`",
        job={"reward": "scorer"},
        then_job={"reward": "exact"},
    ),
    "a name": case(
        ("problem, completion", "1.0"),
        "there is no reward 'exakt': did you mean 'exact'",
        job={"reward": "exakt"},
        then_job={"reward": "exact"},
    ),
}


def config(job: Mapping[str, Any]) -> Any:
    """A run of one job."""
    return validate({"base": "small", "run": "runs/x", "jobs": [job]}, "test")


@pytest.mark.parametrize("name", CASES)
def test_who_follows_a_hint_has_the_reward_that_was_meant(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = CASES[name]
    monkeypatch.chdir(tmp_path)
    job: dict[str, Any] = {
        "name": "a",
        "data": {"source": ROWS, "holdout": 0},
        "reward": "rewards.py:reward",
        "steps": 1,
    }
    job |= one.job
    Path("rewards.py").write_text(one.file)
    with pytest.raises(MotetError) as refused:
        check_run(config(job))
    assert re.search(one.hint, str(refused.value)), str(refused.value)

    Path("rewards.py").write_text(one.then or one.file)
    data = {**job["data"], **one.then_job.get("data", {})}
    checked = config({**job, **one.then_job, "data": data})
    check_run(checked)
    assert asyncio.run(scored(checked.jobs[0])) == list(one.scores)


def test_each_hint_about_a_reward_is_followed() -> None:
    """A hint that comes to these modules has a case above."""
    followed = [re.sub(r"\\(.)", r"\1", one.hint) for one in CASES.values()]
    later = {"it asks for the column", "; the data's columns are"}  # in a rollout, where columns were not known before
    for module in (reward_forms, reward_loading):
        assert set(never_said(module, followed)) <= later


async def scored(job: Any) -> list[float]:
    """Scores of two answers to the job's first row."""
    rows = Sources().split(job.data).train
    problem = next(row for row in rows if row.id == 0)
    shown = AnswerContext(shown=lambda: [("?", "?4"), ("?", "?5")], state=TrainerState.at(0, 1, 1, 3))
    pool = RewardPool(1)
    try:
        await pool.register("a", job.rewards, columns=columns_of(rows))
        outcomes = await pool.score("a", problem, ["4", "5"], shown)
    finally:
        await pool.close()
    assert [one.error for one in outcomes] == ["", ""]
    return [one.reward for one in outcomes]
