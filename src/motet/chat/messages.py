"""Messages of the Anthropic API, in which tools are called and answered by blocks of a message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from motet.chat.completer import (
    MESSAGE_ID,
    MOST_MESSAGES,
    AnswerPiece,
    CallLimits,
    ChatFormat,
    Conversation,
    Extra,
    Reply,
    arguments_of,
    event,
    shown,
)
from motet.core.errors import ChatRefusal
from motet.core.plain_json import as_json
from motet.core.stops import few
from motet.core.types import Message, ToolCall

Blocks = str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_MOST_BLOCKS = 2 * MOST_MESSAGES
"""Most blocks of a request; each result of a tool becomes a message."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
_SIGNATURE = "bW90ZXQ="
"""Of thoughts, which clients send back as they are; nothing is signed here."""


class ToolChoice(Extra):
    """`none` hides the tools from the model; other choices are not enforced."""

    type: str = "auto"


class AnthropicMessage(Extra):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesRequest(ChatFormat):
    """A conversation to continue."""

    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: Blocks | None = None
    tool_choice: ToolChoice | None = None
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str] | None, BeforeValidator(few)] = None

    def conversation(self) -> Conversation:
        """The conversation of the request; each result of a tool becomes a message."""
        n_blocks = sum(len(message.content) for message in self.messages if isinstance(message.content, list))
        if n_blocks > _MOST_BLOCKS:
            raise ChatRefusal(f"messages: they have {n_blocks} blocks; the limit is {_MOST_BLOCKS}")
        if self.messages[-1].role == "assistant":
            raise ChatRefusal("messages: an assistant's last turn is not continued here; end with a user's")
        system = [Message("system", _text_of(self.system))] if self.system else []
        called: dict[str, str] = {}
        hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        return Conversation(
            (*system, *(message for turn in self.messages for message in _messages(turn, called))),
            () if hidden else [_function(tool) for tool in self.tools or ()],
            CallLimits(self.max_tokens, tuple(self.stop_sequences or ()), self.train),
            stream=bool(self.stream),
        )

    def answer(self, reply: Reply, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """The whole answer."""
        (turn,) = answers
        ends = "stop_sequence" if turn.stopped else "end_turn"
        if turn.calls or turn.finish == "length":
            ends = "tool_use" if turn.calls else "max_tokens"
        uses = (
            {"type": "tool_use", "id": name, "name": call.name, "input": as_json(call.arguments)}
            for name, call in turn.named_calls
        )
        sampled: dict[str, Any] = {"input_tokens": reply.prompt_tokens, **_sampled(turn)}
        head = {**_head(reply), "stop_reason": ends, "stop_sequence": turn.stopped if ends == "stop_sequence" else None}
        said = (_block(kind, text) for kind, text in turn.shown)
        return {**head, "content": [*said, *uses], "usage": sampled}

    async def events(self, reply: Reply) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        async for kind, fields in self._steps(reply):
            yield event({"type": kind, **fields}, kind)

    async def _steps(self, reply: Reply) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        used = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
        begun = {**_head(reply), "stop_reason": None, "stop_sequence": None, "content": [], "usage": used}
        yield "message_start", {"message": begun}
        answer, index, opened = AnswerPiece(0, reply.id), -1, ""
        async for kind, text in shown(reply.pieces, answer):
            if kind != opened:
                for step in _ended(index, opened):
                    yield step
                index, opened = index + 1, kind
                yield "content_block_start", {"index": index, "content_block": _block(kind, "")}
            yield "content_block_delta", {"index": index, "delta": _delta(kind, text)}
        for step in _ended(index, opened):
            yield step
        done = self.answer(reply, [answer])
        for at, (call, use) in enumerate(zip(answer.calls, done["content"][index + 1 :], strict=True), index + 1):
            given = {"type": "input_json_delta", "partial_json": arguments_of(call)}
            yield "content_block_start", {"index": at, "content_block": {**use, "input": {}}}
            yield "content_block_delta", {"index": at, "delta": given}
            yield "content_block_stop", {"index": at}
        end = {name: done[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"delta": end, "usage": _sampled(answer)}
        yield "message_stop", {}


def _block(kind: str, text: str) -> dict[str, Any]:
    if kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if text else ""}
    return {"type": "text", "text": text}


def _delta(kind: str, text: str) -> dict[str, Any]:
    return {"type": "thinking_delta", "thinking": text} if kind == "thought" else {"type": "text_delta", "text": text}


def _ended(index: int, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The end of a block, if one is open."""
    if kind == "thought":
        yield "content_block_delta", {"index": index, "delta": {"type": "signature_delta", "signature": _SIGNATURE}}
    if kind:
        yield "content_block_stop", {"index": index}


def _sampled(answer: AnswerPiece) -> dict[str, Any]:
    """Usage of an answer."""
    n_thought = answer.thought_tokens
    details = {"output_tokens_details": {"thinking_tokens": n_thought}} if n_thought else {}
    return {"output_tokens": len(answer.token_ids), **details}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"{MESSAGE_ID}{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _field(block: dict[str, Any], name: str, kind: type) -> Any:
    """A field of a block. Raises ChatRefusal if it is missing, or not of this type."""
    if not isinstance(block.get(name), kind):
        what = "a text" if kind is str else "an object"
        raise ChatRefusal(f"content: a block of type {block.get('type')!r:.80} needs `{name}`, {what}")
    return block[name]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat templates."""
    if not isinstance(tool.get("name"), str):
        raise ChatRefusal("tools: one has no name; give each a text")
    if "input_schema" not in tool:
        raise ChatRefusal(f"tools: {tool['name']!r:.80} has no input_schema; only functions are offered")
    about = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": about}


def _messages(message: AnthropicMessage, called: dict[str, str]) -> Iterator[Message]:
    """`called` has the names of the tools that were called so far, by the ids of the calls."""
    text: list[dict[str, Any]] = [{"type": "text", "text": message.content}]
    blocks = text if isinstance(message.content, str) else message.content
    calls: list[ToolCall] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            name = called.get(str(block.get("tool_use_id")), "")
            yield Message("tool", _text_of(block.get("content")), name=name)
        elif block.get("type") == "tool_use":
            calls.append(ToolCall(_field(block, "name", str), _field(block, "input", dict)))
            called[str(block.get("id"))] = calls[-1].name
    thinks = message.role == "assistant"
    thoughts = [_field(block, "thinking", str) for block in blocks if thinks and block.get("type") == "thinking"]
    said = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", *_THOUGHTS)]
    if said or calls or thoughts:
        yield Message(message.role, _text_of(said), tuple(calls), thought="".join(thoughts))


def _text_of(blocks: Any) -> str:
    if blocks is None or isinstance(blocks, str):
        return blocks or ""
    if not isinstance(blocks, list):
        raise ChatRefusal(f"content: {blocks!r:.80} is neither text nor a list of blocks")
    for block in blocks:
        if not isinstance(block, dict):
            raise ChatRefusal(f"content: {block!r:.80} is no block; a block is an object with a type")
        if block.get("type") != "text":
            raise ChatRefusal(f"content: a block of type {block.get('type')!r:.80} is not supported; send text only")
    return "".join(_field(block, "text", str) for block in blocks)
