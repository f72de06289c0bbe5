"""What tools a model asks for, as most chat templates write it: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
import re

from motet.types import ToolCall

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of one turn, in their order; one that is no JSON is a call of no tool, so that the model hears of it."""
    return tuple(_call(text) for text in _CALL.findall(text))


def _call(text: str) -> ToolCall:
    try:
        fields = json.loads(text)
        arguments = fields.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return ToolCall(str(fields["name"]), dict(arguments))
    except (ValueError, TypeError, KeyError, AttributeError):
        return ToolCall(text.strip()[:40], {})
