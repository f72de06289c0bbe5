"""Chat Completions of the OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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
from motet.core.stops import few
from motet.core.types import Message


class Function(Extra):
    """The function of a tool call."""

    name: str
    arguments: str = "{}"


class CalledTool(Extra):
    """A call in a message."""

    function: Function


class ChatMessage(Extra):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: list[CalledTool] | None = Field(None, fail_fast=True)

    def plain(self) -> Message:
        """The message in the form of chat templates."""
        calls = (call_of(one.function.name, one.function.arguments) for one in self.tool_calls or ())
        return Message("system" if self.role == "developer" else self.role, text_of(self.content), tuple(calls))


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
        calls = (call for one in self.messages for call in one.tool_calls or ())
        check_arguments(call.function.arguments for call in calls)
        for tool in self.tools or ():
            check_function(tool.get("type"), tool.get("function"))
        tools = () if self.tool_choice == "none" else self.tools or ()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        grammar = grammar_of(self.response_format, tools=bool(tools))
        return Conversation(
            tuple(one.plain() for one in self.messages),
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
            {"index": one.index, "message": _said(one), "finish_reason": _finish_reason(one), **self._of_tokens(one)}
            for one in answers
        ]
        sampled = sum(len(one.token_ids) for one in answers)
        return {**_head(reply), "choices": choices, "usage": usage(reply.prompt_tokens, sampled), **self._read(reply)}

    async def events(self, reply: Reply) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        head = {**_head(reply), "object": "chat.completion.chunk"}
        begun, sampled, read = set[int](), 0, self._read(reply)
        async for piece in reply.pieces:
            delta = _said(piece)
            for number, one in enumerate(delta.get("tool_calls", ())):
                one["index"] = number
            if piece.index in begun:
                delta = {name: value for name, value in delta.items() if name not in ("role", "refusal")}
            choice = {"index": piece.index, "delta": delta, "finish_reason": None, **self._of_tokens(piece)}
            yield event({**head, "choices": [choice], **read})
            if piece.finish is not None:
                reason = _finish_reason(piece)
                end = {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": reason}
                yield event({**head, "choices": [end]})
            begun.add(piece.index)
            sampled, read = sampled + len(piece.token_ids), {}
        if self.stream_options is not None and self.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage(reply.prompt_tokens, sampled)})
        yield "data: [DONE]\n\n"

    def _read(self, reply: Reply) -> dict[str, Any]:
        return {"prompt_token_ids": list(reply.prompt_ids)} if self.return_token_ids else {}

    def _of_tokens(self, piece: AnswerPiece) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": _logprobs(piece) if self.logprobs else None}
        return {**fields, "token_ids": piece.token_ids} if self.return_token_ids else fields


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Tokens of one request."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "object": "chat.completion", "created": reply.created, "model": reply.model}


def _finish_reason(piece: AnswerPiece) -> str | None:
    return "tool_calls" if piece.calls else piece.finish


def _said(piece: AnswerPiece) -> dict[str, Any]:
    content = piece.text if piece.text or not piece.calls else None
    said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if piece.calls:
        said["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": one.name, "arguments": arguments_of(one)}}
            for name, one in piece.named_calls
        ]
    return said


def _logprobs(piece: AnswerPiece) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(token), "top_logprobs": []}
        for text, token, logprob in zip(piece.escaped_tokens, piece.tokens, piece.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
