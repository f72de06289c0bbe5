"""Tool calls in what a model writes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as most chat templates have it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from motet.types import ToolCall

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of one turn, in their order; one that is no JSON is a call of no tool, so that the model hears of it."""
    return tuple(map(_tool_call, _TOOL_CALL.findall(text)))


def without_calls(text: str) -> str:
    """What a turn says besides."""
    return _TOOL_CALL.sub("", text).strip()


def written(calls: Sequence[ToolCall]) -> str:
    """Calls as a model writes them."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n</tool_call>"
        for call in calls
    )


def _tool_call(text: str) -> ToolCall:
    try:
        fields = json.loads(text)
        arguments = fields.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return ToolCall(str(fields["name"]), dict(arguments))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToolCall(text.strip()[:40], {})
