"""`POST …/v1/chat/completions` of the OpenAI protocol: what an agent asks, and what it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from motet.agents.episode import AgentCall, CallLimits
from motet.agents.structure import grammar_of
from motet.errors import EpisodeRefusal
from motet.stops import few
from motet.tasks.chat import Chat
from motet.types import FinishReason, Message, ToolCall

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"logit_bias": ({},), "audio": (), "functions": ()}
"""Fields that would change what is sampled, and the values of theirs that do not."""


class _Extra(BaseModel):
    """Fields that this does not know are for others."""

    model_config = ConfigDict(extra="allow")


class Function(_Extra):
    """What a tool call names."""

    name: str
    arguments: str = "{}"


class CalledTool(_Extra):
    """A call in a message."""

    function: Function

    def plain(self) -> ToolCall:
        """As templates take it."""
        return call_of(self.function.name, self.function.arguments)


class ChatMessage(_Extra):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[CalledTool] | None = None
    name: str | None = None


class StreamOptions(_Extra):
    """What a stream ends with."""

    include_usage: bool = False


class ChatRequest(_Extra):
    """A conversation to go on with. Temperature and the like are the job's: what is trained is what was sampled."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[str | list[str] | None, BeforeValidator(few)] = None
    n: int | None = Field(None, ge=1, le=16)
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    train: bool = True

    def conversation(self, chat: Chat) -> list[Message]:
        """The messages as templates take them."""
        refuse_unsupported(self.model_extra or {})
        return [_message(one, chat) for one in self.messages]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def limits(self) -> CallLimits:
        """Where an answer ends, whether it is trained, and the form that it has to have."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        grammar = grammar_of(self.response_format, tools=bool(self.offered))
        return CallLimits(self.max_completion_tokens or self.max_tokens, stop, self.train, grammar)


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse what would change the distribution.

    Raises:
        EpisodeRefusal: naming the field.
    """
    for name, harmless in _UNSUPPORTED.items():
        if fields.get(name) is not None and fields[name] not in harmless:
            raise EpisodeRefusal(f"{name}: is not supported here; leave it out")


def text_of(content: Any) -> str:
    """The text of a message: a text, a list of parts, or None.

    Raises:
        EpisodeRefusal: it is something else, or a part of it is no text.
    """
    if not isinstance(content, str | list | None):
        raise EpisodeRefusal(f"content: {content!r:.80} is neither text nor a list of parts")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict):
                raise EpisodeRefusal(f"content: {part!r:.80} is no part; a part is an object with a type")
            if not isinstance(part.get("text", part.get("refusal")), str):
                raise EpisodeRefusal(
                    f"content: a part of type {part.get('type')!r} is no text, which is all that is read here"
                )
        return "".join(part.get("text") or str(part.get("refusal") or "") for part in content)
    return content or ""


def call_of(name: str, arguments: str) -> ToolCall:
    """A tool call whose arguments came as JSON text."""
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        given = None
    return ToolCall(name, given if isinstance(given, dict) else {"arguments": arguments})


def _message(one: ChatMessage, chat: Chat) -> Message:
    calls = tuple(call.plain() for call in one.tool_calls or ())
    role = {"developer": "system", "tool": chat.tool_role}.get(one.role, one.role)
    return Message(role, text_of(one.content), calls)


def finish_reason(call: AgentCall) -> str:
    """As the protocol names it."""
    if call.chunk.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if call.calls else "stop"


def usage(calls: list[AgentCall]) -> dict[str, int]:
    """Tokens of one request."""
    prompt, sampled = len(calls[0].prompt), sum(len(call.chunk.token_ids) for call in calls)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def answer(wanted: ChatRequest, calls: list[AgentCall], model: str, created: int, chat: Chat) -> dict[str, Any]:
    """The whole answer."""
    choices = [
        {
            "index": index,
            "message": _said(call),
            "finish_reason": finish_reason(call),
            "logprobs": _logprobs(call, chat) if wanted.logprobs else None,
            **_sampled_ids(wanted, call),
        }
        for index, call in enumerate(calls)
    ]
    head = {**_head(calls, model, created), "object": "chat.completion"}
    return {**head, "choices": choices, "usage": usage(calls), **_prompt_ids(wanted, calls)}


def events(wanted: ChatRequest, calls: list[AgentCall], model: str, created: int, chat: Chat) -> Iterator[str]:
    """The answer as server-sent events; each choice comes whole."""
    head = {**_head(calls, model, created), "object": "chat.completion.chunk"}
    for index, call in enumerate(calls):
        delta = _said(call)
        for number, one in enumerate(delta.get("tool_calls") or ()):
            one["index"] = number
        logprobs = _logprobs(call, chat) if wanted.logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        prompt = {} if index else _prompt_ids(wanted, calls)
        yield _event({**head, "choices": [{**choice, **_sampled_ids(wanted, call)}], **prompt})
        end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason(call)}
        yield _event({**head, "choices": [end]})
    if wanted.stream_options is not None and wanted.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": usage(calls)})
    yield "data: [DONE]\n\n"


def _head(calls: list[AgentCall], model: str, created: int) -> dict[str, Any]:
    return {"id": calls[0].id, "created": created, "model": model}


def _prompt_ids(wanted: ChatRequest, calls: list[AgentCall]) -> dict[str, Any]:
    """What the model read, where that is wanted; the fields are vLLM's."""
    return {"prompt_token_ids": calls[0].prompt.tolist()} if wanted.return_token_ids else {}


def _sampled_ids(wanted: ChatRequest, call: AgentCall) -> dict[str, Any]:
    """What it sampled."""
    return {"token_ids": call.chunk.token_ids.tolist()} if wanted.return_token_ids else {}


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _said(call: AgentCall) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": call.text or None, "refusal": None}
    if call.calls:
        said["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": one.name, "arguments": json.dumps(dict(one.arguments))},
            }
            for name, one in tool_call_ids(call)
        ]
    elif said["content"] is None:
        said["content"] = ""
    return said


def tool_call_ids(call: AgentCall) -> list[tuple[str, ToolCall]]:
    """Each tool call with a name of its own."""
    return [(f"call_{call.id}_{number}", one) for number, one in enumerate(call.calls)]


def _logprobs(call: AgentCall, chat: Chat) -> dict[str, Any]:
    texts = chat.token_texts(call.chunk.token_ids.tolist())
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, call.chunk.logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}
