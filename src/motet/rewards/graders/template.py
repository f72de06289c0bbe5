"""Template variables of graders: `{{ item.answer }}`, `{{ sample.output_text }}`, `{{ sample.output_json.name }}`.

`item` is the problem's row, `sample` the model's answer. A path may continue with `.name` and `[0]`. Expressions and
filters are not supported.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

_PATH = re.compile(r"\s*(item|sample)((?:\.[^\s.\[\]{}|()'\"]+|\[\d{1,9}\])+)\s*")
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
SAMPLE = ("output_text", "output_json")
"""Variables of `sample`."""
MOST_FILLED = 2**20
"""Characters of a template with its variables filled in."""
MOST_VARIABLES = 1000
"""Variables of a grader: each is filled in for every answer."""


class UnfilledError(Exception):
    """A variable has no value. `of_item` tells whether the row or the answer lacks it."""

    def __init__(self, variable: str, reason: str, *, of_item: bool) -> None:
        super().__init__(f"{{{{{variable}}}}}: {reason}")
        self.of_item = of_item


FieldPath = tuple[str | int, ...]


def variables(text: str) -> list[tuple[str, FieldPath]]:
    """The (namespace, path) of each variable of a template, in order. Raises ValueError if one is not valid."""
    names = []
    for inside in _split(text)[1::2]:
        match = _PATH.fullmatch(inside)
        if match is None:
            raise ValueError(
                f"{{{{{inside:.80}}}}} is not a variable: write {{{{item.COLUMN}}}}, {{{{sample.output_text}}}} or "
                "{{sample.output_json.FIELD}}"
            )
        path = tuple(int(index) if index else name for name, index in _PART.findall(match[2]))
        if match[1] == "sample" and (path[0] not in SAMPLE or (path[0] == "output_text" and len(path) > 1)):
            raise ValueError(
                f"{{{{{inside}}}}} is not supported: of a sample there are output_text and output_json (and its fields)"
            )
        names.append((match[1], path))
    return names


class Fields:
    """Texts of the fields of a row (`item`) or of an answer (`sample`); each is made once, however often it is filled in."""

    def __init__(self, namespace: str, value: Any) -> None:
        self.value = value
        self._namespace, self._texts = namespace, dict[FieldPath, str]()

    def text(self, path: FieldPath) -> str:
        """The text of a field, unchanged if it is one, otherwise JSON. Raises UnfilledError if there is no such field."""
        if path not in self._texts:
            self._texts[path] = _text(self._namespace, path, self.value)
        return self._texts[path]


def fill(text: str, item: Fields, output: str) -> str:
    """Fill in a template's variables. Texts are inserted unchanged, other values as JSON.

    Raises:
        UnfilledError: a variable has no value, or the text exceeds `MOST_FILLED` characters.
    """
    return "".join(pieces_of(text, item, Fields("sample", output)))


def pieces_of(text: str, item: Fields, sample: Fields) -> list[str]:
    """What `fill` joins. Raises as it does."""
    pieces = _split(text)
    size = sum(map(len, pieces[::2]))
    for index, (namespace, path) in enumerate(variables(text)):
        pieces[2 * index + 1] = filled = (item if namespace == "item" else sample).text(path)
        size += len(filled)
        if size > MOST_FILLED:
            name = ".".join(map(str, (namespace, *path)))
            raise UnfilledError(
                name, f"with it the text has more than {MOST_FILLED} characters", of_item=namespace == "item"
            )
    return pieces


def _split(text: str) -> list[str]:
    """Plain text and the contents of `{{ }}` alternately; runs in linear time."""
    pieces, done = [], 0
    while (opened := text.find("{{", done)) >= 0 and (closed := text.find("}}", opened + 2)) >= 0:
        pieces += [text[done:opened], text[opened + 2 : closed]]
        done = closed + 2
    return [*pieces, text[done:]]


def _text(namespace: str, path: FieldPath, value: Any) -> str:
    of_item, name = namespace == "item", ".".join(map(str, (namespace, *path)))
    if not of_item:
        if path[0] == "output_text":
            return str(value)
        value, path = _parsed(value), path[1:]
        if value is _NOT_JSON:
            raise UnfilledError(name, "the answer is not JSON", of_item=False)
    for part in path:
        if isinstance(value, Mapping) and str(part) in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            raise UnfilledError(name, f"there is no {part!r}", of_item=of_item)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_NOT_JSON: Any = object()


@functools.lru_cache(maxsize=8)
def _parsed(output: str) -> Any:
    try:
        return json.loads(output)
    except (ValueError, RecursionError):
        return _NOT_JSON
