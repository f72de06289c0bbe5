"""Responses of the OpenAI API, with the whole conversation in each request."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from motet.chat.completer import (
    MESSAGE_ID,
    MOST_MESSAGES,
    RESPONSE_ID,
    AnswerPiece,
    CallLimits,
    ChatFormat,
    Conversation,
    Reply,
    arguments_of,
    call_of,
    check_arguments,
    check_function,
    event,
    shown,
    text_of,
)
from motet.chat.structure import grammar_of
from motet.core.errors import ChatRefusal
from motet.core.types import Message, ToolCall

_MOST_ITEMS = 2 * MOST_MESSAGES
_LONGEST_NOTE = 512
"""Of a value in `metadata`, by OpenAI's description."""
_ROLES = ("user", "assistant", "system", "developer")
Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=_MOST_ITEMS, fail_fast=True)]


class ResponsesRequest(ChatFormat):
    """A conversation to continue."""

    input: Annotated[str, Field(min_length=1)] | Items
    instructions: str | None = None
    tool_choice: Any = None
    """`none` hides the tools from the model; other choices are not enforced."""
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    """Refused: no response is kept."""
    text: dict[str, Any] | None = None
    """`format` is `json_schema`, `json_object` or `text`, as in Chat Completions."""

    def conversation(self) -> Conversation:
        """The conversation of the request; a thought, a text and tool calls after each other form one turn."""
        if self.previous_response_id is not None:
            raise ChatRefusal("previous_response_id: nothing is kept here; send the whole conversation as `input`")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        check_arguments(str(item.get("arguments", "")) for item in items)
        tools = [] if self.tool_choice == "none" else [_function(tool) for tool in self.tools or ()]
        grammar = grammar_of((self.text or {}).get("format"))
        limits = CallLimits(self.max_output_tokens, train=self.train, grammar=grammar)
        instructions = [Message("system", self.instructions)] if self.instructions else []
        return Conversation((*instructions, *_messages(items)), tools, limits, stream=bool(self.stream))

    def answer(self, reply: Reply, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """The whole answer."""
        (answer,) = answers
        cut_off, sampled = answer.finish == "length", len(answer.token_ids)
        return {
            **self._head(reply),
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": list(_output(reply, answer)),
            "metadata": {"unread": answer.unread[:_LONGEST_NOTE]} if answer.unread else {},
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }

    def _head(self, reply: Reply) -> dict[str, Any]:
        return {
            "id": f"{RESPONSE_ID}{reply.id}",
            "object": "response",
            "created_at": reply.created,
            "model": reply.model,
            "error": None,
            "instructions": self.instructions,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
        }

    async def events(self, reply: Reply) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        numbers = itertools.count()
        async for kind, fields in self._steps(reply):
            yield event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    async def _steps(self, reply: Reply) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        begun = {**self._head(reply), "status": "in_progress", "output": [], "usage": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        answer, index, opened = AnswerPiece(0, reply.id), -1, ""
        place: dict[str, Any] = {}
        async for kind, text in shown(reply.pieces, answer):
            if kind != opened:
                for step in _ended(reply, index, answer):
                    yield step
                index, opened = index + 1, kind
                item = _item(reply, kind, "", index)
                place = {"output_index": index, "item_id": item["id"], "content_index": 0}
                added = {**item, "status": "in_progress", "content": []}
                yield "response.output_item.added", {"output_index": index, "item": added}
                yield "response.content_part.added", {**place, "part": _part(kind, "")}
            yield _event(kind, "delta"), {**place, "delta": text, **_LOGPROBS[kind]}
        for step in _ended(reply, index, answer):
            yield step
        done = self.answer(reply, [answer])
        for at, item in enumerate(done["output"][index + 1 :], index + 1):
            called, given = {"output_index": at, "item_id": item["id"]}, item["arguments"]
            added = {**item, "status": "in_progress", "arguments": ""}
            yield "response.output_item.added", {"output_index": at, "item": added}
            yield "response.function_call_arguments.delta", {**called, "delta": given}
            yield "response.function_call_arguments.done", {**called, "name": item["name"], "arguments": given}
            yield "response.output_item.done", {"output_index": at, "item": item}
        end = "response.completed" if done["status"] == "completed" else "response.incomplete"
        yield end, {"response": done}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat templates."""
    check_function(tool.get("type"), tool)
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in fields if key in tool}}


_LOGPROBS: Mapping[str, dict[str, Any]] = {"thought": {}, "text": {"logprobs": []}}
"""What events about a block have besides its letters."""
_GOES_ON = frozenset({
    ("reasoning", "reasoning"), ("reasoning", "text"), ("text", "reasoning"), ("reasoning", "function_call"),
    ("text", "function_call"), ("function_call", "function_call"),
})  # fmt: skip
"""Kinds of items that follow each other within one turn of the assistant."""


def _messages(items: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """The turns of a conversation."""
    turns, before = list[_Turn](), ""
    called: dict[str, str] = {}
    """The names of the tools that were called, by the ids of the calls."""
    for item in items:
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise ChatRefusal(f"input: an item of type {kind!r:.80} is not supported here")
        if kind == "message" and item.get("role") == "assistant":
            kind = "text"
        if kind == "reasoning" and not _thought(item):
            continue
        if (before, kind) not in _GOES_ON:
            turns.append(_Turn())
        turns[-1].read(item, kind, called)
        before = kind
    return (turn.message for turn in turns)


@dataclass
class _Turn:
    """One turn while its items are read."""

    role: str = "assistant"
    name: str = ""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def read(self, item: dict[str, Any], kind: str, called: dict[str, str]) -> None:
        """Add an item."""
        if kind in ("message", "text"):
            if (role := item.get("role")) not in _ROLES:
                raise ChatRefusal(f"input: a message needs a role, one of {', '.join(_ROLES)}; it has {role!r:.80}")
            self.role = "system" if role == "developer" else role
            self.texts.append(text_of(item.get("content")))
        elif kind == "function_call":
            self.calls.append(call_of(str(item.get("name")), str(item.get("arguments", "{}"))))
            called[str(item.get("call_id"))] = self.calls[-1].name
        elif kind == "function_call_output":
            self.role, self.name = "tool", called.get(str(item.get("call_id")), "")
            self.texts.append(text_of(item.get("output")))
        elif kind == "reasoning":
            self.thoughts.append(_thought(item))
        else:
            raise ChatRefusal(f"input: an item of type {kind!r:.80} is not supported here")

    @property
    def message(self) -> Message:
        """The turn in the form of chat templates."""
        thought = "".join(self.thoughts)
        return Message(self.role, "".join(self.texts), tuple(self.calls), self.name, thought=thought)


def _thought(item: dict[str, Any]) -> str:
    return text_of(item.get("content")) or text_of(item.get("summary"))


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(kind: str, step: str) -> str:
    return f"response.{_part(kind, '')['type']}.{step}"


def _item(reply: Reply, kind: str, text: str, number: int) -> dict[str, Any]:
    """A thought or a text as an item; `number` counts the blocks before it."""
    name = f"{reply.id}_{number}" if number > 1 else reply.id
    shared = {"status": "completed", "content": [_part(kind, text)]}
    if kind == "thought":
        return {"type": "reasoning", "id": f"rs_{name}", "summary": [], **shared}
    return {"type": "message", "id": f"{MESSAGE_ID}{name}", "role": "assistant", **shared}


def _ended(reply: Reply, index: int, answer: AnswerPiece) -> Iterator[tuple[str, dict[str, Any]]]:
    """The end of a thought or a text that is whole, if there is one."""
    if index < 0:
        return
    kind, text = answer.shown[index]
    item = _item(reply, kind, text, index)
    place = {"output_index": index, "item_id": item["id"], "content_index": 0}
    yield _event(kind, "done"), {**place, "text": text, **_LOGPROBS[kind]}
    yield "response.content_part.done", {**place, "part": _part(kind, text)}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _output(reply: Reply, answer: AnswerPiece) -> Iterator[dict[str, Any]]:
    for number, (kind, text) in enumerate(answer.shown):
        yield _item(reply, kind, text, number)
    for name, call in answer.named_calls:
        yield {
            "type": "function_call",
            "id": f"fc_{name}",
            "call_id": name,
            "name": call.name,
            "arguments": arguments_of(call),
            "status": "completed",
        }
