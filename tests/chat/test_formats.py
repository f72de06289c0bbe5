"""The formats of chats alone: what they read, refuse and write."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from motet.chat.completer import AnswerPiece, ChatFormat, Conversation, Reply, refuse_unsupported, whole
from motet.chat.completions import ChatRequest
from motet.chat.messages import MessagesRequest
from motet.chat.responses import ResponsesRequest
from motet.core.errors import ChatRefusal
from motet.core.stops import met

pytestmark = pytest.mark.tier1

HI: Any = {"role": "user", "content": "hi"}


def read(request: type[ChatFormat], body: Any) -> Conversation:
    """The conversation of a request, as both doors read it."""
    asked = request.model_validate({"max_tokens": 9, **body})
    refuse_unsupported(asked)
    return asked.conversation()


@pytest.mark.parametrize(
    ("request_", "body", "message"),
    [
        (ResponsesRequest, {"input": "hi", "conversation": "conv_1"}, "conversation: is not supported here"),
        (ResponsesRequest, {"input": "hi", "prompt": {"id": "pmpt_1"}}, "prompt: is not supported here"),
        (ResponsesRequest, {"input": [{"type": "item_reference", "id": "msg_1"}, HI]}, "type 'item_reference'"),
        (ResponsesRequest, {"input": [{"role": "banana", "content": "hi"}]}, "it has 'banana'"),
        (ResponsesRequest, {"input": "hi", "tools": [{"type": "function"}]}, "a function has no name"),
        (ChatRequest, {"messages": [HI], "tools": [{"type": "custom", "custom": {}}]}, "'custom' is no function"),
        (ChatRequest, {"messages": [HI], "tools": [{"type": "function", "name": "x"}]}, "a function has no name"),
        (MessagesRequest, {"messages": [HI, {"role": "assistant", "content": "{"}]}, "is not continued here"),
    ],
)
def test_what_would_be_answered_wrongly_is_refused(request_: type[ChatFormat], body: Any, message: str) -> None:
    with pytest.raises(ChatRefusal, match=re.escape(message)):
        read(request_, body)


def test_messages_have_those_of_the_system_in_their_place() -> None:
    body = {"system": "a", "messages": [HI, {"role": "system", "content": [{"type": "text", "text": "b"}]}]}
    said = read(MessagesRequest, body).messages
    assert [(one.role, one.content) for one in said] == [("system", "a"), ("user", "hi"), ("system", "b")]


class _Given:
    """Pieces that can be read repeatedly."""

    def __init__(self, pieces: Sequence[AnswerPiece]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(
    ("finish", "stopped", "ends"),
    [
        ("stop", "\n\n", ("stop_sequence", "\n\n")),
        ("stop", "", ("end_turn", None)),
        ("length", "", ("max_tokens", None)),
    ],
)
def test_messages_tell_the_stop_sequence_that_ended_them(finish: Any, stopped: str, ends: Any) -> None:
    request = MessagesRequest.model_validate({"max_tokens": 9, "messages": [HI], "stop_sequences": ["\n\n"]})
    pieces = [
        AnswerPiece(0, "a", [("text", "It is")]),
        AnswerPiece(0, "a", [("text", " 2.")], (), finish, stopped=stopped),
    ]
    reply = Reply("a", "m", 1, _Given(pieces))

    async def main() -> tuple[Any, list[Any]]:
        answer = request.answer(reply, await whole(reply.pieces))
        return answer, [json.loads(one.partition("data: ")[2]) async for one in request.events(reply)]

    answer, events = asyncio.run(main())
    (delta,) = [one["delta"] for one in events if one["type"] == "message_delta"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == (delta["stop_reason"], delta["stop_sequence"]) == ends


def test_the_stop_string_that_is_met_is_the_first_in_the_text() -> None:
    assert met("It is 2. No.", ["No", " 2. No", "x"]) == " 2. No"
    assert not met("It is 2.", ["x"])
