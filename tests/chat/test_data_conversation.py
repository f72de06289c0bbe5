"""What is trained of a row is what the chat template writes, for bases that write headers, thoughts and ends of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from motet.chat.conversation import examples_of
from motet.chat.template import Chat, Tools
from motet.config import DataConfig
from motet.core.errors import DataError
from motet.core.types import Message, ToolCall
from motet.data.dataset import load_dataset
from motet.data.rows import row_of
from tests.support.chat_templates import BASES, tokenizer_of

pytestmark = pytest.mark.tier1

ASKED = {"role": "user", "content": "One?"}
TALK = [
    ASKED,
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei."},
]
LEARNED = {
    "chatml": ["Eins.<|im_end|>", "Zwei.<|im_end|>"],
    "gpt-oss": ["<|channel|>final<|message|>Eins.<|end|>", "<|channel|>final<|message|>Zwei.<|return|>"],
    "qwen3": ["<think>\n\n</think>\n\nEins.<|im_end|>", "<think>\n\n</think>\n\nZwei.<|im_end|>"],
    "qwen3.5": ["\n</think>\n\nEins.<|im_end|>", "\n</think>\n\nZwei.<|im_end|>"],
    "llama3": ["Eins.<|eot_id|>", "Zwei.<|eot_id|>"],
    "mistral": ["Eins.</s>", "Zwei.</s>"],
    "gemma": ["Eins.<end_of_turn>", "Zwei.<end_of_turn>"],
    "glm": ["\n<think></think>\nEins.<|user|>", "\n<think></think>\nZwei.<|user|>"],
}


def learned(
    row: dict[str, Any], base: str, kind: str = "answer", **data: Any
) -> tuple[Any, list[str], list[list[int]]]:
    """The tokenizer, the trained texts, and the ids of the examples of a row."""
    tokenizer = tokenizer_of(base)
    config = DataConfig.model_validate({"source": [row], "holdout": 0} | data)
    examples = row_of(load_dataset(config).train[0], kind, Chat.of(tokenizer, config), "data").examples
    texts = []
    for one in examples:
        edges = np.flatnonzero(np.diff(one.loss_mask.astype(int), prepend=0, append=0))
        texts += [tokenizer.decode(one.token_ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return tokenizer, texts, [one.token_ids.tolist() for one in examples]


def whole(tokenizer: Any, turns: list[dict[str, Any]]) -> list[int]:
    """What the template writes of a conversation, without spaces behind its last token; GLM's writes no end of its own."""
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    text += "<|user|>" if text.startswith("[gMASK]") else ""
    return list(tokenizer.encode(text.rstrip(), add_special_tokens=False))


@pytest.mark.parametrize("base", BASES)
def test_an_answer_is_trained_as_the_template_writes_it(base: str) -> None:
    for content in ("Eins.", " \nEins.\n", "e<|im_x", "日本 🙂"):
        turns = [ASKED, {"role": "assistant", "content": content}]
        tokenizer, texts, (ids,) = learned({"messages": turns}, base)
        assert ids == whole(tokenizer, turns)
        assert (
            "".join(texts)
            == tokenizer.decode(ids)[
                len(tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)) :
            ]
        )


@pytest.mark.parametrize("base", BASES)
def test_every_turn_is_trained_as_the_model_samples_it(base: str) -> None:
    tokenizer, texts, examples = learned({"messages": TALK}, base)
    assert texts == LEARNED[base]
    assert examples[-1] == whole(tokenizer, TALK)
    assert len(examples) == (2 if base in ("qwen3", "qwen3.5") else 1)  # they rewrite the turn before


def test_a_turn_behind_an_opened_thought_closes_it_and_has_one_mark() -> None:
    """As DeepSeek's distilled models: the prompt opens a thought that no turn of the template has."""
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = BASES["chatml"][0].replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    chat, asked = Chat(tokenizer), Message("user", "q")
    for said, own in (
        (Message("assistant", "a"), "\n</think>\n\na<|im_end|>"),
        (Message("assistant", "<think>\nt\n</think>\n\na"), "t\n</think>\n\na<|im_end|>"),
        (Message("assistant", "<think>t</think>a"), "t</think>a<|im_end|>"),
        (Message("assistant", "a", thought="t"), "t\n</think>\n\na<|im_end|>"),
    ):
        (example,) = examples_of(chat, (asked, said), 1, ())
        assert tokenizer.decode(example.token_ids[example.loss_mask]) == own
        assert tokenizer.decode(example.token_ids).count("<think>") == 1


class CountingChat(Chat):
    """A chat that counts how often it is rendered."""

    renders = 0

    def rendered(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True) -> str:
        CountingChat.renders += 1
        return super().rendered(messages, tools, generation_prompt=generation_prompt)


