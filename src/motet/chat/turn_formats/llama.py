"""Calls as JSON without tags: `{"name": …, "parameters": {…}}`, also behind `<|python_tag|>` (Llama 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from motet.chat.turn_formats.arguments import UNREADABLE, Schemas, broken, call_of, written_json
from motet.chat.turn_formats.calls import CallsRead, Following, outside_strings
from motet.chat.turn_formats.token_text import Tag, joined
from motet.core.types import ToolCall

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[\s;,]*")
_NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"')


class Llama:
    """Reads calls of this style: all that the turn says, or what follows the tag."""

    around: Mapping[str, str] = {_TAG: ""}
    tags: tuple[str, ...] = (_TAG,)
    following: Following = staticmethod(outside_strings)
    bare = "{"

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`. An object that calls no tool is speech."""
        tagged = isinstance(pieces[0], Tag)
        text = joined(piece for piece in pieces if not (isinstance(piece, Tag) and piece == _TAG))
        calls: list[tuple[ToolCall, str]] = []
        at = _BETWEEN.match(text).end()  # type: ignore[union-attr]
        while text.startswith("{", at):
            try:
                fields, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                named = _NAMED.match(text, at)
                if tagged or calls or (named and named[1] in schemas):
                    calls.append(broken(text[at:], error))
                    at = len(text)
                break
            if not (tagged or _is_call(fields, schemas)):
                break
            calls.append(_call(fields, text[at:end]))
            at = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
        if tagged and not calls:
            return CallsRead.of([broken(text, ValueError("it is no JSON"))], "")
        return CallsRead.of(calls, text[at:] if calls else text)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        fields = ({"name": call.name, "parameters": dict(call.arguments)} for call in calls)
        return "; ".join(written_json(call, self.tags) for call in fields)


_DECODER = json.JSONDecoder()


def _is_call(fields: Any, schemas: Schemas) -> bool:
    named = isinstance(fields, dict) and isinstance(fields.get("name"), str)
    return named and (fields["name"] in schemas or "parameters" in fields or "arguments" in fields)


def _call(fields: Any, text: str) -> tuple[ToolCall, str]:
    try:
        return call_of(fields), ""
    except UNREADABLE as error:
        return broken(text, error)
