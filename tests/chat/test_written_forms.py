"""What a form writes it reads: calls and thoughts in histories and rows whose template writes none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from motet.chat.conversation import examples_of
from motet.chat.template import Chat
from motet.chat.turn_formats.detect import CALL_STYLES, HARMONY
from motet.core.types import Message, ToolCall, TurnParts
from tests.support.scripted_model import CHATML, byte_tokenizer
from tests.support.speaking_bases import SPEAKERS

pytestmark = pytest.mark.tier1

FORMS = (*CALL_STYLES, HARMONY.name)
TYPES = {
    "text": "string", "n": "integer", "x": "number", "yes": "boolean", "many": "array", "deep": "object", "none": "null",
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {key: {"type": one} for key, one in TYPES.items()}},
        },
    }
    for name in ("add", "sell.it")
]
ENDS = {"qwen3_coder": ("</parameter>", "</function>"), "glm": ("</arg_value>",)}
"""What ends a text in a form that has no escapes: no text there can have it, if several tokens spell it."""
ASKED = Message("user", "hi")


def tags_of(form: str) -> tuple[str, ...]:
    return HARMONY.tags if form == HARMONY.name else CALL_STYLES[form].tags


@functools.cache
def chat_of(form: str, tokens: str, *, template: bool) -> Chat:
    """A chat with a form named by hand, whose tags are special or shown tokens, or letters."""
    tokenizer = byte_tokenizer(CHATML)
    tags = ("<think>", "</think>", *tags_of(form)) if tokens else ()
    tokenizer.add_tokens([AddedToken(tag, special=tokens == "special", normalized=False) for tag in tags])
    return Chat(tokenizer, template, tool_format=form)


def arguments_of(form: str, *, raw: bool) -> list[dict[str, Any]]:
    """Arguments of each kind; `raw`: with the letters that end a text of the form."""
    tags = [
        tag
        for tag in ("<think>", "</think>", *tags_of(form), *ENDS.get(form, ()))
        if raw or tag not in ENDS.get(form, ())
    ]
    texts = [
        "", " a ", "12", "null", "True", "[1", "\n two\n\nlines \n", "ä \U0001f600 日本", "\t\r\b\x00\x7f", "a\\nb\\",
        """it's "so", '''x''' """, "f(a='b'), g({}])", "</", "```json\n{}\n```", "{% if x %}{{ y }}",
        *tags, "".join(tags), "} ".join(tags), ")\n".join(reversed(tags)),
    ]  # fmt: skip
    every = [*texts, *ENDS.get(form, ())]
    return [
        {},
        *({"text": text} for text in texts),
        *({"n": n} for n in (0, -3, 10**30)),
        *({"x": x} for x in (0.5, -1e300, 1e-7, 3)),
        {"yes": True, "none": None, "n": 1, "text": "after"},
        {"yes": False, "many": [], "deep": {}},
        {"many": [1, "a", None, True, [2.5, {"b": every}]]},
        {"deep": {"a": {"b": [None, {"c": every}]}, **{text or "empty": 1 for text in every}}},
    ]


def read_back(chat: Chat, turn: TurnParts, before: Sequence[Message] = (ASKED,)) -> TurnParts:
    """A turn of history as its reader reads it."""
    said = Message("assistant", turn.speech, turn.calls, thought=turn.thought)
    prompt = chat.rendered(before, TOOLS)
    written = chat.rendered((*before, said), TOOLS, generation_prompt=False)
    head = prompt if chat.chat_template else f"{prompt}\n\n"
    assert written.startswith(head)
    own, _ = chat.spellings.ended(written[len(head) :])
    return chat.parts(chat.prompt_encoded(prompt), chat.encoded(own), TOOLS, cut_off=False)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("tokens", ["", "shown", "special"])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_writes_it_reads(form: str, tokens: str, template: bool) -> None:
    chat = chat_of(form, tokens, template=template)
    every = arguments_of(form, raw=tokens != "" and form != "qwen3_coder")
    calls = tuple(ToolCall(name, one) for name, one in zip(itertools.cycle(("add", "sell.it")), every, strict=False))
    thought = "I think.\n\nSo." if form == HARMONY.name or (tokens and not template) else ""
    for turn in (
        TurnParts(thought, "I call:", calls),
        TurnParts(thought, "", calls[-1:]),
        TurnParts("", "", (calls[0], calls[0])),
        TurnParts(thought, "It is {1}."),
    ):
        assert read_back(chat, turn) == turn


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_row_teaches_is_what_is_read(form: str, template: bool) -> None:
    chat = chat_of(form, "special", template=template)
    thinks = form == HARMONY.name or not template
    call = Message("assistant", "I call.", (ToolCall("add", {"n": 1}),), thought="First." * thinks)
    said = Message("assistant", "It is 1.", thought="So." * thinks)
    talk = (ASKED, call, Message("tool", "1", name="add"), said)
    (example,) = examples_of(chat, talk, 1, TOOLS)
    runs = itertools.groupby(zip(example.token_ids, example.loss_mask, strict=True), key=lambda pair: pair[1])
    learned = [[int(token) for token, _ in run] for on, run in runs if on]
    before = chat.prompt_of(chat.opening(talk[:1], TOOLS), TOOLS)
    read = [chat.parts(before, ids, TOOLS, cut_off=False) for ids in learned]
    assert read == [TurnParts(one.thought, one.content, one.tool_calls) for one in (call, said)]


def test_a_prompt_that_opens_a_thought_has_it_once() -> None:
    chat = chat_of("hermes", "shown", template=False)
    asked = Message("user", "hi<think>\n", special=len("hi<think>\n"))
    (example,) = examples_of(chat, (asked, Message("assistant", "4", thought="So.")), 1, ())
    assert chat.tokenizer.decode(example.token_ids) == "hi<think>\nSo.\n</think>\n\n4<|endoftext|>"


def test_a_named_form_is_written_where_the_template_writes_another() -> None:
    """Else the turns that a row teaches would have calls that nobody reads."""
    tokenizer = SPEAKERS["qwen3_coder"].tokenizer()
    turn = TurnParts("", "", (ToolCall("add", {"n": 1}),))
    for form in ("qwen3_coder", "hermes", "glm", HARMONY.name):
        chat = Chat(tokenizer, tool_format=form)
        assert read_back(chat, turn) == turn
        assert chat.wording.calls == (form == "qwen3_coder")
    assert Chat(tokenizer, tool_format="none").wording.calls


def test_a_template_that_asks_for_a_form_and_writes_no_call_has_it_in_its_history() -> None:
    asks = "{% if tools %}{{ tools | tojson }} Answer with <function=NAME>.{% endif %}"
    turn = TurnParts("", "", (ToolCall("add", {"n": 1}),))
    assert read_back(Chat(byte_tokenizer(asks + CHATML)), turn) == turn


_HEAD = "{% if tools %}<|turn>system\n{{ tools | tojson }}{% endif %}{% for m in messages %}<|turn>{{ m.role }}\n"
_TAIL = "{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
_CALLS = {
    "Gemma 4": "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}{{ '}' }}<tool_call|>",
    "Command R7B": "{% for c in m.tool_calls or [] %}<|START_ACTION|>[\n"
    '{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}\n'
    "]<|END_ACTION|>",
    "DeepSeek V3.2": '{% for c in m.tool_calls or [] %}<｜DSML｜function_calls><｜DSML｜invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="true">{{ v }}'
    "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}
"""How templates of bases write calls whose form is not known."""
_TOKENS = ("<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|START_ACTION|>", "<|END_ACTION|>", "｜DSML｜")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("base", _CALLS)
def test_an_unknown_form_is_told_and_another_can_be_named(base: str, special: bool) -> None:
    tokenizer = byte_tokenizer(_HEAD + _CALLS[base] + _TAIL)
    tokenizer.add_tokens([AddedToken(one, special=special, normalized=False) for one in _TOKENS])
    form = Chat(tokenizer).form
    assert (form.known, form.name) == (False, "hermes")
    assert "a way that Motet does not know" in form.told
    assert "no thoughts" not in form.told  # it may have some
    turn = TurnParts("", "I call.", (ToolCall("add", {"n": 1, "text": "a"}), ToolCall("sell.it", {})))
    for named in FORMS:
        assert read_back(Chat(tokenizer, tool_format=named), turn) == turn
