"""What a turn says: thought, speech and calls, read from tokens in each form that bases write."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from motet.chat.template import Chat
from motet.chat.turn_formats.arguments import MOST_CALLS, TypedTexts
from motet.chat.turn_formats.detect import ASKED, find_form
from motet.core.types import Chunk, FinishReason, IntArray, Message, ToolCall, TurnParts
from motet.model.load import load_tokenizer
from tests.support.scripted_model import CHATML, byte_tokenizer
from tests.support.speaking_bases import SPEAKERS, Speaker, own_turn
from tests.support.tables import read, table, written

_PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "yes": {"type": "boolean"},
        "many": {"type": "array"}, "deep": {"type": "object"}, "none": {"type": "null"}, "any": {},
    },
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": _PARAMETERS}}
    for name in ("add", "sell")
]
ARGUMENTS = {
    "text": "12", "n": 3, "x": 0.5, "yes": True, "many": [1, "a", None], "deep": {"a": {"b": "</"}}, "none": None,
    "any": "ä \U0001f600 {",
}  # fmt: skip
ONE, TWO = ToolCall("add", ARGUMENTS), ToolCall("sell", {"text": "two\nlines\n", "n": -1})
QUESTION = {"role": "user", "content": "What is 2 and 2?"}
NAMING = "Shall I write <tool_call> or [TOOL_CALLS], {, <|channel|>final or <function=add>? No: <think>"
"""A thought that names tags."""
ALL = pytest.mark.parametrize("name", SPEAKERS)
SPOKEN = table("spoken")


@functools.cache
def chat_of(name: str, *, spelled: bool = False) -> Chat:
    """A chat with a base that speaks so; `name` is empty for the small base."""
    return Chat(SPEAKERS[name].tokenizer(spelled=spelled) if name else load_tokenizer("small"))


def ids(chat: Chat, text: str) -> IntArray:
    """The tokens of a text, with its tags."""
    return np.asarray(chat.tokenizer.encode(text, add_special_tokens=False), np.int32)


def letters(chat: Chat, text: str) -> IntArray:
    """The tokens of a text whose tags are letters."""
    return np.concatenate([ids(chat, letter) for letter in text]) if text else ids(chat, "")


def chunk_of(tokens: IntArray, text: str) -> Chunk:
    """A whole turn, as an engine gives it."""
    n_tokens = len(tokens)
    return Chunk(0, tokens, np.zeros(n_tokens, np.float32), np.zeros(n_tokens, np.int32), text, FinishReason.STOP)


def prompt(chat: Chat, **kwargs: Any) -> IntArray:
    """The prompt before a turn."""
    text = chat.tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True, **kwargs)
    return ids(chat, text)


def turns_of(speaker: Speaker) -> list[TurnParts]:
    """Turns that a kind of base can say."""
    thought = "Two\n\nand <two>" if speaker.thinks else ""
    said = "" if speaker.form in ("harmony", "llama3_json") else "I call.\n\nNow:"
    calls = (ONE,) if speaker.form in ("harmony", "llama3_json") else (ONE, TWO)
    return [
        TurnParts("", "4"),
        TurnParts(thought, "It is 4, ä \U0001f600 ≤ {}."),
        TurnParts(thought, said, calls),
        TurnParts(thought, "", (TWO,)),
        TurnParts("", said, (ToolCall("sell", {}),)),
    ]


@ALL
@pytest.mark.parametrize("spelled", [False, True])
def test_what_the_template_writes_is_read_back(name: str, spelled: bool) -> None:
    speaker, chat = SPEAKERS[name], chat_of(name, spelled=spelled)
    form = find_form(chat.tokenizer, {})
    assert (form.name, form.thought, form.known) == (speaker.form, speaker.thought, True)
    for turn in turns_of(speaker):
        assert chat.parts(prompt(chat), own_turn(chat, turn), TOOLS, cut_off=False) == turn


@ALL
@pytest.mark.parametrize("spelled", [False, True])
def test_a_turn_in_pieces_is_read_as_the_whole(name: str, spelled: bool) -> None:
    chat = chat_of(name, spelled=spelled)
    before, tokens = prompt(chat), own_turn(chat, turns_of(SPEAKERS[name])[2])
    for cut_off in (False, True):
        for n_read in range(cut_off, len(tokens) + 1, 3 + 2 * spelled):
            whole = chat.parts(before, tokens[:n_read], TOOLS, cut_off=cut_off)
            reader = chat.reader(before, TOOLS)
            shown = [reader.take([token]) for token in tokens[:n_read]]
            last, parts = reader.end(cut_off=cut_off)
            assert parts == whole
            assert "".join(one.thought for one in [*shown, last]) == whole.thought
            assert "".join(one.speech for one in [*shown, last]) == whole.speech
            assert not (cut_off and whole.calls)


@ALL
def test_a_thought_that_names_tags_hides_no_call(name: str) -> None:
    speaker, chat = SPEAKERS[name], chat_of(name)
    if not (speaker.thought or speaker.form == "harmony"):
        return
    tokens = own_turn(chat, TurnParts("THOUGHT", "", (ONE,))).tolist()
    if speaker.thinks:
        at = next(at for at in range(len(tokens)) if chat.tokenizer.decode(tokens[: at + 1]).endswith("THOUGHT"))
        start = next(n for n in range(at, -1, -1) if "THOUGHT" in chat.tokenizer.decode(tokens[n : at + 1]))
        named = [*tokens[:start], *letters(chat, NAMING), *tokens[at + 1 :]]
        parts = chat.parts(prompt(chat), named, TOOLS, cut_off=False)
        assert (parts.thought, parts.calls) == (NAMING, (ONE,))
    if speaker.thought:  # also where the tags are those of the form
        begins, ends = speaker.thought
        call = ids(chat, chat.tokenizer.decode(tokens).rpartition(ends)[2])
        inside = [*ids(chat, begins), *call[:-1], *ids(chat, begins), *ids(chat, ends), *call]
        parts = chat.parts([], inside, TOOLS, cut_off=False)
        assert (parts.calls, parts.unread) == ((ONE,), "")


@ALL
def test_a_thought_without_an_end_leaves_no_speech(name: str) -> None:
    speaker, chat = SPEAKERS[name], chat_of(name)
    begins = "<|channel|>analysis<|message|>" if speaker.form == "harmony" else (speaker.thought or ("",))[0]
    if begins and not speaker.opened:
        for cut_off in (False, True):
            parts = chat.parts(prompt(chat), ids(chat, f"{begins}Let me see. 4"), TOOLS, cut_off=cut_off)
            assert (parts.thought, parts.speech, parts.calls) == ("Let me see. 4", "", ())
            assert "a thought has no end" in parts.unread
            assert ("max_tokens" in parts.unread) == cut_off


def test_a_prompt_may_open_a_thought() -> None:
    chat = chat_of("qwen35")
    said = "hm\n</think>\n\n4"
    tokens = ids(chat, said)
    chunk = chunk_of(tokens, said)
    assert chat.turn(prompt(chat), chunk) == ("<think>\n" + said, TurnParts("hm", "4"))
    closed = prompt(chat, enable_thinking=False)
    assert chat.parts(closed, ids(chat, " 4 "), cut_off=False) == TurnParts("", " 4 ")
    asks = ids(chat, "what is <think>\n<|im_end|>\n<|im_start|>assistant\n")
    assert chat.parts(asks, ids(chat, "4"), cut_off=False) == TurnParts("", "4")
    harmony = chat_of("gpt_oss")
    opened = np.concatenate([prompt(harmony), ids(harmony, "<|channel|>analysis<|message|>")])
    reader = harmony.reader(opened)
    assert reader.take(ids(harmony, "2 and 2")).thought == "2 and 2"
    reader.take(ids(harmony, "<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"))
    assert reader.end(cut_off=False)[1] == TurnParts("2 and 2", "4")
    assert reader.text == ("<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4")


@pytest.mark.parametrize(("name", "text"), SPOKEN["broken"])
def test_a_broken_call_is_a_call_that_no_tool_takes(name: str, text: str) -> None:
    chat = chat_of(name)
    parts = chat.parts(prompt(chat), ids(chat, written(text)), TOOLS, cut_off=False)
    assert "a call cannot be read" in parts.unread
    (call,) = parts.calls
    assert call.name not in ("add", "sell")
    assert call.arguments == {}


@pytest.mark.parametrize(("name", "text", "speech", "calls"), SPOKEN["other"])
def test_other_ways_to_write_calls(name: str, text: str, speech: str, calls: str) -> None:
    chat = chat_of(name)
    parts = chat.parts(prompt(chat), ids(chat, text), TOOLS, cut_off=False)
    assert parts.speech == speech
    expected = read(calls)
    assert len(parts.calls) == (1 if expected is None else len(expected))
    assert expected is None or parts.calls == tuple(ToolCall(*call) for call in expected)


@ALL
def test_without_tools_nothing_is_a_call(name: str) -> None:
    speaker, chat = SPEAKERS[name], chat_of(name)
    parts = chat.parts(prompt(chat), own_turn(chat, turns_of(speaker)[3]), cut_off=False)
    assert parts.calls == ()
    assert "sell" in parts.speech or "none is offered" in parts.unread


@ALL
def test_without_the_template_calls_are_read_as_the_introduction_asks(name: str) -> None:
    chat = Chat(SPEAKERS[name].tokenizer(), chat_template=False)
    before = chat.prompt_of(chat.opening([Message("user", "hi")], TOOLS), TOOLS)
    said = '<tool_call>{"name": "sell", "arguments": {}}</tool_call>'
    if name == "gpt_oss":
        said = "<|channel|>commentary to=functions.sell<|message|>{}<|call|>"
    assert ASKED["harmony" if name == "gpt_oss" else "hermes"] in chat.tokenizer.decode(before)
    assert chat.parts(before, ids(chat, said), TOOLS, cut_off=False).calls == (ToolCall("sell", {}),)


@pytest.mark.parametrize(
    ("old", "new", "tokens", "known"),
    [
        ("<tool_call>", "<seed:tool_call>", True, True),
        ("<tool_call>", "<seed:tool_call>", False, True),
        ("<tool_call>\\n<function", "<seed:tool_call>\\nCall <function", False, False),  # its letters would be speech
        ("value if value is string else (value | tojson)", "call.arguments | tojson", False, False),
        ("<parameter=' + key + '>", "<argument name=' + key + '>", False, False),
    ],
)
def test_a_form_is_known_if_it_reads_all_of_a_call(old: str, new: str, tokens: bool, known: bool) -> None:
    """Not if the template only names the form's tags where it lists tools."""
    tokenizer = SPEAKERS["qwen3_coder"].tokenizer()
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new).replace(
        old.replace("<", "</"), new.replace("<", "</")
    )
    tokenizer.add_tokens([AddedToken(new, special=True), AddedToken(new.replace("<", "</"), special=True)] * tokens)
    assert find_form(tokenizer, {}).known == known


