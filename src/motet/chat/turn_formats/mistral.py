"""Calls behind `[TOOL_CALLS]`: a JSON list of old bases, `f[ARGS]{…}` of newer ones (Mistral)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from motet.chat.turn_formats.arguments import (
    UNREADABLE,
    Schemas,
    as_objects,
    broken,
    call_of,
    plain_arguments,
    written_json,
)
from motet.chat.turn_formats.calls import CallsRead, Following, outside_strings
from motet.chat.turn_formats.token_text import Tag, joined
from motet.core.types import ToolCall

_TAG, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral:
    """Reads calls of this style."""

    around: Mapping[str, str] = {_TAG: ""}
    tags: tuple[str, ...] = (_TAG, _ID, _ARGUMENTS)
    following: Following = staticmethod(outside_strings)
    bare = ""

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        bodies: list[list[str]] = []
        for piece in pieces:
            if isinstance(piece, Tag) and piece == _TAG:
                bodies.append([])
            else:
                bodies[-1].append(piece)
        calls: list[tuple[ToolCall, str]] = []
        behind = [_read_into(calls, body) for body in bodies]
        return CallsRead.of(calls, "".join(behind))

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        return _TAG + written_json(as_objects(calls), self.tags)


def _read_into(calls: list[tuple[ToolCall, str]], body: Sequence[str]) -> str:
    """Add the calls behind one tag, and what is wrong with each; returns the text behind them."""
    text = joined(body).strip()
    try:
        if text.startswith(("[", "{")):  # a list, or a call alone
            fields, end = _DECODER.raw_decode(text)
            calls += [(call_of(call), "") for call in (fields if text.startswith("[") else [fields])]
            return text[end:]
        ends = next((at for at, piece in enumerate(body) if isinstance(piece, Tag)), None)
        name = text.partition("{")[0] if ends is None else joined(body[:ends])
        begins = next((at for at, piece in enumerate(body) if piece == _ARGUMENTS and isinstance(piece, Tag)), ends)
        arguments = text[len(name) :] if begins is None else joined(body[begins + 1 :])
        fields, end = _DECODER.raw_decode(arguments.lstrip())
        calls.append((ToolCall(name.strip(), plain_arguments(fields)), ""))
        return arguments.lstrip()[end:]
    except UNREADABLE as error:
        calls.append(broken(text, error))
        return ""


_DECODER = json.JSONDecoder()
