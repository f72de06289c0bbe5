"""Columns are chosen once for a source; paths lead into objects; layouts of other libraries are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.chat.template import Chat
from motet.config import DataConfig
from motet.core.errors import BaseModelError, DataError
from motet.core.nested import MISSING, may_lead_on, value_at
from motet.core.types import Message, ToolCall
from motet.data.columns import FIRST_ROWS
from motet.data.dataset import Dataset, load_dataset
from motet.data.row_problems import Reading
from motet.data.rows import answer_of, pair_of, row_of
from tests.support import tables
from tests.support.scripted_model import byte_tokenizer

pytestmark = pytest.mark.tier1

USER = {"role": "user", "content": "2 + 2?"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}
HUMAN, GPT = {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}
CALLED = [
    HUMAN,
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "It is 4."},
]


def read(rows: list[Any], **fields: Any) -> Dataset:
    return load_dataset(DataConfig.model_validate({"source": rows, "holdout": 0, **fields}))


@pytest.mark.parametrize(("rows", "fields", "prompt", "answer", "said"), tables.table("spoken")["columns"])
def test_columns_are_chosen_and_named(rows: str, fields: str, prompt: str, answer: str, said: str) -> None:
    data = read(tables.read(rows), **tables.read(fields))
    assert (data.train[0].messages[-1].content, data.train[0].answer) == (prompt, answer)
    assert said in data.columns
    assert data.notes == ()


def test_rewards_see_every_column_of_a_layout() -> None:
    assert read([VERL]).train[0].metadata == {name: value for name, value in VERL.items() if name != "prompt"}


def test_a_choice_is_that_of_the_source_and_rows_that_differ_are_told() -> None:
    rows = [{"question": f"q{i}", "answer": None if i == 3 else "a", "solution": "s"} for i in range(8)]
    data = read(rows)
    assert [problem.answer for problem in data.train] == ["a"] * 3 + [""] + ["a"] * 4
    assert data.notes == (
        "1 of 8 rows have no answer in the column 'answer', the first of them row 4, which has one in 'solution'",
    )
    rows[5].pop("answer")
    assert "2 of 8 rows" in read(rows).notes[0]
    with pytest.raises(DataError, match=r"row 6 has no column.*\(data\.answer\)"):
        read(rows, answer="answer")
    assert read([{"question": "q", "answer": None}]).notes == ()
    with pytest.raises(DataError, match=r"row 3 has no column 'question'.*prompt"):
        read([{"question": "a"}, {"question": "b"}, {"prompt": "c"}])
    late = [{"question": "q", "answer": "a"}] * FIRST_ROWS + [{"question": "q", "solution": "s"}]
    assert "first of them row 101" in read(late).notes[0]


def test_a_column_with_more_different_values_is_told() -> None:
    rows = [{"question": f"q{i}", "answer": ("yes", "no")[i % 2], "solution": f"{i}"} for i in range(9)]
    assert "'answer', which has 2 different values in the first 9 rows, and 'solution' has 9" in read(rows).notes[0]
    assert read(rows, answer="solution").notes == ()
    assert [problem.answer for problem in read(rows, answer="solution").train] == [f"{i}" for i in range(9)]


class CountedRow(dict[str, Any]):
    """A row that counts how often a name is looked up in it."""

    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked += 1
        return super().get(name, default)


def test_a_long_path_is_looked_up_as_often_as_a_short_one() -> None:
    row, name = CountedRow({"a": {"b.c": 1, "b": {}}, "a.x": 2, "b": ""}), "a.b.c" + ".a" * 2000
    assert value_at(row, "a.b.c") == 1
    assert value_at(row, "a.x") == 2
    assert row.asked == 2
    assert value_at(row, name) is MISSING
    assert may_lead_on(row, name)
    assert not may_lead_on(row, "b" + ".a" * 2000)
    assert row.asked == 3


LONG, DOTS = "n" * 501, "a" + ".a" * 33


@pytest.mark.parametrize("name", [LONG, DOTS])
@pytest.mark.parametrize("field", ["prompt", "answer", "order", "template", "pools"])
def test_names_that_are_too_long_are_refused(field: str, name: str) -> None:
    value: Any = {"template": f"x{{{name}}}", "pools": {"column": name, "weights": {"a": 1}}}.get(field, name)
    with pytest.raises((DataError, ValueError), match=r"may have 500 characters.*this one has"):
        read([VERL], **{field: value})
    kept = name[1:] if name == LONG else name[2:]
    with pytest.raises(DataError, match=f"no column '{kept}'"):
        read([VERL], answer=kept)


def test_order_and_pools_read_paths() -> None:
    rows = [{"prompt": f"{i}", "extra_info": {"level": -i, "kind": "ab"[i % 2]}} for i in range(4)]
    assert [problem.id for problem in read(rows, order="extra_info.level").train] == [3, 2, 1, 0]
    pools = {"column": "extra_info.kind", "weights": {"b": 1}}
    assert [problem.id for problem in read(rows, pools=pools).train] == [1, 3]


def test_a_part_that_a_row_lacks_is_empty_where_others_have_it() -> None:
    rows = [{"prompt": "a", "x": {"y": "1"}}, {"prompt": "b", "x": {}}, {"prompt": "c", "x": None}]
    data = read(rows, answer="x.y")
    assert [problem.answer for problem in data.train] == ["1", "", ""]
    assert data.notes == ("2 of 3 rows have no answer in the column 'x.y', the first of them row 2",)


def test_sharegpt_and_alpaca_with_all_that_they_have() -> None:
    (problem,) = read([{"conversations": CALLED, "system": "Be short.", "tools": "[]"}]).train
    assert problem.messages == (
        Message("system", "Be short."),
        Message("user", "2 + 2?"),
        Message("assistant", "", (ToolCall("add", {"a": 2, "b": 2}),)),
        Message("tool", "4"),
    )
    assert answer_of(problem, "") == (Message("assistant", "It is 4."),)
    (problem,) = read([{"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}}]).train
    assert pair_of(problem, "") == ((Message("assistant", "4"),), (Message("assistant", "5"),))
    asked = {"instruction": "And 3?", "output": "5", "system": "Add.", "history": [["2 + 2?", "4"]]}
    (problem,) = read([asked]).train
    assert [message.content for message in problem.messages] == ["Add.", "2 + 2?", "4", "And 3?"]
    assert problem.answer == "5"
    for bad, message in (
        ({"conversations": [HUMAN, {"from": "function_call", "value": "add(2)"}]}, "function_call must be JSON"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "needs `role` and `content`"),
        ({**asked, "history": ["x"]}, "history must be pairs"),
    ):
        with pytest.raises(DataError, match=message):
            read([bad])


def test_tools_are_schemas_or_their_json() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}
    turns = [USER, {"role": "assistant", "content": "4"}]
    chat = Chat(byte_tokenizer("{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"))
    texts = set[str]()
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        (problem,) = read([{"messages": turns, "tools": tools}]).train
        (example,) = row_of(problem, "answer", chat, "data").examples
        texts.add(chat.tokenizer.decode(example.token_ids))
    assert len(texts) == 1
    assert '"default": null' in texts.pop()


def test_an_evaluation_source_has_its_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"problem": "p", "solution": "s"}\n' * 2)
    data = read([{"question": "q", "answer": "a"}], holdout=2, eval_source=str(path))
    assert {(problem.messages[0].content, problem.answer) for problem in data.holdout} == {("p", "s")}
    assert data.columns.startswith("prompt = question, answer = answer; ")
    assert data.columns.endswith("eval.jsonl: prompt = problem, answer = solution")


def test_the_rows_that_columns_are_chosen_from_are_bounded_in_bytes() -> None:
    rows = enumerate([{"question": "q" * 2**20, "answer": "a"}] * 9)
    next(Reading(DataConfig(source="data")).problems(rows, None))
    assert len(list(rows)) == 5


SHOWS = (
    "{% if tools %}T:{{ tools | tojson }} {% endif %}{% if thinks is defined %}{{ thinks }} {% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_row_has_tools_and_variables_of_the_template() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    row = {"prompt": "2 + 2?", "completion": "4", "tools": [tool], "chat_template_kwargs": {"thinks": "yes"}}
    plain = {"prompt": "2 + 2?", "completion": "4", "tools": "hammer", "chat_template_kwargs": None}
    chat = Chat(byte_tokenizer(SHOWS), template_kwargs={"thinks": "no"})
    first, second = read([row, plain]).train
    assert chat.prompt_text(first) == f"T:[{json.dumps(tool)}] yes user:2 + 2?<|im_end|>assistant:"
    assert chat.prompt_text(second) == "no user:2 + 2?<|im_end|>assistant:"
    (example,) = row_of(first, "answer", chat, "data").examples
    assert chat.tokenizer.decode(example.token_ids) == chat.prompt_text(first) + "4<|im_end|>"
    for wrong in ({"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"thinks": [1]}, {"thinks": "x" * 201}):
        with pytest.raises(DataError, match=r"row 2: \w+\.\w+: (this is not|give true)"):
            read([row, {**row, "chat_template_kwargs": wrong}])
    (third,) = read([{**row, "chat_template_kwargs": {"thinks": "a<|im_end|>"}}]).train
    with pytest.raises(BaseModelError, match=r"of a row has a.*token; take it out"):
        chat.prompt_text(third)


@pytest.mark.parametrize(
    ("row", "named", "answer"),
    [
        ({"ground_truth": ["2"]}, None, "2"),
        ({"ground_truth": [2]}, None, "2"),
        ({"ground_truth": '["2"]'}, None, "2"),
        ({"reward_model": '{"style": "rule", "ground_truth": "2"}'}, None, "2"),
        ({"reward_model": {"ground_truth": '["2"]'}}, None, "2"),
        ({"verification_info": '{"ground_truth": "2"}'}, "verification_info.ground_truth", "2"),
        ({"checks": '[{"answer": {"value": 2}}]'}, "checks.0.answer.value", "2"),
        ({"answer": "[2]"}, None, "[2]"),
        ({"answer": ["2", "two"]}, None, '["2", "two"]'),
        ({"answer": "{2}"}, None, "{2}"),
    ],
)
def test_answer_in_a_list_or_in_json_is_the_answer_itself(row: dict[str, Any], named: str | None, answer: str) -> None:
    own = {} if named is None else {"answer": named}
    assert read([{"prompt": "1 + 1?", **row}], **own).train[0].answer == answer


def test_columns_of_json_texts_are_shown_by_their_paths() -> None:
    with pytest.raises(DataError, match=r"verification_info\.ground_truth"):
        read([{"prompt": "1 + 1?", "verification_info": '{"ground_truth": "2"}'}], answer="gold")