@pytest.mark.parametrize(
    ("asks", "form", "known"),
    [
        ("", "hermes", False),
        ("Answer with <function=NAME> where you call one.", "qwen3_coder", True),
        ("Answer with [TOOL_CALLS] where you call one.", "mistral", True),
        ("Answer with <|call|> where you call one.", "hermes", False),
    ],
)
def test_a_template_that_lists_tools_and_writes_no_call_is_known_by_what_it_asks_for(
    asks: str, form: str, known: bool
) -> None:
    tokenizer = byte_tokenizer("{% if tools %}{{ tools | tojson }}" + asks + "{% endif %}" + CHATML)
    chat = Chat(tokenizer)
    assert (chat.form.name, chat.form.known) == (form, known)
    assert ("a way that Motet does not know" in chat.form.told) == (not known)
    assert find_form(byte_tokenizer(CHATML), {}).known, "one that lists no tools has them introduced"


@pytest.mark.parametrize(("form", "said"), SPOKEN["named"])
def test_a_named_form_is_asked_for_where_the_template_lists_no_tools(form: str, said: str) -> None:
    tool = {"type": "function", "function": {"name": "sell", "parameters": {"properties": {"x": {"type": "string"}}}}}
    chat = Chat(byte_tokenizer(CHATML), tool_format=form)
    before = chat.prompt_of(chat.opening([Message("user", "hi")], [tool]), [tool])
    assert ASKED[form] in chat.tokenizer.decode(before)
    assert chat.parts(before, ids(chat, said), [tool], cut_off=False).calls == (ToolCall("sell", {"x": "1"}),)


