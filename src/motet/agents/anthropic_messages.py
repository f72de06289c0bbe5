"""`POST …/v1/messages` of the Anthropic protocol, in which tools are called and answered by blocks of a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from motet.agents.chat_completions import _Extra, tool_call_ids
from motet.agents.episode import AgentCall, CallLimits
from motet.errors import EpisodeRefusal
from motet.stops import few
from motet.tasks.chat import Chat
from motet.types import FinishReason, Message, ToolCall

Blocks = str | list[dict[str, Any]]
_UNREAD = frozenset({"thinking", "redacted_thinking"})


class ToolChoice(_Extra):
    """Whether tools are offered; that one is called is not enforced."""

    type: str = "auto"


class AnthropicMessage(_Extra):
    """One message."""

    role: Literal["user", "assistant"]
    content: Blocks


class MessagesRequest(_Extra):
    """A conversation to go on with."""

    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str] | None, BeforeValidator(few)] = None
    stream: bool | None = None
    train: bool = True

    def conversation(self, chat: Chat) -> list[Message]:
        """The messages as templates take them; what a tool answered is one of its own."""
        system = [Message("system", _text(self.system))] if self.system else []
        return [*system, *(message for one in self.messages for message in _messages(one, chat))]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, in the form of chat templates."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [_function(tool) for tool in self.tools or []]

    @property
    def limits(self) -> CallLimits:
        """Where an answer ends, whether it is trained, and the form that it has to have."""
        return CallLimits(self.max_tokens, tuple(self.stop_sequences or ()), self.train)


def _field(block: dict[str, Any], name: str, kind: type) -> Any:
    """A field that a block of its type has.

    Raises:
        EpisodeRefusal: it does not, or another kind of value.
    """
    if not isinstance(block.get(name), kind):
        what = "a text" if kind is str else "an object"
        raise EpisodeRefusal(f"content: a block of type {block.get('type')!r} needs `{name}`, {what}")
    return block[name]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise EpisodeRefusal("tools: one has no name; give each a text")
    if "input_schema" not in tool:
        raise EpisodeRefusal(f"tools: {tool['name']!r} has no input_schema; only functions are offered")
    about = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": about}


def _messages(one: AnthropicMessage, chat: Chat) -> Iterator[Message]:
    text: list[dict[str, Any]] = [{"type": "text", "text": one.content}]
    blocks = text if isinstance(one.content, str) else one.content
    for block in blocks:
        if block.get("type") == "tool_result":
            yield Message(chat.tool_role, _text(block.get("content")))
    calls = tuple(
        ToolCall(_field(block, "name", str), _field(block, "input", dict))
        for block in blocks
        if block.get("type") == "tool_use"
    )
    said = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", *_UNREAD)]
    if said or calls:
        yield Message(one.role, _text(said), calls)


def _text(blocks: Any) -> str:
    if blocks is None or isinstance(blocks, str):
        return blocks or ""
    if not isinstance(blocks, list):
        raise EpisodeRefusal(f"content: {blocks!r:.80} is neither text nor a list of blocks")
    for block in blocks:
        if not isinstance(block, dict):
            raise EpisodeRefusal(f"content: {block!r:.80} is no block; a block is an object with a type")
        if block.get("type") != "text":
            raise EpisodeRefusal(
                f"content: a block of type {block.get('type')!r} is no text, which is all that is read here"
            )
    return "".join(_field(block, "text", str) for block in blocks)


def answer(wanted: MessagesRequest, calls: list[AgentCall], model: str, created: int, chat: Chat) -> dict[str, Any]:
    """The whole answer."""
    (call,) = calls
    return {
        **_head(call, model),
        "content": _blocks(call),
        "stop_reason": _stop_reason(call),
        "usage": {"input_tokens": len(call.prompt), "output_tokens": len(call.chunk.token_ids)},
    }


def _head(call: AgentCall, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _stop_reason(call: AgentCall) -> str:
    if call.chunk.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if call.calls else "end_turn"


def _blocks(call: AgentCall) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": call.text}] if call.text or not call.calls else []
    used = (
        {"type": "tool_use", "id": name, "name": one.name, "input": dict(one.arguments)}
        for name, one in tool_call_ids(call)
    )
    return [*text, *used]


def events(wanted: MessagesRequest, calls: list[AgentCall], model: str, created: int, chat: Chat) -> Iterator[str]:
    """The answer as server-sent events; each block comes whole."""
    for kind, fields in _pieces(answer(wanted, calls, model, created, chat)):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _pieces(done: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {**done["usage"], "output_tokens": 0}
    yield "message_start", {"message": {**done, "content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(done["content"]):
        if block["type"] == "text":
            begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield "content_block_start", {"index": index, "content_block": begun}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    end = {"stop_reason": done["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"delta": end, "usage": {"output_tokens": done["usage"]["output_tokens"]}}
    yield "message_stop", {}
