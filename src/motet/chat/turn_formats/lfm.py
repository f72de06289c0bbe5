"""Calls as Python between tags: `<|tool_call_start|>[f(x=1, y='a')]<|tool_call_end|>`, or JSON there (LFM2)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.chat.turn_formats.arguments import (
    DEEPEST_CALL,
    PYTHON_VALUES,
    UNREADABLE,
    Schemas,
    as_objects,
    broken,
    call_of,
    plain_arguments,
    without_tags,
    written_json,
)
from motet.chat.turn_formats.calls import CallsRead, Following, between
from motet.chat.turn_formats.token_text import joined
from motet.core.types import ToolCall

_OPENS, _CLOSES = "<|tool_call_start|>", "<|tool_call_end|>"
_CALL_ENDS = re.compile(r"[)\]}]\s*\Z")
_CALLED, _ARGUMENT = re.compile(r"[\w.:/-]+"), re.compile(r"\w+")
_NAME = re.compile(rf"\s*({_CALLED.pattern})\s*\(\s*")
_KEY = re.compile(rf"\s*({_ARGUMENT.pattern})\s*=\s*")
_STRINGS = {sign: re.compile(rf"((?:\\.|[^\\])*?){sign}(?=\s*[,:)\]}}])", re.DOTALL) for sign in "'\""}
"""A string ends where its sign comes before what follows a value: the template escapes no sign within."""
_WORD = re.compile(r"[^\s,:)\]}]+")
_COMMA = re.compile(r"\s*,\s*")
_COLON = re.compile(r"\s*:")
_SPACE = re.compile(r"\s*")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([ntr'\"\\/]))")
_SIGNS = {"n": "\n", "t": "\t", "r": "\r"}
_ESCAPES = str.maketrans({sign: f"\\{name}" for name, sign in {**_SIGNS, "'": "'", "\\": "\\"}.items()})


def _after_calls() -> Callable[[str], bool]:
    """Whether letters end where calls may end."""
    return lambda piece: _CALL_ENDS.search(piece[-80:]) is not None


class Lfm:
    """Reads calls of this style."""

    around: Mapping[str, str] = {_OPENS: _CLOSES}
    tags: tuple[str, ...] = (_OPENS, _CLOSES)
    bare = ""
    following: Following = staticmethod(_after_calls)

    def read(self, pieces: Sequence[str], schemas: Schemas) -> CallsRead:
        """See `CallStyle`."""
        bodies, around = between(pieces, _OPENS, _CLOSES, _after_calls)
        return CallsRead.of([call for body in bodies for call in _calls(joined(body).strip())], around)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """See `CallStyle`. Names that Python does not have are written as JSON."""
        if all(_CALLED.fullmatch(call.name) and all(map(_ARGUMENT.fullmatch, call.arguments)) for call in calls):
            return f"{_OPENS}[{', '.join(map(_written, calls))}]{_CLOSES}"
        return _OPENS + written_json(as_objects(calls), self.tags) + _CLOSES


def _written(call: ToolCall) -> str:
    arguments = (f"{name}={_value(value)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f"'{without_tags(value.translate(_ESCAPES), Lfm.tags)}'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(str(name))}: {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return next((name for name, constant in PYTHON_VALUES.items() if constant is value), json.dumps(value))


def _calls(text: str) -> list[tuple[ToolCall, str]]:
    """The calls between two tags, and what is wrong with each."""
    try:
        if text.startswith(("{", "[{")):
            fields = json.loads(text)
            return [(call_of(call), "") for call in (fields if isinstance(fields, list) else [fields])]
        python = _Python(text.removeprefix("[").removesuffix("]") if text.startswith("[") else text)
        calls = [(python.call(), "")]
        while python.met(_COMMA):
            calls.append((python.call(), ""))
        python.end()
    except UNREADABLE as error:
        return [broken(text, error)]
    return calls


@dataclass
class _Python:
    """Reads calls and values from a text. Its methods raise ValueError where the text has none."""

    text: str
    at: int = 0

    def met(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What a pattern matches here, which is then behind."""
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    def end(self) -> None:
        """Check that nothing is left."""
        self.met(_SPACE)
        if self.at < len(self.text):
            raise ValueError(f"{self.text[self.at :]!r:.40} is behind its calls")

    def call(self) -> ToolCall:
        """A call of keywords."""
        name = self.met(_NAME)
        if name is None:
            raise ValueError("it has no name before a bracket")
        arguments: dict[str, Any] = {}
        while not self._closed(")", arguments):
            key = self.met(_KEY)
            if key is None:
                raise ValueError("an argument has no name")
            arguments[key[1]] = self._value(1)
        return ToolCall(name[1], plain_arguments(arguments))

    def _closed(self, sign: str, items: Any) -> bool:
        """Whether a list of items ends here; else what is between two of them is behind."""
        self.met(_SPACE)
        if self.text.startswith(sign, self.at):
            self.at += 1
            return True
        if items and not self.met(_COMMA):
            raise ValueError(f"a comma or {sign} is missing")
        return False

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST_CALL:
            raise ValueError("it is nested too deep")
        self.met(_SPACE)
        sign = self.text[self.at : self.at + 1]
        if sign in _STRINGS:
            self.at += 1
            if (string := self.met(_STRINGS[sign])) is None:
                raise ValueError("a string has no end")
            return _whole(_ESCAPED.sub(_unescaped, string[1]))
        if sign == "[":
            self.at += 1
            items: list[Any] = []
            while not self._closed("]", items):
                items.append(self._value(depth + 1))
            return items
        if sign == "{":
            return self._mapping(depth)
        word = self.met(_WORD)
        if word is None:
            raise ValueError("a value is missing")
        return PYTHON_VALUES[word[0]] if word[0] in PYTHON_VALUES else json.loads(word[0])

    def _mapping(self, depth: int) -> dict[str, Any]:
        self.at += 1
        fields: dict[str, Any] = {}
        while not self._closed("}", fields):
            key = self._value(depth + 1)
            if not isinstance(key, str) or not self.met(_COLON):
                raise ValueError("a field has no name")
            fields[key] = self._value(depth + 1)
        return fields


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _SIGNS.get(found[3], found[3])


def _whole(text: str) -> str:
    """A text in which two escaped halves are one letter, and half a letter is none."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
