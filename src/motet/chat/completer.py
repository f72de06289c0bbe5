"""Common part of all formats: a conversation, to which an episode or a service replies in pieces."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from motet.chat.template import Tools
from motet.core.errors import ChatRefusal
from motet.core.json_text import json_text
from motet.core.plain_json import as_json, check_plain
from motet.core.settings import Described
from motet.core.types import Message, ToolCall

EVENTS = "text/event-stream"
MOST_MESSAGES = 4096
MESSAGE_ID, RESPONSE_ID = "msg_", "resp_"
"""What ids of answers begin with in Messages and Responses."""
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "audio": (), "functions": ([],), "conversation": (), "prompt": (), "modalities": (["text"],),
    "continue_final_message": (False,), "add_generation_prompt": (True,), "add_special_tokens": (False,), "echo": (False,),
    "truncate_prompt_tokens": (-1,), "truncation": ("disabled",), "documents": ([],), "lora_request": (), "lora_path": (),
    "prompt_embeds": (), "input_ids": (), "mcp_servers": ([],), "web_search_options": (), "mm_processor_kwargs": ({},),
}  # fmt: skip
"""Fields that would change what the model reads or samples, with their neutral values."""
_MOST_ARGUMENTS = 8192
"""Most values in the arguments of all tool calls of a request."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of one turn."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    train: bool = True
    """Whether an episode trains the answer."""
    grammar: str = ""
    """The grammar of the answer. An episode does not train such an answer: it is not a sample of the policy."""


@dataclass(frozen=True)
class Conversation:
    """A request in any format."""

    messages: tuple[Message, ...]
    """The conversation; results of tools have the role `tool`."""
    tools: Tools = ()
    """Tools that the model may call."""
    limits: CallLimits = field(default_factory=CallLimits)
    n: int = 1
    """The number of answers."""
    stream: bool = False
    logprobs: bool = False
    """Whether to return each token's bytes and logprob."""
    token_ids: bool = False
    """Whether to return the ids of the prompt."""

    def __post_init__(self) -> None:
        """Raise ChatRefusal if it is empty."""
        if not self.messages:
            raise ChatRefusal("the conversation has no message that is read here; give one")


Block = tuple[Literal["thought", "text"], str]
"""A part of an answer that is shown as it comes."""


@dataclass
class AnswerPiece:
    """Part of one answer, or all of it."""

    index: int
    """The answer's number among `n`."""
    id: str
    """The answer's id; the ids of its tool calls are made from it."""
    blocks: list[Block] = field(default_factory=list)
    """Thoughts and texts in order; a model may think again after it said something."""
    calls: tuple[ToolCall, ...] = ()
    """All tool calls of the answer, in its last piece."""
    finish: Literal["stop", "length"] | None = None
    """Set on the last piece."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    """The bytes of each token, if requested."""
    stopped: str = ""
    """The stop string that ended the answer, on its last piece."""
    thought_tokens: int = 0
    """How many of `token_ids` are thought."""
    unread: str = ""
    """Why a part of the answer could not be read, on its last piece; empty if all was."""
    recalled: bool = False
    """Whether all text before was a thought, which is here once more."""

    @property
    def text(self) -> str:
        """What is said, without thoughts and tool calls."""
        return "".join(text for kind, text in self.blocks if kind == "text")

    @property
    def thought(self) -> str:
        """What is thought."""
        return "".join(text for kind, text in self.blocks if kind == "thought")

    @property
    def shown(self) -> list[Block]:
        """Its blocks; an answer that says and calls nothing ends with an empty text."""
        silent = self.finish is not None and not self.text and not self.calls
        return [*self.blocks, ("text", "")] if silent else self.blocks

    @property
    def escaped_tokens(self) -> list[str]:
        r"""The text of each token; bytes of parts of letters are written as `\xf0`."""
        return [token.decode(errors="backslashreplace") for token in self.tokens]

    def add(self, other: AnswerPiece) -> None:
        """Append the next piece of the same answer."""
        if other.recalled:
            self.blocks = [block for block in self.blocks if block[0] == "thought"]
        for kind, text in other.blocks:
            if not text:
                continue
            if self.blocks and self.blocks[-1][0] == kind:
                self.blocks[-1] = (kind, self.blocks[-1][1] + text)
            else:
                self.blocks.append((kind, text))
        self.thought_tokens += other.thought_tokens
        self.unread = other.unread or self.unread
        self.calls += other.calls
        self.finish = other.finish or self.finish
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.tokens += other.tokens
        self.stopped = other.stopped or self.stopped

    @property
    def named_calls(self) -> list[tuple[str, ToolCall]]:
        """Each tool call with an id."""
        return [(f"call_{self.id}_{number}", call) for number, call in enumerate(self.calls)]


@dataclass(frozen=True)
class Reply:
    """Answers that have begun."""

    id: str
    model: str
    prompt_tokens: int
    pieces: AsyncIterable[AnswerPiece]
    """Pieces of several answers may be interleaved."""
    prompt_ids: Sequence[int] = ()
    """Set if requested."""
    created: int = field(default_factory=lambda: int(time.time()))


def id_of_call(name: str) -> str:
    """The id of a reply, from that of an answer in any format."""
    return name.removeprefix(MESSAGE_ID).removeprefix(RESPONSE_ID)


async def whole(pieces: AsyncIterable[AnswerPiece]) -> list[AnswerPiece]:
    """All answers, each as one piece, by index."""
    answers: dict[int, AnswerPiece] = {}
    async for piece in pieces:
        answers.setdefault(piece.index, AnswerPiece(piece.index, piece.id)).add(piece)
    return [answers[index] for index in sorted(answers)]


async def shown(pieces: AsyncIterable[AnswerPiece], answer: AnswerPiece) -> AsyncIterator[Block]:
    """Parts of the only answer's blocks as its pieces come, which are added to `answer`."""
    async for piece in pieces:
        answer.add(piece)
        for block in (*(block for block in piece.blocks if block[1]), *answer.shown[len(answer.blocks) :]):
            yield block


