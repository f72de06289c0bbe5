"""`POST …/v1/responses` of the OpenAI protocol, in which agents send the whole conversation each turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from motet.agents.chat_completions import _Extra, call_of, text_of, tool_call_ids
from motet.agents.episode import AgentCall, CallLimits
from motet.agents.structure import grammar_of
from motet.errors import EpisodeRefusal
from motet.tasks.chat import Chat
from motet.types import FinishReason, Message

_IGNORED = frozenset({"reasoning", "item_reference"})


class ResponsesRequest(_Extra):
    """A conversation to go on with."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    train: bool = True

    def conversation(self, chat: Chat) -> list[Message]:
        """The items as messages; a text and the tool calls after it are one turn."""
        if self.previous_response_id is not None:
            raise EpisodeRefusal("previous_response_id: nothing is kept here; send the whole conversation as `input`")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [Message("system", self.instructions)] if self.instructions else []
        for item in items:
            _append(messages, item, chat)
        return messages

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, in the form of chat templates."""
        if self.tool_choice == "none":
            return []
        for tool in self.tools or []:
            if tool.get("type") != "function":
                raise EpisodeRefusal(f"tools: {tool.get('type')!r} is no function, and only functions are offered here")
        fields = ("name", "description", "parameters")
        return [
            {"type": "function", "function": {key: tool[key] for key in fields if key in tool}}
            for tool in self.tools or []
        ]

    @property
    def limits(self) -> CallLimits:
        """Where an answer ends, whether it is trained, and the form that it has to have."""
        grammar = grammar_of((self.text or {}).get("format"), tools=bool(self.offered))
        return CallLimits(self.max_output_tokens, train=self.train, grammar=grammar)


def _append(messages: list[Message], item: dict[str, Any], chat: Chat) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if not isinstance(role := item.get("role"), str):
            raise EpisodeRefusal("input: a message needs a role, a text")
        messages.append(Message("system" if role == "developer" else role, text_of(item.get("content"))))
    elif kind == "function_call":
        call = call_of(str(item.get("name")), str(item.get("arguments", "{}")))
        before = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
        messages.append(Message("assistant", before.content, (*before.tool_calls, call)))
    elif kind == "function_call_output":
        messages.append(Message(chat.tool_role, text_of(item.get("output"))))
    elif str(kind) not in _IGNORED:
        raise EpisodeRefusal(f"input: an item of type {kind!r} is not supported here")


def answer(wanted: ResponsesRequest, calls: list[AgentCall], model: str, created: int, chat: Chat) -> dict[str, Any]:
    """The whole answer."""
    (call,) = calls
    cut_off = call.chunk.finish_reason is FinishReason.LENGTH
    return {
        **_head(wanted, call, model, created),
        "status": "incomplete" if cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": _output(call),
        "usage": {
            "input_tokens": len(call.prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(call.chunk.token_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(call.prompt) + len(call.chunk.token_ids),
        },
    }


def _head(wanted: ResponsesRequest, call: AgentCall, model: str, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "error": None,
        "instructions": wanted.instructions,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": wanted.tool_choice or "auto",
        "tools": wanted.tools or [],
    }


def _output(call: AgentCall) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if call.text or not call.calls:
        content = [{"type": "output_text", "text": call.text, "annotations": [], "logprobs": []}]
        items.append(
            {"type": "message", "id": f"msg_{call.id}", "role": "assistant", "status": "completed", "content": content}
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{name}",
            "call_id": name,
            "name": one.name,
            "arguments": json.dumps(dict(one.arguments)),
            "status": "completed",
        }
        for name, one in tool_call_ids(call)
    ]
    return items


def events(wanted: ResponsesRequest, calls: list[AgentCall], model: str, created: int, chat: Chat) -> Iterator[str]:
    """The answer as server-sent events; each piece comes whole."""
    done = answer(wanted, calls, model, created, chat)
    begun = {**_head(wanted, calls[0], model, created), "status": "in_progress", "output": [], "usage": None}
    for number, (kind, fields) in enumerate(_pieces(done, begun)):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n"


def _pieces(done: dict[str, Any], begun: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(done["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            yield (
                "response.output_item.added",
                {"output_index": index, "item": {**item, "status": "in_progress", "content": []}},
            )
            (part,) = item["content"]
            where = {**at, "content_index": 0}
            yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**where, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**where, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**where, "part": part}
        else:
            yield (
                "response.output_item.added",
                {"output_index": index, "item": {**item, "status": "in_progress", "arguments": ""}},
            )
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        yield "response.output_item.done", {"output_index": index, "item": item}
    end = "response.completed" if done["status"] == "completed" else "response.incomplete"
    yield end, {"response": done}