@ALL
@pytest.mark.parametrize("template", [False, True])
def test_tools_are_letters_where_a_message_introduces_them(name: str, template: bool) -> None:
    """A template that lists no tools is given them in a system message."""
    tokenizer = SPEAKERS[name].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("if tools", "if false")
    chat = Chat(tokenizer, template)
    found: list[list[int]] = []
    for text in ("".join(chat.spellings.all.names), "x"):
        function = {"name": text, "description": text, "parameters": {"type": "object", "properties": {text: {}}}}
        before = chat.opening([Message("user", "hi")], [{"type": "function", "function": function}])
        read = chat.prompt_of(before).tolist()
        found.append([token for token in read if token in tokenizer.added_tokens_decoder])
    assert found[0] == found[1]


def test_a_plain_turn_is_the_text_of_the_engine() -> None:
    chat = chat_of("")
    assert (chat.form.name, chat.form.thought, chat.form.known) == ("hermes", None, True)
    text = " <think>\n</think><tool_call>{} \n"
    chunk = chunk_of(ids(chat, text), "cut before a stop")
    assert chat.turn([], chunk) == ("cut before a stop", TurnParts(speech="cut before a stop"))
    assert chat.parts([], ids(chat, text), cut_off=False) == TurnParts(speech=text)


def test_text_ends_before_a_stop_string() -> None:
    chat = chat_of("gpt_oss")
    reader = chat.reader(prompt(chat), stop=("END",))
    head = "<|channel|>final<|message|>"
    assert reader.take(ids(chat, head + "one E")).speech == "one"
    assert reader.take(ids(chat, "ND two")).speech == " "
    assert reader.end(cut_off=False)[1].speech == "one "
    assert reader.text == head + "one "


