"""Thoughts, speech and calls in any order, and calls in thoughts, which are never run."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from motet.chat.completer import AnswerPiece
from motet.chat.conversation import examples_of
from motet.chat.template import Chat
from motet.chat.turn_formats.thoughts import THOUGHTS
from motet.chat.turn_stream import SpokenTurn
from motet.commands.forecast import warnings_of
from motet.config import DataConfig, JobConfig
from motet.core.errors import ConfigError
from motet.core.types import Chunk, FinishReason, Message, ToolCall, TurnParts
from tests.support.scripted_model import CHATML, byte_tokenizer
from tests.support.speaking_bases import SPEAKERS, own_turn

THINK = THOUGHTS[0]
_FIELDS = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": _FIELDS}} for name in ("add", "sell")]
A, B = ToolCall("add", {"n": 1}), ToolCall("sell", {"n": 2})
TAGGED = [name for name in SPEAKERS if name != "gpt_oss"]
KINDS = [(name, spelled) for name in TAGGED for spelled in (False, True)]
BOTH = pytest.mark.parametrize(("name", "spelled"), KINDS)


@functools.cache
def thinker(name: str, spelled: bool) -> Chat:
    """A chat with a base that speaks so, and thinks."""
    tokenizer, thought = SPEAKERS[name].tokenizer(spelled=spelled), SPEAKERS[name].thought
    if not (thought or spelled):
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in THINK])
    chat = Chat(tokenizer, thoughts=thought or THINK)
    assert chat.form.name == SPEAKERS[name].form
    return chat


def ids(chat: Chat, text: str) -> Any:
    """The tokens of a text, with its tags."""
    return np.asarray(chat.tokenizer.encode(text, add_special_tokens=False), np.int32)


def thought_of(chat: Chat, text: str) -> str:
    """A thought as a template writes it."""
    begins, ends = chat.form.thought or THINK
    return f"{begins}\n{text}\n{ends}\n\n"


def written(chat: Chat, *calls: ToolCall) -> str:
    """Calls as a template writes them."""
    text = str(chat.tokenizer.decode(own_turn(chat, TurnParts("", "", calls))))
    for tag in (chat.tokenizer.eos_token, "<|observation|>"):
        text = text.removesuffix(tag)
    begins, ends = chat.form.thought or THINK
    return re.sub(rf"^\s*({re.escape(begins)})?\s*{re.escape(ends)}", "", text).strip()


def parts(chat: Chat, text: str, tools: Any = TOOLS, before: Any = ()) -> TurnParts:
    """A turn without a prompt, read as a whole and token by token, which is the same."""
    tokens = ids(chat, text)
    whole = chat.parts(before, tokens, tools, cut_off=False)
    reader = chat.reader(before, tools)
    shown = [reader.take([token]) for token in tokens]
    last, said = reader.end(cut_off=False)
    assert said == whole
    assert "".join(one.thought for one in [*shown, last]) == whole.thought
    said_again = [last] if last.recalled else [*shown, last]
    assert "".join(one.speech for one in said_again) == whole.speech
    return whole


@BOTH
def test_a_call_in_a_thought_is_not_run_wherever_the_thought_stands(name: str, spelled: bool) -> None:
    chat = thinker(name, spelled)
    begins, ends = chat.form.thought or THINK
    a, b = written(chat, A), written(chat, B)
    tag = "<|python_tag|>" if chat.form.name == "llama3_json" else ""  # JSON behind speech is speech
    for before, said in (("", []), (thought_of(chat, b), []), ("First.\n", ["First."])):
        found = parts(chat, f"{before}{tag if said else ''}{a} {begins}or {b}{ends} No.")
        assert (found.calls, found.unread) == ((A,), "")
        assert found.thought.endswith("or " + b)
        assert found.speech.split() == [*said, "No."]
    found = parts(chat, f"{a}{begins}hm{ends}{tag}{b}{begins}{a}{ends}")
    assert (found.thought, found.calls, found.speech) == (f"hm\n\n{a}", (A, B), "")
    for text in (f"It is 4. {begins} or {tag}{b}{ends} No.", f"It is 4.\n{begins}\nor {tag}{b}"):
        found = parts(chat, text)
        assert found.calls == ()
        assert found.thought.endswith(b)
    assert "a thought has no end" in found.unread


@BOTH
def test_the_first_lone_end_of_a_thought_ends_one(name: str, spelled: bool) -> None:
    chat = thinker(name, spelled)
    _, ends = chat.form.thought or THINK
    a = written(chat, A)
    assert parts(chat, f"add\n{ends}\n\n4") == TurnParts("add", "4")
    assert parts(chat, f"add\n{ends}\n\n4", ()) == TurnParts("add", "4")
    assert parts(chat, f"{ends}\n4") == TurnParts("", "4")
    found = parts(chat, f"{a}\n{ends}\n\n4")
    assert (found.thought, found.speech, found.calls) == (a, "4", ())
    found = parts(chat, f"hm\n{ends}\n\n{a}")
    assert (found.thought, found.speech, found.calls, found.unread) == ("hm", "", (A,), "")
    found = parts(chat, f"a\n{ends}\nb\n{ends}\n4")
    assert (found.thought, found.speech) == ("a", f"b\n{ends}\n4")
    found = parts(chat, f"a {ends} b")
    assert (found.thought, found.speech) == (("", f"a {ends} b") if len(ids(chat, ends)) > 1 else ("a", "b"))


@BOTH
def test_a_tag_of_thoughts_in_a_call_is_text(name: str, spelled: bool) -> None:
    chat = thinker(name, spelled)
    begins, ends = chat.form.thought or THINK
    for text in (f"{begins}", f"a {ends} b", f"{begins}x{ends}", f"{ends}, {begins}"):
        call = ToolCall("add", {"text": text})
        found = parts(chat, f"{written(chat, call)}{begins}{written(chat, B)}{ends}")
        assert (found.calls, found.thought) == ((call,), written(chat, B))


@BOTH
@settings(max_examples=25)
@given(data=st.data())
def test_any_order_of_thoughts_speech_and_calls_is_read_back(name: str, spelled: bool, data: st.DataObject) -> None:
    chat = thinker(name, spelled)
    tags = [*(chat.form.thought or THINK), *(chat.form.calls.tags if chat.form.calls else ())]
    signs = st.sampled_from(["a", " ", "é", "日", "{", "}", "[", "(", ")", "'", ",", "7", "<", "</", "it's"])
    words = st.lists(signs, min_size=1, max_size=6).map("".join).filter(str.strip)
    quiet = st.sampled_from(["a", "é", "日", "7 is", "it is {7}", "f(x)", "so, 'it'"])
    in_call = st.lists(st.one_of(quiet, st.sampled_from(tags[:2])), max_size=3).map(" ".join)
    values = st.fixed_dictionaries({"text": in_call, "n": st.integers(-3, 99)})
    call = st.builds(ToolCall, st.sampled_from(["add", "sell"]), values)
    kinds = ["thought", "speech", "call"]
    order = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    text, thoughts, speech, calls = "", list[str](), list[str](), list[ToolCall]()
    for kind in order:
        if kind == "thought":
            inner = data.draw(st.one_of(words, call.map(lambda one: written(chat, one)))).strip()
            if tags[1] in inner:
                continue
            text += thought_of(chat, inner)
            thoughts.append(inner)
        elif kind == "speech" and not (chat.form.calls and chat.form.calls.bare and not calls):
            said = data.draw(quiet)
            text += f"{said}\n"
            speech.append(said)
        elif kind == "call" and not (chat.form.name == "llama3_json" and calls):
            made = data.draw(call)
            text += f"{written(chat, made)}\n"
            calls.append(made)
    found = parts(chat, text)
    assert (found.thought, found.calls, found.unread) == ("\n\n".join(thoughts), tuple(calls), "")
    assert found.speech.split() == " ".join(speech).split()


@settings(max_examples=40)
@given(order=st.lists(st.sampled_from(["thought", "speech", "call"]), min_size=1, max_size=6), data=st.data())
def test_any_order_of_messages_in_channels_is_read_back(order: list[str], data: st.DataObject) -> None:
    chat = Chat(SPEAKERS["gpt_oss"].tokenizer())
    words = st.lists(st.sampled_from(["a", "é", "{", "to=functions.add", "<think>", "7"]), min_size=1).map(" ".join)
    said: dict[str, list[Any]] = {kind: [] for kind in ("thought", "speech", "call")}
    messages = []
    for kind in order:
        text = data.draw(words)
        said[kind].append(ToolCall("add", {"text": text}) if kind == "call" else text)
        if kind == "call":
            call = str(chat.tokenizer.decode(own_turn(chat, TurnParts("", "", (said[kind][-1],)))))
            messages.append(call.removeprefix("<|start|>assistant"))
        else:
            channel = "analysis" if kind == "thought" else "commentary"
            messages.append(f"<|channel|>{channel}<|message|>{text}<|end|>")
    found = parts(chat, "<|start|>assistant".join(messages), before=chat.prompt_of((Message("user", "hi"),)))
    assert found == TurnParts("\n\n".join(said["thought"]), "\n\n".join(said["speech"]), tuple(said["call"]), "")


def test_two_thoughts_whose_tags_are_letters() -> None:
    chat = thinker("qwen3", True)
    assert parts(chat, "<think>a</think> Hi.\n<think>\nb\n</think>\n\n4") == TurnParts("a\n\nb", "Hi.\n\n\n4")
    assert parts(chat, "<think>a</think><think>b</think> 4") == TurnParts("a\n\nb", "4")
    assert parts(chat, "Write <think> so.") == TurnParts("", "Write <think> so.")
    assert parts(chat, "End it by </think> so.") == TurnParts("", "End it by </think> so.")


@pytest.mark.parametrize("step", [1, 3, 99])
def test_an_answer_that_is_not_streamed_has_the_thought_that_only_an_end_showed(step: int) -> None:
    chat = thinker("qwen3", False)
    tokens = ids(chat, "I add.\n</think>\n\n4").tolist()
    turn, answer, nothing = (
        SpokenTurn(chat, np.zeros(0, np.int32), TOOLS, ()),
        AnswerPiece(0, "a"),
        np.zeros(0, np.float32),
    )
    n_thought = 0
    for at in range(0, len(tokens), step):
        ends = FinishReason.STOP if at + step >= len(tokens) else None
        chunk = Chunk(0, np.array(tokens[at : at + step], np.int32), nothing, nothing.astype(np.int32), "", ends)
        said = turn._read(turn._reader, chunk)  # type: ignore[arg-type]
        n_thought += said.thought_tokens
        answer.add(AnswerPiece(0, "a", said.blocks, said.calls, recalled=said.recalled))
    assert (answer.thought, answer.text) == ("I add.", "4")
    assert n_thought >= len(ids(chat, "I add."))


def test_a_turn_of_many_tags_is_read_at_once() -> None:
    """No loop goes over a turn anew for each of its tags."""
    import time

    from motet.chat.turn_formats.calls import Parting
    from motet.chat.turn_formats.detect import CALL_STYLES
    from motet.chat.turn_formats.token_text import Tag

    for style in CALL_STYLES.values():
        opens, closes = next(iter(style.around.items()))
        for some in (
            [opens], [opens, "<think>"], ["<think>"], ["</think>"], [opens, '"'], [opens, "{", "</think>"],
            ["<think>", " "], [closes, "</think>"],
        ):  # fmt: skip
            tags = {*style.around, *style.around.values(), *THINK} - {""}
            pieces = [Tag(one) if one in tags else one for one in some] * (20_000 // len(some))
            started = time.process_time()
            Parting(["x", *pieces], "", THINK, style, {*THINK}).read()
            assert time.process_time() - started < 5, some


_PREFIXES = ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>")
_IN_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is mapping %}{% for b in m.content.blocks %}"
    "{% if b.type == 'thoughts' %}<|inner_prefix|>{{ b.text }}<|inner_suffix|>{% else %}{{ b.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_unknown_tags_of_thoughts_are_told_and_can_be_named() -> None:
    """As Apertus has them, which takes thoughts as blocks of its own."""
    tokenizer = byte_tokenizer(_IN_BLOCKS)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in _PREFIXES])
    form = Chat(tokenizer).form
    assert (form.thought, form.known, form.strange) == (None, False, _PREFIXES[:2])
    assert "<|inner_prefix|>, <|inner_suffix|>" in form.told
    config = JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": "exact", "steps": 1})
    (told,) = warnings_of(config, Chat(tokenizer), [], [])
    assert "<|inner_prefix|>, <|inner_suffix|>" in told
    assert "data.thoughts" in told
    data = DataConfig.model_validate({"source": "toy:add", "thoughts": list(_PREFIXES[:2]), "tool_format": "hermes"})
    chat = Chat.of(tokenizer, data)
    assert "thoughts between <|inner_prefix|> and <|inner_suffix|>" in chat.form.told
    assert parts(chat, "<|inner_prefix|>hm<|inner_suffix|>4") == TurnParts("hm", "4")
    asked = Message("user", "hi")
    for turn in (Message("assistant", "4", thought="So."), Message("assistant", "I call.", (A,), thought="So.")):
        (example,) = examples_of(chat, (asked, turn), 1, TOOLS)
        learned = example.token_ids[np.asarray(example.loss_mask)]
        said = chat.parts(chat.prompt_of((asked,)), learned, TOOLS, cut_off=False)
        assert said == TurnParts("So.", turn.content, turn.tool_calls)
    assert not list(warnings_of(config, chat, [], []))


@pytest.mark.parametrize(
    ("tags", "message"),
    [(["<a>"], "thoughts"), (["< a>", "</a>"], "thoughts"), (["<a>", "x" * 101], "thoughts"), ([], "thoughts")],
)
def test_tags_of_thoughts_are_two_texts_without_spaces(tags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"source": "toy:add", "thoughts": tags})


def test_a_base_that_thinks_in_channels_has_no_tags_of_thoughts() -> None:
    with pytest.raises(ConfigError, match=r"data\.thoughts: this.*thinks in channels"):
        Chat.of(SPEAKERS["gpt_oss"].tokenizer(), DataConfig(source="toy:add", thoughts=THINK))


@pytest.mark.parametrize(
    ("tokens", "known"),
    [
        (("<|tool_call|>", "<|/tool_call|>", "<|tool|>", "<|tool_response|>"), False),  # Phi-4-mini
        (("<|START_ACTION|>", "<|END_ACTION|>"), False),
        (("<tool_call>", "</tool_call>", "<tool_response>"), True),
        (("<|tool|>", "<|no_think|>", "/nothink"), True),
    ],
)
def test_a_base_with_tokens_of_calls_that_no_form_has_is_not_known(tokens: tuple[str, ...], known: bool) -> None:
    """Its template lists no tools and writes no calls, and it calls them as it was taught."""
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tokens])
    form = Chat(tokenizer).form
    assert (form.name, form.known, form.strange) == ("hermes", known, ())
    assert ("a way that Motet does not know" in form.told) == (not known)


@pytest.mark.parametrize("added", [None, False, True])
@pytest.mark.parametrize("name", ["qwen3_coder", "qwen25"])
def test_the_tags_that_a_template_writes_around_a_call_leave_with_it(name: str, added: bool | None) -> None:
    """Seed-OSS has its own around the calls of Qwen3-Coder."""
    tokenizer, own = SPEAKERS[name].tokenizer(spelled=True), ("<seed:tool_call>", "</seed:tool_call>")
    for old, new in zip(("<tool_call>", "</tool_call>"), own, strict=True):
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    if added is not None:
        tokenizer.add_tokens([AddedToken(tag, special=added, normalized=False) for tag in own])
    chat = Chat(tokenizer)
    assert (chat.form.name, chat.form.known) == (SPEAKERS[name].form, True)
    text = f"First.\n{written(chat, A)}\n{written(chat, B)}"
    assert own[0] in text
    assert parts(chat, text) == TurnParts("", "First.", (A, B))
