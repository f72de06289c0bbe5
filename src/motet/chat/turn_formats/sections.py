"""Calls as a name and JSON between tags, all calls of a turn in one section (DeepSeek V3, Kimi K2)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from motet.chat.turn_formats.arguments import UNREADABLE, Schemas, broken, plain_arguments, written_json
from motet.chat.turn_formats.calls import CallsRead, Following, between, outside_strings
from motet.chat.turn_formats.token_text import Tag, joined
from motet.core.types import ToolCall

NameAndArguments = Callable[[str, str], tuple[str, str]]
"""(letters before the tag that separates, letters behind it) → name of the tool, arguments as JSON."""
_FENCED = re.compile(r"(?P<name>[^\n{`]+)\n```(?:json)?\n(?P<arguments>.*?)\n?(?:```\s*)?", re.DOTALL)
_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?", re.DOTALL)


def _deepseek(before: str, behind: str) -> tuple[str, str]:
    """The name is before the tag (V3.1), or behind it and before JSON between fences (V3, R1)."""
    fenced = _FENCED.fullmatch(behind)
    return (fenced["name"], fenced["arguments"]) if fenced else (before, behind)


def _kimi(before: str, behind: str) -> tuple[str, str]:
    """`functions.NAME:NUMBER` before the tag."""
    numbered = _NUMBERED.fullmatch(before.strip())
    return numbered["name"] if numbered else before, behind


@dataclass(frozen=True)
class Sections:
    """Reads calls of this style. A base may leave out the tags of the section."""

    section: tuple[str, str]
    call: tuple[str, str]
    separator: str
    named: NameAndArguments
    name_of: Callable[[str, int], str] = lambda name, _: name
    """(tool, number of the call in its turn) → the letters before the tag that separates."""
    bare: str = ""
    following: Following = outside_strings

    @property
    def around(self) -> Mapping[str, str]:
        """See `CallStyle`. A section is no call: a thought may stand in it."""
        return {self.section[0]: "", self.call[0]: self.call[1]}

    @property
    def tags(self) -> tuple[str, ...]:
        """See `CallStyle`."""
        return (*self.section, *self.call, self.separator)

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        bodies, around = between(pieces, *self.call, outside_strings)
        calls = [self._call(body) for body in bodies]
        for tag in self.section:
            around = around.replace(tag, "")
        if not calls:
            return CallsRead.of([broken(around, ValueError("its section has no call"))], "")
        return CallsRead.of(calls, around)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`."""
        texts = [
            self.call[0]
            + self.name_of(call.name, number)
            + self.separator
            + written_json(dict(call.arguments), self.tags)
            + self.call[1]
            for number, call in enumerate(calls)
        ]
        return "".join([self.section[0], *texts, self.section[1]])

    def _call(self, body: Sequence[str]) -> tuple[ToolCall, str]:
        """The call between two tags, and what is wrong with it."""
        at = next((at for at, item in enumerate(body) if isinstance(item, Tag) and item == self.separator), None)
        try:
            if at is None:
                raise ValueError("nothing is between its name and its arguments")
            name, arguments = self.named(joined(body[:at]), joined(body[at + 1 :]))
            return ToolCall(name.strip(), plain_arguments(json.loads(arguments))), ""
        except UNREADABLE as error:
            return broken(joined(body), error)


DEEPSEEK = Sections(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
    _deepseek,
)
KIMI = Sections(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
    _kimi,
    lambda name, number: f"functions.{name}:{number}",
)
