"""Chat Completions of the OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from motet.chat.completer import (
    MOST_MESSAGES,
    AnswerPiece,
    CallLimits,
    ChatFormat,
    Conversation,
    Extra,
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
from motet.core.stops import few
from motet.core.types import Message


class Function(Extra):
    """The function of a tool call."""

    name: str
    arguments: str = "{}"


class CalledTool(Extra):
    """A call in a message."""

    id: str | None = None
    function: Function


class ChatMessage(Extra):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: list[CalledTool] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What an assistant thought before `content`."""
    reasoning: str | None = None
    """Another name of `reasoning_content`, as vLLM writes it."""

    def plain(self, called: Mapping[str, str]) -> Message:
        """The message in the form of chat templates; `called` has the names of tools by the ids of their calls."""
        if {name: value for name, value in (self.model_extra or {}).items() if name in ("prefix", "partial") and value}:
            raise ChatRefusal("messages: the last turn is not continued here, so leave out `prefix` and `partial`")
        calls = (call_of(call.function.name, call.function.arguments) for call in self.tool_calls or ())
        role = "system" if self.role == "developer" else self.role
        name = called.get(self.tool_call_id or "", "") if role == "tool" else ""
        thought = (self.reasoning_content or self.reasoning or "") if role == "assistant" else ""
        return Message(role, text_of(self.content), tuple(calls), name, thought=thought)


class StreamOptions(Extra):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(ChatFormat):
    """A conversation to continue."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    tool_choice: Any = None
    """`none` hides the tools from the model; other choices are not enforced."""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[str | list[str] | None, BeforeValidator(few)] = None
    n: int | None = Field(None, ge=1, le=16)
    logprobs: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` to the answer and `token_ids` to each choice, as vLLM does."""
    response_format: dict[str, Any] | None = None
    """`json_schema`, `json_object` or `text`: only tokens that keep to the schema are sampled."""

    def conversation(self) -> Conversation:
        """The conversation of the request."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        check_arguments(call.function.arguments for call in calls)
        called = {call.id: call.function.name for call in calls if call.id}
        for tool in self.tools or ():
            check_function(tool.get("type"), tool.get("function"))
        tools = () if self.tool_choice == "none" else self.tools or ()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        grammar = grammar_of(self.response_format)
        return Conversation(
            tuple(message.plain(called) for message in self.messages),
            tools,
            CallLimits(self.max_completion_tokens or self.max_tokens, stop, self.train, grammar),
            n=self.n or 1,
            stream=bool(self.stream),
            logprobs=bool(self.logprobs),
            token_ids=bool(self.return_token_ids),
        )

    def answer(self, reply: Reply, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {"index": piece.index, "message": _said(piece), **_end(piece), **self._of_tokens(piece)}
            for piece in answers
        ]
        sampled = sum(len(piece.token_ids) for piece in answers)
        used = usage(reply.prompt_tokens, sampled, sum(piece.thought_tokens for piece in answers))
        return {**_head(reply), "choices": choices, "usage": used, **self._read(reply)}

    async def events(self, reply: Reply) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        head = {**_head(reply), "object": "chat.completion.chunk"}
        begun, sampled, thought, read = set[int](), 0, 0, self._read(reply)
        async for piece in reply.pieces:
            delta = _said(piece)
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            if piece.index in begun:
                delta = {name: value for name, value in delta.items() if name not in ("role", "refusal")}
            choice = {"index": piece.index, "delta": delta, "finish_reason": None, **self._of_tokens(piece)}
            yield event({**head, "choices": [choice], **read})
            if piece.finish is not None:
                end = {"index": piece.index, "delta": {}, "logprobs": None, **_end(piece)}
                yield event({**head, "choices": [end]})
            begun.add(piece.index)
            sampled, thought, read = sampled + len(piece.token_ids), thought + piece.thought_tokens, {}
        if self.stream_options is not None and self.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage(reply.prompt_tokens, sampled, thought)})
        yield "data: [DONE]\n\n"

    def _read(self, reply: Reply) -> dict[str, Any]:
        return {"prompt_token_ids": list(reply.prompt_ids)} if self.return_token_ids else {}

    def _of_tokens(self, piece: AnswerPiece) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": _logprobs(piece) if self.logprobs else None}
        return {**fields, "token_ids": piece.token_ids} if self.return_token_ids else fields


def usage(prompt: int, completion: int, thought: int = 0) -> dict[str, Any]:
    """Tokens of one request; `thought` are those of the completion that were thought."""
    details = {"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "object": "chat.completion", "created": reply.created, "model": reply.model}


def _end(piece: AnswerPiece) -> dict[str, Any]:
    """How a choice ended; `unread` is a field of Motet's own."""
    reason = "tool_calls" if piece.calls else piece.finish
    return {"finish_reason": reason, **({"unread": piece.unread} if piece.unread else {})}


def _said(piece: AnswerPiece) -> dict[str, Any]:
    ends = piece.finish is not None and not piece.calls
    content = piece.text if piece.text or ends or not (piece.calls or piece.thought) else None
    said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if piece.thought:
        said["reasoning_content"] = piece.thought
    if piece.calls:
        said["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
            for name, call in piece.named_calls
        ]
    return said


def _logprobs(piece: AnswerPiece) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(token), "top_logprobs": []}
        for text, token, logprob in zip(piece.escaped_tokens, piece.tokens, piece.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
