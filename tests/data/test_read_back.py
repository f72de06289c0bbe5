"""Turns that rows teach are read back by the base's own reader, and what differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.chat.template import Chat
from motet.chat.template_variables import tools_of
from motet.config import DataConfig
from motet.core.errors import DataError, RewardError
from motet.data.dataset import load_dataset
from motet.data.read_back import read_back
from motet.data.rows import row_of
from motet.rewards.reward_forms import adapted
from tests.support.scripted_model import CHATML, byte_tokenizer
from tests.support.speaking_bases import SPEAKERS

ASKED = {"role": "user", "content": "1 + 2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def told(base: str, row: dict[str, Any], kind: str = "answer", **data: Any) -> str:
    tokenizer = SPEAKERS[base].tokenizer() if base else byte_tokenizer(CHATML)
    config = DataConfig.model_validate({"source": [row] * 3, "holdout": 0, **data})
    chat, rows = Chat.of(tokenizer, config), load_dataset(config).train
    assert row_of(rows[0], kind, chat, "data").examples
    return read_back(chat, rows, kind)


def answered(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": content, **fields}]}


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("base", "row", "words"),
    [
        ("gpt_oss", answered("<think>\nx\n</think>\n\n3"), ["<think> is learned as a text", "in channels", "3 of the first 3"]),
        ("magistral", answered("<think>\nx\n</think>\n\n3"), ["<think> is learned as a text", "[THINK]"]),
        ("llama3", answered(HERMES), ["<tool_call> is learned as a text", "llama3_json", "tool_calls"]),
        ("qwen3", answered("[TOOL_CALLS]add[ARGS]{}"), ["[TOOL_CALLS] is learned as a text"]),
        ("qwen3", answered(HERMES), ["<tool_call> is learned as a text", "tools"]),
        ("qwen25", answered("3", reasoning_content="x"), ["a thought (reasoning_content) is not learned", "data.thoughts"]),
        ("", answered("3", reasoning="x"), ["a thought (reasoning_content) is not learned"]),
        ("qwen25", answered("", tool_calls=[CALL]), ["a call is not read", "give the row's tools"]),
        ("llama3", answered("", tool_calls=[CALL]), ["a call is not read", "give the row's tools"]),
    ],
)  # fmt: skip
def test_what_is_learned_otherwise_is_told(base: str, row: dict[str, Any], words: list[str]) -> None:
    note = told(base, row)
    assert all(word in note for word in words), note
    assert "such as row 1" in note


@pytest.mark.parametrize(
    ("base", "row"),
    [
        *((base, answered("It is 3.\n\n`a` <b>")) for base in SPEAKERS),
        ("qwen3", answered("<think>\nx\n</think>\n\n3")),
        ("qwen3", answered("3", reasoning_content="x")),
        ("qwen35", answered("3", reasoning_content="x")),
        ("gpt_oss", answered("3", reasoning_content="x")),
        *((base, {**answered("", tool_calls=[CALL]), "tools": [ADD]}) for base in SPEAKERS),
        ("qwen3", {**answered(HERMES), "tools": [ADD]}),
    ],
)
def test_what_is_read_as_the_row_says_is_not_told(base: str, row: dict[str, Any]) -> None:
    assert told(base, row) == ""


def test_pairs_and_plain_prompts_are_read_back_too() -> None:
    pair = {"prompt": [ASKED], "chosen": "<think>x</think>3", "rejected": "3"}
    assert "<think> is learned" in told("gpt_oss", pair, "pair")
    assert "<think> is learned" in told("", {"prompt": "a", "completion": "<think>x</think>3"}, chat_template=False)
    assert told("", {"prompt": "a", "completion": "3"}, chat_template=False) == ""


def test_a_greeting_that_nothing_asks_for_is_read_and_not_learned() -> None:
    system, greeting = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Hello!"}
    row = {"messages": [system, greeting, ASKED, {"role": "assistant", "content": "3"}]}
    config = DataConfig.model_validate({"source": [row], "holdout": 0})
    chat = Chat.of(byte_tokenizer(CHATML), config)
    (example,) = row_of(load_dataset(config).train[0], "answer", chat, "data").examples
    learned = chat.tokenizer.decode(example.token_ids[example.loss_mask])
    assert learned.strip() == "3<|im_end|>"
    assert "Hello!" in chat.tokenizer.decode(example.token_ids)


BARE = {"name": "add", "description": "Add.", "parameters": {"a": {"description": "", "type": "int"},
        "b": {"type": "List[str], optional"}, "c": {"type": "str", "default": "x"}}}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_tools_are_read_in_the_forms_that_data_has() -> None:
    bare = {"name": "add", "parameters": SCHEMA}
    wanted = {"type": "function", "function": {"description": "", **bare}}
    for row in ({"tools": [bare]}, {"tools": json.dumps([bare])}, {"tools": [json.dumps(bare)]}, {"functions": [bare]}):
        assert tools_of(row) == [wanted]
    (tool,) = tools_of({"tools": [BARE]})
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"description": "", "type": "integer"},
            "b": {"type": "array"},
            "c": {"type": "string", "default": "x"},
        },
        "required": ["a"],
    }
    assert tools_of({"tools": [ADD]}) == [ADD]
    assert tools_of({"functions": "def f(): pass"}) == tools_of({"functions": [3]}) == []


@pytest.mark.parametrize("base", ["qwen3", "llama3", "gpt_oss", "glm", "magistral"])
@pytest.mark.parametrize("form", ["old", "sharegpt", "bare"])
def test_calls_of_other_forms_are_learned_as_the_base_calls(base: str, form: str) -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    result, bare = {"role": "function", "name": "add", "content": "3"}, {"name": "add", "parameters": SCHEMA}
    said = {"role": "assistant", "content": "It is 3."}
    rows: dict[str, dict[str, Any]] = {
        "old": {
            "messages": [ASKED, {"role": "assistant", "content": None, "function_call": call}, result, said],
            "functions": [bare],
        },
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": "1 + 2?"},
                {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "It is 3."},
            ],
            "tools": json.dumps([bare]),
        },
        "bare": {"messages": [ASKED, {**said, "content": "", "tool_calls": [call]}], "tools": [bare]},
    }
    assert told(base, rows[form]) == ""


def note_of(row: dict[str, Any], **data: Any) -> tuple[str, str]:
    read = load_dataset(DataConfig.model_validate({"source": [row] * 3, "holdout": 0, **data}))
    return " ".join(read.notes), read.columns


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"reasoning": "Since"}, ["nothing learns the column 'reasoning'", "reasoning_content"]),
        ({"cot": "Since"}, ["nothing learns the column 'cot'"]),
        ({"system_prompt": "Be brief."}, ["no prompt has the column 'system_prompt'", "data.system"]),
        ({"system": "Be brief."}, ["no prompt has the column 'system'"]),
        ({"final_answer": "3"}, ["the answers are the column 'answer'", "data.answer to final_answer"]),
    ],
)
def test_a_column_that_may_be_meant_for_the_model_is_noted(row: dict[str, Any], words: list[str]) -> None:
    notes, columns = note_of({"prompt": "1 + 2?", "answer": "3", **row})
    assert all(word in notes for word in words), notes
    assert columns.endswith(f"read by own rewards and environments alone: {next(iter(row))}")


def test_columns_of_texts_that_are_read_are_not_named() -> None:
    notes, columns = note_of({"prompt": "1 + 2?", "answer": "3", "level": "a", "n": 3, "none": None, "empty": " "})
    assert (notes, columns) == (
        "",
        "prompt = prompt, answer = answer, read by own rewards and environments alone: level",
    )
    for data in (
        {"order": "level"},
        {"pools": {"column": "level", "weights": {"a": 1}}},
        {"template": "{prompt} {level}"},
    ):
        assert "alone" not in note_of({"prompt": "1 + 2?", "answer": "3", "level": "a"}, **data)[1]
    alpaca = {"instruction": "a", "input": "b", "output": "c", "system": "d"}
    assert note_of(alpaca)[0] == ""
    assert "alone" not in note_of({"solution": "long", "prompt": "a", "reward_model": {"ground_truth": "3"}})[1]


def test_lists_of_texts_are_variables_of_a_row() -> None:
    """As SmolTalk2 has them."""
    row = {"messages": [ASKED, {"role": "assistant", "content": "3"}],
           "chat_template_kwargs": {"python_tools": ["def f(): ..."], "xml_tools": [], "enable_thinking": False}}  # fmt: skip
    assert told("qwen3", row) == ""


def test_a_split_that_a_saved_set_lacks_is_named(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "a", "answer": "b"}] * 3)
    datasets.DatasetDict(first=rows, other=rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"no split 'train';.*one in data\.split"):
        load_dataset(DataConfig(source=str(tmp_path / "saved"), holdout=0))


def test_a_function_of_its_own_form_cannot_ask_for_the_state_of_trl() -> None:
    def reward(problem: Any, completion: str, trainer_state: Any = None) -> float:
        return 0.0

    with pytest.raises(RewardError, match=r"takes trainer_state,.*of TRL's form get"):
        adapted(reward, {}, "mine")
    assert adapted(reward, {"trainer_state": 1}, "mine")
