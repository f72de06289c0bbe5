"""Responses of the OpenAI API, with the whole conversation in each request."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from motet.chat.completer import (
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
    text_of,
)
from motet.chat.structure import grammar_of
from motet.core.errors import ChatRefusal
from motet.core.types import Message, ToolCall

_MOST_ITEMS = 2 * MOST_MESSAGES
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
        """The conversation of the request; a text and the tool calls after it form one turn."""
        if self.previous_response_id is not None:
            raise ChatRefusal("previous_response_id: nothing is kept here; send the whole conversation as `input`")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        check_arguments(str(item.get("arguments", "")) for item in items)
        messages = [Message("system", self.instructions)] if self.instructions else []
        calls: list[ToolCall] = []
        for item in items:
            if item.get("type") == "function_call":
                calls.append(call_of(str(item.get("name")), str(item.get("arguments", "{}"))))
            elif (message := _read_item(item)) is not None:
                _add_calls(messages, calls)
                messages.append(message)
        _add_calls(messages, calls)
        tools = [] if self.tool_choice == "none" else [_function(tool) for tool in self.tools or ()]
        grammar = grammar_of((self.text or {}).get("format"), tools=bool(tools))
        limits = CallLimits(self.max_output_tokens, train=self.train, grammar=grammar)
        return Conversation(tuple(messages), tools, limits, stream=bool(self.stream))

    def answer(self, reply: Reply, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """The whole answer."""
        (one,) = answers
        cut_off, sampled = one.finish == "length", len(one.token_ids)
        return {
            **self._head(reply),
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": list(_output(reply, one)),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
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
        answer, part = AnswerPiece(0, reply.id), {"output_index": 0, "item_id": f"msg_{reply.id}", "content_index": 0}
        async for piece in reply.pieces:
            empty = not answer.text
            answer.add(piece)
            if piece.text or (piece.finish and not answer.text and not piece.calls):
                if empty:
                    item = {**_message(reply, ""), "status": "in_progress", "content": []}
                    yield "response.output_item.added", {"output_index": 0, "item": item}
                    yield "response.content_part.added", {**part, "part": _text("")}
                yield "response.output_text.delta", {**part, "delta": piece.text, "logprobs": []}
        done = self.answer(reply, [answer])
        for index, item in enumerate(done["output"]):
            if item["type"] == "message":
                yield "response.output_text.done", {**part, "text": answer.text, "logprobs": []}
                yield "response.content_part.done", {**part, "part": _text(answer.text)}
            else:
                place, given = {"output_index": index, "item_id": item["id"]}, item["arguments"]
                added = {**item, "status": "in_progress", "arguments": ""}
                yield "response.output_item.added", {"output_index": index, "item": added}
                yield "response.function_call_arguments.delta", {**place, "delta": given}
                yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": given}
            yield "response.output_item.done", {"output_index": index, "item": item}
        end = "response.completed" if done["status"] == "completed" else "response.incomplete"
        yield end, {"response": done}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat templates."""
    check_function(tool.get("type"), tool)
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in fields if key in tool}}


def _add_calls(messages: list[Message], calls: list[ToolCall]) -> None:
    """Add tool calls to the turn before them, all at once."""
    if calls:
        before = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
        messages.append(Message("assistant", before.content, (*before.tool_calls, *calls)))
        calls.clear()


def _read_item(item: dict[str, Any]) -> Message | None:
    """An item that is a message; None for one that the model does not read."""
    kind = item.get("type", "message")
    if kind == "message":
        if (role := item.get("role")) not in _ROLES:
            raise ChatRefusal(f"input: a message needs a role, one of {', '.join(_ROLES)}; it has {role!r:.80}")
        return Message("system" if role == "developer" else role, text_of(item.get("content")))
    if kind == "function_call_output":
        return Message("tool", text_of(item.get("output")))
    if kind != "reasoning":
        raise ChatRefusal(f"input: an item of type {kind!r:.80} is not supported here")
    return None


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(reply: Reply, text: str) -> dict[str, Any]:
    head = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
    return {**head, "content": [_text(text)]}


def _output(reply: Reply, answer: AnswerPiece) -> Iterator[dict[str, Any]]:
    if answer.text or not answer.calls:
        yield _message(reply, answer.text)
    for name, call in answer.named_calls:
        yield {
            "type": "function_call",
            "id": f"fc_{name}",
            "call_id": name,
            "name": call.name,
            "arguments": arguments_of(call),
            "status": "completed",
        }
