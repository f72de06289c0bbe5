"""Calls as XML between tags: `<tool_call><function=f><parameter=x>…</parameter></function></tool_call>` (Qwen3-Coder, 3.5)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.chat.turn_formats.arguments import UNREADABLE, Schemas, TypedTexts, broken, written_texts
from motet.chat.turn_formats.calls import CallsRead, Following, between
from motet.chat.turn_formats.json_in_tags import CLOSES, OPENS
from motet.chat.turn_formats.token_text import Tag, joined, merged
from motet.core.types import ToolCall

_FUNCTION, _END, _PARAMETER_END = "<function=", "</function>", "</parameter>"
_BEGINS = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_PARAMETER_ENDS = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>|\Z)")
_ENDS = re.compile(r"\s*</function>\s*")


def _after_function() -> Callable[[str], bool]:
    """Whether letters end where a call may end."""
    return lambda piece: piece.rstrip().endswith(_END)


@dataclass(frozen=True)
class XmlInTags:
    """Reads calls of this style. Some bases leave out the outer opening tag."""

    outer: tuple[str, str] = (OPENS, CLOSES)
    """The tags around a call; bases have others too."""
    bare: str = ""
    following: Following = _after_function

    @property
    def around(self) -> Mapping[str, str]:
        """See `CallStyle`."""
        return dict.fromkeys((self.outer[0], _FUNCTION), self.outer[1])

    @property
    def tags(self) -> tuple[str, ...]:
        """See `CallStyle`."""
        return (*self.outer, _FUNCTION)

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        bodies, around = between(_with_outer_tags(list(merged(pieces)), *self.outer), *self.outer, _after_function)
        calls: list[tuple[ToolCall, str]] = []
        typed = TypedTexts(schemas)
        for body in bodies:
            around += _read_into(calls, joined(body), typed)
        return CallsRead.of(calls, around)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        return "\n".join(self._written(call) for call in calls)

    def _written(self, call: ToolCall) -> str:
        texts = written_texts(call, (*self.tags, _PARAMETER_END, _END))
        opens, closes = self.outer
        parameters = (f"<parameter={name}>\n{text}\n{_PARAMETER_END}\n" for name, text in texts)
        return f"{opens}\n{_FUNCTION}{call.name}>\n{''.join(parameters)}{_END}\n{closes}"


def _with_outer_tags(pieces: Sequence[str], opens: str, closes: str) -> Iterator[str]:
    """The pieces with the outer tag where a base left it out; without an end, such a function is text."""
    last = max((at for at, piece in enumerate(pieces) if _END in piece), default=-1)
    within = in_function = False
    for at, piece in enumerate(pieces):
        tag = piece if isinstance(piece, Tag) else ""
        if tag == _FUNCTION:
            if not within and at < last:
                yield Tag(opens)
            within = in_function = True
            yield str(piece)
        else:
            in_function = in_function and _END not in piece
            within = tag == opens or (within and (tag != closes or in_function))
            yield piece


def _read_into(calls: list[tuple[ToolCall, str]], body: str, typed: TypedTexts) -> str:
    """Add the calls between two tags, and what is wrong with each; returns the text behind them."""
    at = 0
    while not at or body.startswith(_FUNCTION, at):
        try:
            call, at = _call(body, at, typed)
        except UNREADABLE as error:
            calls.append(broken(body[at:], error))
            return ""
        calls.append((call, ""))
    return body[at:]


def _call(body: str, at: int, typed: TypedTexts) -> tuple[ToolCall, int]:
    """The call that begins here, and where it ends. Raises ValueError if it is broken."""
    begins = _BEGINS.match(body, at)
    if begins is None:
        raise ValueError("it has no <function=…>")
    name, at = begins[1].strip(), begins.end()
    arguments = {}
    while parameter := _PARAMETER.match(body, at):
        ends = _PARAMETER_ENDS.search(body, parameter.end())
        if ends is None:
            raise ValueError(f"its parameter {parameter[1]:.80} has no </parameter>")
        key = parameter[1].strip()
        arguments[key] = typed.value(name, key, body[parameter.end() : ends.start()])
        at = ends.end()
    ends = _ENDS.match(body, at)
    if ends is None:
        raise ValueError("it has no </function>")
    return ToolCall(name, arguments), ends.end()
