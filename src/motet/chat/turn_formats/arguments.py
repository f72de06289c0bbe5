"""Arguments of calls: JSON as a model writes it, and texts that a tool's schema gives their types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from motet.core.plain_json import check_plain
from motet.core.types import ToolCall

DEEPEST_CALL = 100
"""Deepest nesting of a call's arguments, because logs and rewards walk through them recursively."""
MOST_CALLS = 256
"""Most calls of one turn: each is a request to the environment."""
_MOST_STEPS = 64
"""Schemas that are looked at for the types of one argument, and types, values and choices of each."""
_SHOWN = 40
_NAME = re.compile(r"[\w.:/-]*")
"""What a tool can be called."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a call raises if it is broken."""
PYTHON_VALUES = {"True": True, "False": False, "None": None}
"""How some templates write these values."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The parameters of tools, given as `{"type": "function", "function": {"name", "parameters"}}`."""
    functions = (tool.get("function", tool) for tool in tools)
    return {str(tool.get("name", "")): tool.get("parameters") or {} for tool in functions if isinstance(tool, Mapping)}


def call_of(fields: Any) -> ToolCall:
    """The call in an object with `name`, and `arguments` or `parameters`. Raises one of `UNREADABLE` if there is none."""
    arguments = fields["arguments"] if "arguments" in fields else fields.get("parameters", {})
    return ToolCall(str(fields["name"]), plain_arguments(arguments))


def plain_arguments(value: Any) -> dict[str, Any]:
    """Arguments, also as a text of JSON. Raises one of `UNREADABLE` if they are no object, or nested too deep."""
    value = json.loads(value) if isinstance(value, str) else value
    return dict(check_plain({} if value is None else value, DEEPEST_CALL))


def as_objects(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Calls as the objects of JSON that most forms write."""
    return [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]


def written_json(value: Any, tags: Iterable[str] = ()) -> str:
    """A value as JSON without the letters of tags."""
    return without_tags(json.dumps(value, ensure_ascii=False), tags)


def without_tags(text: str, tags: Iterable[str]) -> str:
    """A text of escaped strings in which the first letter of each tag is escaped."""
    for tag in tags:
        text = text.replace(tag, f"\\u{ord(tag[0]):04x}{tag[1:]}")
    return text


def broken(text: str, error: Exception) -> tuple[ToolCall, str]:
    """A call of a tool that does not exist, whose error the model reads; and what is wrong with the call."""
    shown = text.strip()[:_SHOWN]
    name = f"({shown})" if _NAME.fullmatch(shown) else shown
    return ToolCall(name, {}), f"a call cannot be read: {f'{type(error).__name__}: {error}':.200}"


def written_texts(call: ToolCall, tags: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each argument's name, and its text where a tool's schema gives it its type; JSON has the letters of no tag."""
    for name, value in call.arguments.items():
        yield name, value if isinstance(value, str) else written_json(value, tags)


class TypedTexts:
    """Arguments of one turn's calls that are written as texts."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas, self._known = schemas, dict[tuple[str, str], set[str]]()

    def value(self, tool: str, name: str, text: str) -> Any:
        """A string stays as it is; other types are JSON, or text if they are none."""
        if (types := self._known.get((tool, name))) is None:
            root: Any = self._schemas.get(tool)
            properties = root.get("properties") if isinstance(root, Mapping) else None
            schema = properties.get(name) if isinstance(properties, Mapping) else None
            types = self._known[tool, name] = set(_types(schema, root))
        return _typed(text, types)


def _typed(text: str, types: set[str]) -> Any:
    if types == {"string"}:
        return text
    try:
        value = check_plain(json.loads(text), DEEPEST_CALL)
    except (ValueError, RecursionError):
        value = PYTHON_VALUES.get(text.strip(), text)
        return value if types & _names(value) else text
    if "string" in types and (isinstance(value, str) or not types & _names(value)):
        return text
    if isinstance(value, float) and "integer" in types - {"number"} and value.is_integer():
        return int(value)
    return value


def _names(value: Any) -> set[str]:
    """The types of JSON schemas that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _types(schema: Any, root: Any) -> Iterator[str]:
    """The types that a schema allows; none if it does not say. `root` has the definitions to which it may refer."""
    left, steps = [schema], 0
    while left and steps < _MOST_STEPS:
        part, steps = left.pop(), steps + 1
        if not isinstance(part, Mapping):
            continue
        named = part.get("type")
        names = named if isinstance(named, list) else [named]
        yield from (name for name in names[:_MOST_STEPS] if isinstance(name, str))
        if named is None:
            values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
            yield from (name for value in values[:_MOST_STEPS] for name in _names(value))
        if part.get("nullable") is True:
            yield "null"
        for several in ("anyOf", "oneOf", "allOf"):
            left += part[several][:_MOST_STEPS] if isinstance(part.get(several), list) else []
        if isinstance(part.get("$ref"), str):
            left.append(_referred(part["$ref"], root))


def _referred(path: str, root: Any) -> Any:
    """The definition to which `#/$defs/…` refers, or None."""
    for name in path.removeprefix("#").split("/", _MOST_STEPS)[1:_MOST_STEPS]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
