"""Jobs that began under earlier rules are told what is done otherwise now, if it concerns them, and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig, JobConfig
from motet.config.jobfile import validate
from motet.core.errors import DataError
from motet.core.model_info import ModelInfo
from motet.core.rules import NEWEST, Rules
from motet.core.types import Message, Problem
from motet.hosting.launch import load
from motet.hosting.running import run_config
from motet.runtime.beginning import changes_for
from motet.tasks.chat import Chat
from motet.tasks.dataset import load_dataset
from motet.tasks.reward_answers import Answer, TrainerState
from motet.tasks.reward_forms import Asked, adapted
from tests.support.chat_templates import tokenizer_of


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED, SAID, SPACED = said("user", "q"), said("assistant", "ok"), said("assistant", " b \n")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "t"}
RESULT = {"role": "tool", "name": "f", "content": "r"}
PARTS, TURNS, TESTS = "thoughts, tool calls and their results", "turns are learned", "tests as JSON"
BEFORE = Rules(0)
EXACT = {"reward": "exact"}
MINE = {"reward": {"name": "code", "args": {"column": "mine"}}}


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return load("small", EngineConfig(threads=1)).info


@pytest.mark.parametrize(
    ("base", "row", "job", "told"),
    [
        ("gemma", {"prompt": [ASKED, CALL, RESULT]}, EXACT, [PARTS]),
        ("qwen3", {"prompt": [ASKED, THOUGHT, ASKED]}, EXACT, [PARTS]),
        ("mistral", {"prompt": [ASKED, RESULT]}, EXACT, [PARTS]),
        ("qwen3", {"prompt": [ASKED, SPACED, ASKED]}, EXACT, []),
        ("chatml", {"prompt": "q"}, {**EXACT, "environment": "sandbox"}, [PARTS]),
        ("chatml", {"prompt": "q"}, {**EXACT, "environment": "retry"}, []),
        ("chatml", {"messages": [ASKED, THOUGHT]}, {"algorithm": "sft"}, [PARTS]),
        ("llama3", {"messages": [ASKED, SPACED, ASKED, SAID]}, {"algorithm": "sft"}, [TURNS]),
        ("llama3", {"messages": [ASKED, SAID, said("user", " c "), SAID]}, {"algorithm": "sft"}, []),
        ("llama3", {"prompt": [ASKED, SPACED, ASKED], "chosen": "a", "rejected": "b"}, {"algorithm": "dpo"}, []),
        ("chatml", {"prompt": "q", "tests": ["assert a", "[1]"]}, {"reward": "code"}, []),
        ("chatml", {"prompt": "q", "tests": "assert a"}, {"reward": "code"}, []),
        ("chatml", {"prompt": "q", "tests": '["assert a"]'}, {"reward": "code"}, [TESTS]),
        ("chatml", {"prompt": "q", "tests": '["assert a"]'}, EXACT, []),
        ("chatml", {"prompt": "q", "mine": [{"input": None, "output": "a"}]}, MINE, [TESTS]),
        ("chatml", {"prompt": "q", "tests": [{"input": "a", "output": "a"}, {"output": None}]}, {"reward": "code"}, [TESTS]),
    ],
)  # fmt: skip
def test_what_is_done_otherwise_is_told_to_jobs_of_before(
    info: ModelInfo, base: str, row: dict[str, Any], job: dict[str, Any], told: list[str]
) -> None:
    config = JobConfig.model_validate({"name": "a", "data": {"source": [row], "holdout": 0}, **job})
    chat, data = Chat(tokenizer_of(base)), load_dataset(config.data, rules=BEFORE)
    changes = changes_for(BEFORE, info, config, chat, data)
    assert [any(change.startswith(one) for one in told) for change in changes] == [True] * len(told)
    assert not changes_for(Rules(NEWEST), info, config, chat, data)


@pytest.mark.parametrize("thought", [5, ["x"], {"a": 1}, "\ud83d"])
def test_thoughts_that_are_none_stop_no_job_of_before(thought: Any) -> None:
    turn = {**said("assistant", "a"), "thinking": thought}
    for row in ({"prompt": [ASKED, turn, ASKED]}, {"prompt": "q", "chosen": [turn], "rejected": "b"}):
        algorithm = {"algorithm": "dpo"} if "chosen" in row else EXACT
        config = JobConfig.model_validate({"name": "a", "data": {"source": [row], "holdout": 0}, **algorithm})
        (problem,) = load_dataset(config.data, rules=BEFORE).train
        assert not any(message.thought for message in problem.messages)
        assert "thinking" not in json.dumps(problem.metadata)
    with pytest.raises(DataError):
        load_dataset(JobConfig.model_validate({"name": "a", "data": [{"prompt": [ASKED, turn, ASKED]}], **EXACT}).data)


def test_a_reward_of_before_keeps_the_defaults_of_its_parameters() -> None:
    def reward(problem: Problem, completion: str, calls: Any = 3, speech: str = "mine") -> float:
        return float(len(speech) + 10 * (calls == 3))

    problem, call = Problem(0, (Message("user", "q"),), "", {}), adapted(reward, {}, "reward").call
    assert call(Asked(problem, [Answer("an answer")])) == 14
    assert call(Asked(problem, [Answer("an answer")], TrainerState())) == 9


REWARDS = """
def named(completions, trainer_state, **columns):
    return [len(text) / trainer_state.max_steps for text in completions]

def among_others(completions, **others):
    return [len(text) / others["trainer_state"].max_steps for text in completions]

def of_texts(completions, **columns):
    return [float(len(text)) for text in completions]
"""


def test_a_reward_that_reads_the_number_of_steps_is_told_when_it_grows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    for steps, grown in ((1, False), (1, False), (2, True), (3, True)):
        jobs = [
            {
                "name": name, "data": {"source": "toy:add", "size": 8, "holdout": 0}, "reward": f"{tmp_path}/mine.py:{name}",
                "steps": steps, "sampling": {"max_tokens": 3}, "algorithm": {"group_size": 2, "groups_per_step": 1},
            }
            for name in ("named", "among_others", "of_texts")
        ]  # fmt: skip
        config = validate({"base": "small", "run": str(tmp_path / "run"), "engine": {"threads": 1}, "jobs": jobs}, "x")
        done = run_config(config).jobs
        told = {name: sum("trainer_state" in one for one in job.inexact) for name, job in done.items()}
        assert told == {"named": int(grown), "among_others": int(grown), "of_texts": 0}, steps
