"""The formats of chats alone: what they read, refuse and write."""

from __future__ import annotations

import re
from typing import Any

import pytest

from motet.chat.completer import ChatFormat, Conversation, refuse_unsupported
from motet.chat.completions import ChatRequest
from motet.chat.messages import MessagesRequest
from motet.chat.responses import ResponsesRequest
from motet.core.errors import ChatRefusal

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
