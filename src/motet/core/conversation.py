"""The turns of a conversation, and what a turn of the model says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: Mapping[str, Any]

    def __hash__(self) -> int:
        """Hash the arguments as JSON, because a mapping has no hash."""
        return hash((self.name, json.dumps(self.arguments, sort_keys=True)))


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant`, or `tool` for the result of a tool."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of an assistant's turn."""
    name: str = ""
    """The name of the tool that answered."""
    learned: bool = True
    """Whether an assistant's turn is trained if the conversation is an example."""
    thought: str = ""
    """What an assistant thought before `content`, without the marks around it."""
    special: int = 0
    """In how many letters at the beginning of `content` a token's name is the token: in those of a job's own row, if the job
    wants it. Everywhere else it is letters."""
    letters: int = field(default=0, repr=False)
    """In how many letters at the end of `content` no name is a token, whatever the role: text that somebody else put in."""


OPEN_THOUGHT = "a thought has no end"
"""Beginning of what `unread` says of a turn that ends inside its thought."""


class Thought(str):
    """A piece of a thought, among pieces of an answer."""

    __slots__ = ()


@dataclass(frozen=True)
class TurnParts:
    """What a model's turn says, read from its tokens in the form in which its base writes."""

    thought: str = ""
    """Without the marks around it."""
    speech: str = ""
    """What the reader of an answer sees, without thought and calls."""
    calls: tuple[ToolCall, ...] = ()
    unread: str = ""
    """Why a part of the turn could not be read (a thought without an end, a broken call); empty if all was."""

    @property
    def ends_in_thought(self) -> bool:
        """Whether the turn ends before its thought does, so that it says nothing."""
        return self.unread.startswith(OPEN_THOUGHT)
