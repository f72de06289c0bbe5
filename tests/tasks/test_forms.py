"""What a turn says: thought, speech and calls, read from tokens in each form that bases write."""

from __future__ import annotations

import json

import numpy as np
import pytest

from motet.core.types import ToolCall
from motet.model.load import load_tokenizer
from motet.tasks.chat import Chat

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(load_tokenizer("small"))


def ids(chat: Chat, text: str) -> np.ndarray:
    return np.asarray(chat.tokenizer.encode(text, add_special_tokens=False))


def test_without_tools_all_is_speech(chat: Chat) -> None:
    parts = chat.parts([], ids(chat, " <tool_call>{} \n"), cut_off=False)
    assert (parts.speech, parts.calls, parts.unread) == (" <tool_call>{} \n", (), "")


def test_calls_are_json_between_tags(chat: Chat) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    text = f"I add.\n<tool_call>\n{call}\n</tool_call> so <tool_call>{call}"
    parts = chat.parts([], ids(chat, text), TOOLS, cut_off=False)
    assert parts.calls == (ToolCall("add", {"a": 1}),) * 2
    assert parts.speech == "I add.\n so"


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_pieces_are_read_as_the_whole(chat: Chat, tools: list[dict[str, object]]) -> None:
    text = 'äö <tool_c<tool_call>{"name": "add"}</tool_call>  <too'
    tokens = ids(chat, text)
    whole = chat.parts([], tokens, tools, cut_off=False)
    for cut in range(len(tokens)):
        reader = chat.reader([], tools)
        first, second = reader.take(tokens[:cut]), reader.take(tokens[cut:])
        last, parts = reader.end(cut_off=False)
        assert parts == whole
        assert first.speech + second.speech + last.speech == whole.speech
        assert reader.text == text


def test_text_ends_before_a_stop_string(chat: Chat) -> None:
    reader = chat.reader([], stop=("END",))
    assert reader.take(ids(chat, "one E")).speech == "one"
    assert reader.take(ids(chat, "ND two")).speech == ""
    assert reader.end(cut_off=False)[1].speech == "one "
