"""Calls as JSON between tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from motet.core.types import ToolCall
from motet.tasks.forms.letters import Tag
from motet.tasks.forms.reading import DEEPEST_CALL, CallsRead, Schemas
from motet.tasks.plain_json import check_plain

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"


class JsonInTags:
    """Reads calls of this style."""

    opens = (_OPENS,)
    tags = (_OPENS, _CLOSES)

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`. Invalid JSON becomes a call of a tool that does not exist: the model reads an error."""
        bodies, around = between(pieces, _OPENS, _CLOSES)
        calls = [json_call(body) for body in bodies]
        return CallsRead(tuple(call for call, _ in calls), around, next((why for _, why in calls if why), ""))


def between(pieces: Sequence[str], opens: str, closes: str) -> tuple[list[str], str]:
    """The texts between the tags, a last one without an end included; and the text around them."""
    inside: list[list[str]] = []
    around: list[str] = []
    within = False
    for piece in pieces:
        if isinstance(piece, Tag) and piece == opens and not within:
            within = True
            inside.append([])
        elif isinstance(piece, Tag) and piece == closes and within:
            within = False
        else:
            (inside[-1] if within else around).append(piece)
    return ["".join(body) for body in inside], "".join(around)


def json_call(text: str) -> tuple[ToolCall, str]:
    """The call that JSON says, and what is wrong with it."""
    try:
        fields = json.loads(text)
        arguments = fields["arguments"] if "arguments" in fields else fields.get("parameters", {})
        return ToolCall(str(fields["name"]), json_arguments(arguments)), ""
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return ToolCall(text.strip()[:40], {}), f"a call cannot be read: {error!r:.200}"


def json_arguments(value: Any) -> dict[str, Any]:
    """Arguments, also as a text of JSON. Raises ValueError, TypeError or RecursionError if they are none."""
    value = json.loads(value) if isinstance(value, str) else value
    return dict(check_plain(value, DEEPEST_CALL))


def written(calls: Sequence[ToolCall]) -> str:
    """Tool calls in this form; only half characters, which no tokenizer reads, are escaped."""
    texts = (json.dumps(_fields(one), ensure_ascii=False) for one in calls)
    whole = "\n".join(f"{_OPENS}\n{text}\n{_CLOSES}" for text in texts)
    return whole.encode(errors="backslashreplace").decode()


def _fields(call: ToolCall) -> Mapping[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}
