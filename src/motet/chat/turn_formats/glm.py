"""Calls as names and values between tags: `<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>` (GLM)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from motet.chat.turn_formats.arguments import UNREADABLE, Schemas, TypedTexts, broken, written_texts
from motet.chat.turn_formats.calls import CallsRead, Following, between
from motet.chat.turn_formats.json_in_tags import CLOSES, OPENS
from motet.chat.turn_formats.token_text import Tag, joined
from motet.core.types import ToolCall

_KEY, _KEY_ENDS, _VALUE, _VALUE_ENDS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_ORDER = (_KEY, _KEY_ENDS, _VALUE, _VALUE_ENDS)


def _outside_values() -> Callable[[str], bool]:
    inside = False

    def outside(piece: str) -> bool:
        nonlocal inside
        if isinstance(piece, Tag):
            inside = piece == _VALUE or (inside and piece != _VALUE_ENDS)
        return not inside

    return outside


class Glm:
    """Reads calls of this style."""

    around: Mapping[str, str] = {OPENS: CLOSES}
    tags: tuple[str, ...] = (OPENS, CLOSES, *_ORDER)
    bare = ""
    following: Following = staticmethod(_outside_values)

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        typed = TypedTexts(schemas)
        bodies, around = between(pieces, OPENS, CLOSES, _outside_values)
        return CallsRead.of([_call(body, typed) for body in bodies], around)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        return "\n".join(map(_written, calls))


def _written(call: ToolCall) -> str:
    texts = written_texts(call, Glm.tags)
    pairs = (f"{_KEY}{name}{_KEY_ENDS}\n{_VALUE}{text}{_VALUE_ENDS}\n" for name, text in texts)
    return f"{OPENS}{call.name}\n{''.join(pairs)}{CLOSES}"


def _call(body: Sequence[str], typed: TypedTexts) -> tuple[ToolCall, str]:
    """The call between two tags, and what is wrong with it."""
    parts: list[list[str]] = [[]]
    for piece in body:
        wanted = _ORDER[(len(parts) - 1) % 4]
        if isinstance(piece, Tag) and piece == wanted:
            parts.append([])
        else:
            parts[-1].append(piece)
    texts = ["".join(part) for part in parts]
    name = texts[0].strip()
    if len(texts) % 4 != 1 or not name or any(text.strip() for text in texts[2::2] if len(texts) > 1):
        return broken(joined(body), ValueError("its names and values are not between their tags"))
    pairs = ((key.strip(), value) for key, value in zip(texts[1::4], texts[3::4], strict=True))
    try:
        return ToolCall(name, {key: typed.value(name, key, value) for key, value in pairs}), ""
    except UNREADABLE as error:
        return broken(joined(body), error)
