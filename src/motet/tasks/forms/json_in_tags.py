"""Calls as JSON between tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from motet.core.types import ToolCall
from motet.tasks.forms.arguments import UNREADABLE, Schemas, as_objects, broken, call_of, written_json
from motet.tasks.forms.letters import joined
from motet.tasks.forms.reading import CallsRead, between

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_STRING_SIGN = re.compile(r'\\.|"|\n')


class JsonInTags:
    """Reads calls of this style."""

    opens: tuple[str, ...] = (OPENS,)
    tags: tuple[str, ...] = (OPENS, CLOSES)
    bare = ""

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        bodies, around = between(pieces, OPENS, CLOSES, outside_strings)
        return CallsRead.of([json_call(joined(body)) for body in bodies], around)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        return "\n".join(f"{OPENS}\n{written_json(one)}\n{CLOSES}" for one in as_objects(calls))


def outside_strings() -> Callable[[str], bool]:
    """Follows JSON in pieces: whether each ends outside a string, so that a tag behind it is a tag."""
    inside = broken = False

    def outside(piece: str) -> bool:
        nonlocal inside, broken
        for sign in _STRING_SIGN.findall(piece):
            broken |= inside and sign == "\n"  # no string has a line's end
            inside ^= sign == '"'
        return broken or not inside

    return outside


def json_call(text: str) -> tuple[ToolCall, str]:
    """The call that JSON says, and what is wrong with it."""
    try:
        return call_of(json.loads(text)), ""
    except UNREADABLE as error:
        return broken(text, error)
