"""Calls as JSON between tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet.chat.turn_formats.arguments import UNREADABLE, Schemas, as_objects, broken, call_of, written_json
from motet.chat.turn_formats.calls import CallsRead, Following, between, outside_strings
from motet.chat.turn_formats.token_text import joined
from motet.core.types import ToolCall

OPENS, CLOSES = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class JsonInTags:
    """Reads calls of this style."""

    outer: tuple[str, str] = (OPENS, CLOSES)
    """The tags around a call; bases have others too."""
    bare: str = ""
    following: Following = outside_strings

    @property
    def around(self) -> Mapping[str, str]:
        """See `CallStyle`."""
        return {self.outer[0]: self.outer[1]}

    @property
    def tags(self) -> tuple[str, ...]:
        """See `CallStyle`."""
        return self.outer

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        bodies, around = between(pieces, *self.outer, outside_strings)
        return CallsRead.of([json_call(joined(body)) for body in bodies], around)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        opens, closes = self.outer
        return "\n".join(f"{opens}\n{written_json(fields)}\n{closes}" for fields in as_objects(calls))


def json_call(text: str) -> tuple[ToolCall, str]:
    """The call that JSON says, and what is wrong with it."""
    try:
        return call_of(json.loads(text)), ""
    except UNREADABLE as error:
        return broken(text, error)
