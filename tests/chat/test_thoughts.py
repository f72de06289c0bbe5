"""Thoughts and calls of all forms at the doors: stock clients read them, and send them back for the template to write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from motet.chat.template import Chat
from motet.chat.turn_stream import SpokenPart, SpokenTurn
from motet.core.types import Chunk, FinishReason, Message, ToolCall
from motet.service.database.tenants import Principal
from tests.support.chat_templates import tokenizer_of
from tests.support.house import House
from tests.support.scripted_service import Says, scripted_service
from tests.support.speaking_bases import SPEAKERS

if TYPE_CHECKING:
    import anthropic

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "add", "description": "", "parameters": SCHEMA, "strict": False}
CLAUDES: Any = {"name": "add", "description": "", "input_schema": SCHEMA}
HI: Any = {"role": "user", "content": "hi"}
CALL = ToolCall("add", {"a": 1})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
THINKS = "I could call <tool_call>{}</tool_call> äö."
CHANNEL = "<|channel|>{}<|message|>{}"
TURNS = {
    "chatml": (f"See.\n{HERMES}", "", "See."),
    "qwen3": (f"<think>\n{THINKS}\n</think>\n\nSee.\n{HERMES}", THINKS, "See."),
    "qwen3.5": (f"{THINKS}\n</think>\n\nSee.\n{XML}", THINKS, "See."),
    "glm": (
        f"<think>{THINKS}</think>\nSee.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        THINKS,
        "See.",
    ),
    "llama3": ('{"name": "add", "parameters": {"a": 1}}', "", ""),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", ""),
    "gpt-oss": (
        f"{CHANNEL.format('analysis', THINKS)}<|end|><|start|>assistant"
        + CHANNEL.format("commentary to=functions.add", '{"a": 1}')
        + "<|call|>",
        THINKS,
        "",
    ),
}
"""By base: a turn, its thought and its speech; each calls the same tool."""


def spoken(chat: Chat, ids: list[int], step: int, end: int) -> list[SpokenPart]:
    """What a turn says, read so many tokens at a time."""
    turn = SpokenTurn(chat, chat.prompt_of([Message("user", "hi")], [TOOL]), [TOOL], ())
    whole, parts = [*ids, end], list[SpokenPart]()
    for at in range(0, len(whole), step):
        tokens, nothing = np.array(whole[at : at + step], np.int32), np.zeros(0, np.float32)
        ends = FinishReason.STOP if at + step >= len(whole) else None
        parts.append(asyncio.run(turn.read(Chunk(0, tokens, nothing, nothing.astype(np.int32), "", ends))))
    return parts


@pytest.mark.parametrize("base", TURNS)
def test_pieces_of_a_turn_are_the_whole_for_any_cut(base: str) -> None:
    tokenizer = tokenizer_of(base)
    chat, (text, thought, speech) = Chat.plain(tokenizer), TURNS[base]
    ids = tokenizer.encode(text, add_special_tokens=False)
    (whole,) = spoken(chat, ids, len(ids) + 1, tokenizer.eos_token_id)
    assert (whole.parts.thought, whole.parts.speech, whole.parts.calls) == (thought, speech, (CALL,))
    assert whole.thought_tokens >= len(tokenizer.encode(thought, add_special_tokens=False))
    for step in (1, 2, 7, 31):
        pieces = spoken(chat, ids, step, tokenizer.eos_token_id)
        blocks = [block for piece in pieces for block in piece.blocks]
        for kind in ("thought", "text"):
            joined = ("".join(text for one, text in some if one == kind) for some in (blocks, whole.blocks))
            assert len(set(joined)) == 1, (step, kind)
        assert (pieces[-1].calls, pieces[-1].unread) == (whole.calls, whole.unread)
        assert sum(piece.thought_tokens for piece in pieces) == whole.thought_tokens


@pytest.mark.parametrize(("opens", "form"), [("<tool_call>", "hermes"), ("<call>", None)])
def test_a_base_whose_form_is_not_known_says_so(tmp_path: Path, opens: str, form: str | None) -> None:
    tokenizer = SPEAKERS["qwen25"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", opens)
    with scripted_service(tmp_path, tokenizer, tokenizer.eos_token_id) as (house, engine):
        listed, shown = house.ask("GET", "/v1/models").json()["data"][0], house.ask("GET", "/v1/models/small").json()
    assert (listed["id"], listed.get("tool_format"), shown.get("tool_format")) == ("small", form, form)
    told = [note for note in engine.notes if "writes thoughts and tool calls is not known" in note]
    assert len(told) == (form is None)
    assert [one["note"] for one in (listed, shown) if "note" in one] == 2 * told


@pytest.fixture(scope="module", params=TURNS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, House, Says]]:
    """A service with a base that speaks a form."""
    tokenizer = tokenizer_of(request.param)
    with scripted_service(tmp_path_factory.mktemp("service"), tokenizer, tokenizer.eos_token_id) as (house, engine):
        yield request.param, house, engine


@pytest.fixture(scope="module")
def stock(served: tuple[str, House, Says]) -> Iterator[openai.OpenAI]:
    _, house, _ = served
    url = f"{house.http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key=house.keys["ours"], max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: tuple[str, House, Says]) -> Iterator[anthropic.Anthropic]:
    import anthropic  # takes two seconds

    _, house, _ = served
    with anthropic.Anthropic(base_url=str(house.http.base_url), api_key=house.keys["ours"], max_retries=0) as client:
        yield client


def n_tokens(base: str, text: str) -> int:
    return len(tokenizer_of(base).encode(text, add_special_tokens=False))


def history(base: str) -> str:
    """What the model reads after the result of its call."""
    _, thought, speech = TURNS[base]
    said = Message("assistant", speech, (CALL,), thought=thought)
    chat = Chat.plain(tokenizer_of(base))
    messages = chat.opening([Message("user", "hi"), said, Message("tool", "2", name="add")], [TOOL])
    return str(chat.tokenizer.decode(chat.prompt_of(messages, [TOOL]).tolist()))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_tell_thoughts_and_read_them_again(
    served: tuple[str, House, Says], stock: openai.OpenAI, stream: bool
) -> None:
    base, _, model = served
    text, thought, speech = TURNS[base]
    model.texts = [text, "Two."]

    def chat(messages: list[Any]) -> Any:
        asked: Any = {"model": "small", "messages": messages, "tools": [TOOL]}
        if not stream:
            return stock.chat.completions.create(**asked)
        with stock.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
            deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk" and event.chunk.choices]
            if thought and messages == [HI]:
                assert sum(bool(getattr(delta, "reasoning_content", None)) for delta in deltas) > 1
            return events.get_final_completion()

    first = chat([HI])
    (choice,) = first.choices
    message = choice.message.to_dict()
    assert message.get("reasoning_content", "") == thought
    assert (message["content"] or "", choice.finish_reason) == (speech, "tool_calls")
    details = first.usage.completion_tokens_details
    assert (details.reasoning_tokens if details else 0) >= n_tokens(base, thought)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    names = "role", "content", "reasoning_content", "tool_calls"
    said = {name: message[name] for name in names if name in message}
    for one in said["tool_calls"]:
        one["function"] = {name: one["function"][name] for name in ("name", "arguments")}
    chat([HI, said, {"role": "tool", "tool_call_id": call.id, "content": "2"}])
    assert model.read[-1] == history(base)
    if thought and not stream:  # as vLLM names it
        model.texts = ["Two."]
        said["reasoning"] = said.pop("reasoning_content")
        chat([HI, said, {"role": "tool", "tool_call_id": call.id, "content": "2"}])
        assert model.read[-1] == history(base)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_without_an_end_has_no_answer_and_says_so(
    served: tuple[str, House, Says], stock: openai.OpenAI, claude: anthropic.Anthropic, stream: bool
) -> None:
    base, house, model = served
    text, thought, _ = TURNS[base]
    if not thought or base == "gpt-oss":  # whose end of a turn ends its thought too
        return
    model.texts = [text.partition(" äö")[0]] * 3
    asked = {"model": "small", "max_tokens": 900, "stream": stream}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {**asked, "messages": [HI], "response_format": schema}
    told = house.ask("POST", "/v1/chat/completions", json=body).text
    assert "a thought has no end" in told
    assert '"stop"' in told
    assert "answer: %json" in model.requests[-1].sampling.grammar, "what the schema binds comes after the thought"
    assert (
        "a thought has no end"
        in house.ask("POST", "/v1/responses", json={**asked, "max_tokens": None, "input": "hi"}).text
    )
    (block,) = claude.messages.create(model="small", max_tokens=20, messages=[HI]).content[:-1]
    assert block.type == "thinking"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_tell_thoughts_and_read_them_again(
    served: tuple[str, House, Says], stock: openai.OpenAI, stream: bool
) -> None:
    base, _, model = served
    text, thought, speech = TURNS[base]
    model.texts = [text, "Two."]

    def respond(items: Any) -> Any:
        asked: Any = {"model": "small", "input": items, "tools": [FLAT]}
        if not stream:
            return stock.responses.create(**asked)
        with stock.responses.stream(**asked) as events:
            told = "".join(one.delta for one in events if one.type == "response.reasoning_text.delta")
            assert told == thought or len(items) > 1
            return events.get_final_response()

    first = respond([HI])
    output = [item.to_dict() for item in first.output]
    assert [one["type"] for one in output] == ["reasoning"] * bool(thought) + ["message"] * bool(speech) + [
        "function_call"
    ]
    assert first.output_text == speech
    assert first.usage.output_tokens_details.reasoning_tokens >= n_tokens(base, thought)
    if thought:
        assert output[0]["content"] == [{"type": "reasoning_text", "text": thought}]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "2"}
    respond([HI, *output, result])
    assert model.read[-1] == history(base)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tell_thoughts_and_read_them_again(
    served: tuple[str, House, Says], claude: anthropic.Anthropic, stream: bool
) -> None:
    base, _, model = served
    text, thought, speech = TURNS[base]
    model.texts = [text, "Two."]

    def send(messages: list[Any]) -> Any:
        asked: Any = {"model": "small", "max_tokens": 900, "messages": messages, "tools": [CLAUDES]}
        if not stream:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as events:
            told = "".join(event.thinking for event in events if event.type == "thinking")
            assert told == thought or len(messages) > 1
            return events.get_final_message()

    first = send([HI])
    content = [block.to_dict() for block in first.content]
    assert [one["type"] for one in content] == ["thinking"] * bool(thought) + ["text"] * bool(speech) + ["tool_use"]
    if thought:
        assert content[0]["thinking"] == thought
        assert content[0]["signature"]
        assert first.usage.output_tokens_details.thinking_tokens >= n_tokens(base, thought)
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "2"}
    send([HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}])
    assert model.read[-1] == history(base)


def test_a_version_reads_the_template_as_its_job_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    with scripted_service(tmp_path, tokenizer, tokenizer.eos_token_id) as (house, model):
        ours = Principal.member_of(house.store.tenants.made("us").id)
        job = house.store.job(ours, "ended")
        assert job is not None
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        house.store.change_job(job.id, spec={**job.spec, "data": {"source": "toy:add", **kwargs}})
        model.texts = ["Two."] * 2
        for name in ("ended@best", "small"):
            answer = house.ask("POST", "/v1/chat/completions", json={"model": name, "messages": [HI]})
            assert answer.is_success, answer.text
    assert [text.endswith("<think>\n\n</think>\n\n") for text in model.read] == [True, False]