def test_the_renders_of_a_row_are_two_for_each_turn_to_learn_and_bounded() -> None:
    def renders(turns: int, kind: str = "answer") -> int:
        talk = [turn for n in range(turns) for turn in (ASKED, {"role": "assistant", "content": f"{n}"})]
        (problem,) = load_dataset(DataConfig(source=[{"messages": talk}], holdout=0)).train
        CountingChat.renders = 0
        row_of(problem, kind, CountingChat(tokenizer_of("chatml")), "data")
        return CountingChat.renders

    assert [renders(3), renders(30), renders(300, "last_answer")] == [6, 60, 2]
    with pytest.raises(DataError, match=r"in 600 messages.*rows of at most 360"):
        renders(300)
    assert CountingChat.renders == 0


def test_texts_alone_are_learned_as_the_message_says() -> None:
    rows = [{"text": f"Once upon {number}."} for number in range(3)]
    with pytest.raises(DataError) as refused:
        load_dataset(DataConfig(source=rows))
    told = re.search(r"data\.answer to (.*), data\.template to .*'(.*)', and data\.holdout to (\d)", str(refused.value))
    assert told is not None
    assert told[1] == "their column"
    _, texts, _ = learned(rows[1], "chatml", answer="text", template=told[2], holdout=int(told[3]))
    assert texts == ["Once upon 1.<|im_end|>"]
    assert len(load_dataset(DataConfig(source=rows, answer="text", template=told[2], holdout=int(told[3]))).train) == 3


OPENED_BY_A_PROMPT = {
    "glm": (
        BASES["glm"][0]
        .replace("'<think>' + (m.reasoning", "('<think>' if m.reasoning_content else '') + (m.reasoning")
        .replace("'<|assistant|>' + (", "'<|assistant|>\\n<think>' + ("),
        "</think>",
        "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
    ),  # GLM-4.7: without a thought, a turn begins with the end of one
    "qwen3.5": (
        BASES["qwen3.5"][0]
        .replace("'<|im_start|>assistant\\n' + content }}", "'<|im_start|>assistant\\n<think></think>' + content }}")
        .replace("(loop.last or thought)", "thought"),
        "</think>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),  # Nemotron 3: an empty thought without lines
    "qwen3": (
        BASES["qwen3"][0]
        .replace("(loop.last or thought)", "false")
        .replace("{%- if false %}", "{%- if true %}"),
        "\n</think>\n\n",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    ),  # DeepSeek's distilled models: no turn has a thought
    "mistral": (
        BASES["mistral"][0]
        .replace("'[INST]' +", "'[INST]' + (messages[0].content if loop.last and loop.index0 else '') +")
        .replace("{{- raise_exception('Only user and assistant roles are supported!') }}", ""),
        "",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]</s>',
    ),  # Mistral Nemo: its system prompt is before the last question alone
}  # fmt: skip


@pytest.mark.parametrize("base", OPENED_BY_A_PROMPT)
@pytest.mark.parametrize("calls", [False, True])
def test_a_turn_that_its_prompt_never_begins_is_in_the_bases_own_form(base: str, calls: bool) -> None:
    tokenizer = tokenizer_of(base)
    tokenizer.chat_template, closes, call = OPENED_BY_A_PROMPT[base]
    ends = {"glm": "<|user|>", "mistral": "</s>"}.get(base, "<|im_end|>")
    said = Message("assistant", "", (ToolCall("add", {"a": 1}),)) if calls else Message("assistant", "4")
    chat = Chat(tokenizer)
    assert chat.form.known
    (one,) = examples_of(chat, (Message("system", "Be short."), Message("user", "q"), said), 2, ())
    text = tokenizer.decode(one.token_ids[one.loss_mask])
    newline = "\n" if base == "glm" and not calls else ""
    assert text == closes + (call if calls else f"{newline}4{ends}")
    assert tokenizer.decode(one.token_ids).count("<think>") == (base != "mistral")


@pytest.mark.parametrize("base", ["llama3", "gpt-oss"])
def test_each_call_is_a_turn_before_its_result_where_the_template_takes_one(base: str) -> None:
    calls = tuple(ToolCall("add", {"a": number}) for number in (1, 2))
    results = [Message("tool", f"{number}", name="add") for number in (1, 2)]
    chat, talk = Chat(tokenizer_of(base)), [Message("user", "q"), Message("assistant", "", calls), *results]
    examples = list(examples_of(chat, (*talk, Message("assistant", "3")), 1, ()))
    texts = [chat.tokenizer.decode(one.token_ids[one.loss_mask]) for one in examples]
    told = "".join(texts)
    assert told.index('{"a": 1}') < told.index('{"a": 2}') < told.index("3")
    assert not any(mark in told for mark in ("<|start_header_id|>", "<|start|>"))
    whole = chat.tokenizer.decode(examples[-1].token_ids)
    assert whole.index('{"a": 1}') < whole.index('"1"') < whole.index('{"a": 2}') < whole.index('"2"')
