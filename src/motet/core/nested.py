"""Values of a row by the names of columns, with a path into objects, such as `reward_model.ground_truth`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

_MOST_NAMED = 40
MISSING = object()
"""What a row has where a name leads nowhere."""


def value_at(row: Any, name: str) -> Any:
    """The value of a column, or at a path into it; `MISSING` if there is none.

    Dots lead into objects, and numbers into lists, also where a text holds them as JSON. A name with dots itself comes first.
    """
    while True:
        if isinstance(row, Mapping):
            head = name if name in row else max(_heads(row, name), key=len, default=None)
            if head is None:
                return MISSING
            row, name = row[head], name[len(head) + 1 :]
        elif isinstance(row, list):
            head, _, name = name.partition(".")
            if not (head.isascii() and head.isdigit()) or len(head) > 9 or int(head) >= len(row):
                return MISSING
            row = row[int(head)]
        elif isinstance(row, str) and isinstance(inside := _parsed(row), Mapping | list):
            row = inside
            continue
        else:
            return MISSING
        if not name:
            return row


def may_lead_on(row: Mapping[str, Any], name: str) -> bool:
    """Whether a column of the row is the beginning of a path, and other rows may have a value there."""
    return any(row[head] is None or isinstance(_parsed(row[head]), Mapping | list) for head in _heads(row, name))


def _heads(row: Mapping[Any, Any], name: str) -> list[str]:
    """The keys that a path may begin with. They are searched, not the path, whose beginnings may be long and many."""
    return [key for key in row if isinstance(key, str) and name.startswith(f"{key}.")] if "." in name else []


def names_of(row: Mapping[str, Any]) -> list[str]:
    """The names of a row's columns for a message; a column of objects by its paths."""
    names = []
    for name, value in row.items():
        value = _parsed(value)
        names += [f"{name}.{field}" for field in value] if isinstance(value, Mapping) and value else [name]
    return names[:_MOST_NAMED] + ["…"] * (len(names) > _MOST_NAMED)


def _parsed(value: Any) -> Any:
    """What a text holds as JSON, if it is an object or a list; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def answer_of(value: Any) -> str:
    """A value as a reference answer: as text, and a list of one text or number (`["2"]`, also as JSON) as that one."""
    inside = _parsed(value)
    only = inside[0] if isinstance(inside, list) and len(inside) == 1 else None
    kinds = str if isinstance(value, str) else str | int | float  # a text [2] may be what has to be answered
    return text_of(only if isinstance(only, kinds) and not isinstance(only, bool) else value)


def text_of(value: Any) -> str:
    """A value as text, in prompts and in answers: a text as it is, nothing as an empty text, all else as JSON."""
    if value is None or value is MISSING:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