def test_a_stop_string_goes_on_behind_tokens_without_letters() -> None:
    chat = chat_of("magistral")
    reader = chat.reader(prompt(chat), stop=("ENDS",))
    shown = reader.take([*ids(chat, "one E"), *ids(chat, "[/THINK]").tolist() * 9, *ids(chat, "NDS two")]).speech
    shown += reader.end(cut_off=False)[0].speech
    assert (shown, reader.text) == ("one ", "one ")


@pytest.mark.parametrize(("text", "schema", "value"), SPOKEN["types"])
def test_schemas_give_texts_their_types(text: str, schema: str, value: str) -> None:
    root = {"$defs": {"Size": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    typed = TypedTexts({"f": {**root, "properties": {"x": read(schema)}}}).value("f", "x", written(text))
    assert typed == read(value)
    assert type(typed) is type(read(value))


_ODD: tuple[Any, ...] = (
    None,
    5,
    True,
    "",
    "#/",
    [],
    [[1]],
    {},
    {"type": 5},
    {"type": {"a": 1}},
    {"$ref": "#/$defs/x/0"},
    [{"enum": [[1]]}],
)


@ALL
def test_no_schema_breaks_a_call(name: str) -> None:
    chat = chat_of(name)
    said = own_turn(chat, turns_of(SPEAKERS[name])[2])
    whole = chat.parts(prompt(chat), said, TOOLS, cut_off=False).calls
    for odd in _ODD:
        for key in ("type", "enum", "const", "nullable", "anyOf", "allOf", "$ref"):
            for parameters in (odd, {"properties": odd, key: odd}, {"properties": {"n": {key: odd}}, "$defs": odd}):
                tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
                parts = chat.parts(prompt(chat), said, tools, cut_off=False)
                assert ([one.name for one in parts.calls], parts.unread) == ([one.name for one in whole], ""), (
                    parameters
                )


def test_a_wide_schema_is_read_once() -> None:
    wide = {"type": ["null"] * 9000}
    schema = {"anyOf": [{"$ref": "#/d"}] * 9000}
    texts = TypedTexts({"f": {"d": wide, "properties": {"x": schema}}})
    first = _counted(lambda: texts.value("f", "x", "1"))
    assert first < 20000
    assert _counted(lambda: texts.value("f", "x", "1")) < 50


@pytest.mark.parametrize("name", ["qwen35", "glm", "llama3", "magistral", "gpt_oss", "kimi", "lfm2"])
def test_the_work_grows_with_the_tokens(name: str) -> None:
    """Counted in the steps of the interpreter: six times the tokens take six times the work."""
    speaker, chat = SPEAKERS[name], chat_of(name, spelled=True)
    begins = (speaker.thought or ("",))[0] if not speaker.opened else ""
    before = prompt(chat)
    openers = [one for one in (*chat.form.tags, "<", "<tool_cal", "{", '"', " ", "\n") if one]
    for opener in openers:
        for lead in dict.fromkeys(("", begins, *chat.form.tags[-1:])):
            _check_growth(chat, before, lead, opener)


@pytest.mark.parametrize("name", ["qwen35", "glm", "llama3", "gpt_oss"])
def test_tokens_without_letters_wait_at_no_cost(name: str) -> None:
    chat = chat_of(name)
    for opener in (chat.tokenizer.eos_token, *chat.form.tags[:2]):
        for lead in ("", "z"):
            _check_growth(chat, prompt(chat), lead, opener, ("zzz",))


def _check_growth(chat: Chat, before: IntArray, lead: str, opener: str, stop: tuple[str, ...] = ()) -> None:
    few, many = (ids(chat, lead).tolist() + ids(chat, opener).tolist() * n for n in (20, 120))
    assert _steps(chat, before, many, stop) < 8 * _steps(chat, before, few, stop) + 2000, (opener, lead)


def _steps(chat: Chat, before: IntArray, tokens: list[int], stop: tuple[str, ...]) -> int:
    chat.parts(before, tokens, TOOLS, cut_off=False)

    def read() -> None:
        reader = chat.reader(before, TOOLS, stop)
        for token in tokens:
            reader.take([token])
        reader.end(cut_off=False)

    return _counted(read)


def _counted(work: Callable[[], object]) -> int:
    """The steps of the interpreter."""
    steps = 0

    def count(*_: Any) -> Any:
        nonlocal steps
        steps += 1
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return steps


def test_calls_are_bounded() -> None:
    chat = chat_of("qwen25")
    call = json.dumps({"name": "add", "arguments": {}})
    text = f"<tool_call>{call}</tool_call>" * (MOST_CALLS + 2)
    parts = chat.parts([], ids(chat, text), TOOLS, cut_off=False)
    assert len(parts.calls) == MOST_CALLS
    assert "only the first" in parts.unread