class Nullable(Described):
    """A request in which null is as left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: given for name, given in value.items() if given is not None or name in needed}


class Extra(Nullable):
    """Base of clients' requests: fields that change no answer are ignored."""

    model_config = ConfigDict(extra="allow")


class ChatFormat(Extra):
    """Base of the requests of all formats."""

    tools: list[dict[str, Any]] | None = Field(None, max_length=1000, fail_fast=True)
    stream: bool | None = None
    train: bool = True
    """False: an episode answers, and does not train the answer. Elsewhere it changes nothing."""

    _plain = model_validator(mode="before")(check_plain)

    def conversation(self) -> Conversation:
        """The conversation of a request. Raises `ChatRefusal` if it is not supported."""
        raise NotImplementedError

    def answer(self, reply: Reply, answers: Sequence[AnswerPiece]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        raise NotImplementedError

    def events(self, reply: Reply) -> AsyncIterator[str]:
        """The answer as server-sent events, as its pieces come."""
        raise NotImplementedError


def refuse_unsupported(given: Extra, also: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> None:
    """Refuse fields that would change the answer, by a ChatRefusal with the name; `also` has more, with neutral values."""
    known = {**_UNSUPPORTED, **also}
    for name, value in (given.model_extra or {}).items():
        if name in known and value not in known[name]:
            raise ChatRefusal(f"{name}: is not supported here; leave it out")


def text_of(content: Any) -> str:
    """The text of a message given as a text, a list of parts, or None.

    Raises ChatRefusal if it is something else, or a part is not text.
    """
    if not isinstance(content, str | list | None):
        raise ChatRefusal(f"content: {content!r:.80} is neither text nor a list of parts")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict):
                raise ChatRefusal(f"content: {part!r:.80} is no part; a part is an object with a type")
            if not isinstance(part.get("text", part.get("refusal")), str):
                raise ChatRefusal(f"content: a part of type {part.get('type')!r:.80} is not supported; send text only")
        return "".join(part.get("text") or str(part.get("refusal") or "") for part in content)
    return content or ""


def check_function(kind: Any, function: Any) -> None:
    """Check that a tool is a function with a name. Raises ChatRefusal if it is not."""
    if kind != "function":
        raise ChatRefusal(f"tools: {kind!r:.80} is no function, and only functions are offered here")
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ChatRefusal("tools: a function has no name; give each a text")


def check_arguments(texts: Iterable[str]) -> None:
    """Limit the arguments of all tool calls of a request: they are JSON inside its JSON.

    Raises ChatRefusal if they hold more values than a request may.
    """
    n_values = 0
    for text in texts:
        outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
        n_values += sum(map(outside.count, "[{,"))
    if n_values > _MOST_ARGUMENTS:
        raise ChatRefusal(
            f"the arguments of tool calls hold {n_values} values, more than the {_MOST_ARGUMENTS} of a request"
        )


def call_of(name: str, arguments: str) -> ToolCall:
    """A tool call with arguments from JSON text."""
    try:
        given = check_plain(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        given = None
    return ToolCall(name, given if isinstance(given, dict) else {"arguments": arguments})


def arguments_of(call: ToolCall) -> str:
    """A tool call's arguments as JSON text; null for numbers that JSON lacks."""
    return json.dumps(as_json(call.arguments))


def event(body: Mapping[str, Any], kind: str = "") -> str:
    """One server-sent event."""
    data = f"data: {json_text(body)}\n\n"
    return f"event: {kind}\n{data}" if kind else data


def error_event(message: str, kind: str, code: str = "") -> str:
    """An error inside a stream, in a form that the stock clients of all formats read."""
    detail = {"message": message, "type": kind, "param": None, "code": code or None}
    return event({"type": "error", "error": detail}, "error")
