"""Tool calls in a model's text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as most chat templates write them."""

from __future__ import annotations

import re

from motet.core.types import ToolCall
from motet.tasks.forms.json_in_tags import json_call

_OPENS = "<tool_call>"
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of one turn, in order. Invalid JSON becomes a call of a tool that does not exist: the model reads an error."""
    return tuple(json_call(body)[0] for body in _TOOL_CALL.findall(text))


def without_calls(text: str) -> str:
    """The text of a turn besides its calls."""
    return _TOOL_CALL.sub("", text).strip()


class SpokenText:
    """The text of a turn while it is sampled, without its tool calls."""

    def __init__(self) -> None:
        self._said, self._held = "", ""
        self._rest: list[str] = []
        """Everything from the first call on."""

    def take(self, text: str) -> str:
        """Add text; returns the part that can be shown: neither part of a call nor a space that may precede one."""
        if self._rest:
            self._rest.append(text)
            return ""
        before, opens, after = (self._held + text).partition(_OPENS)
        begun = next((n for n in range(len(_OPENS) - 1, 0, -1) if before.endswith(_OPENS[:n])), 0)
        shown = before.rstrip() if opens else before[: len(before) - begun].rstrip()
        self._held = before[len(shown) :]
        if opens:
            self._rest = [opens, after]
        self._said += shown
        return shown

    def end(self, *, cut_off: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the text, and the calls; a truncated turn has none."""
        rest = self._held + "".join(self._rest)
        if cut_off or not self._rest:
            return rest, ()
        whole = self._said + rest
        return without_calls(whole).removeprefix(self._said.strip()), tool_calls(whole)
