"""Values of a row by the names of columns, with a path into objects, such as `reward_model.ground_truth`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MOST_NAMED = 40
MISSING = object()
"""What a row has where a name leads nowhere."""


def value_at(row: Any, name: str) -> Any:
    """The value of a column, or at a path into it; `MISSING` if there is none.

    Dots lead into objects, and numbers into lists. A name that has dots itself comes first.
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
        else:
            return MISSING
        if not name:
            return row


def may_lead_on(row: Mapping[str, Any], name: str) -> bool:
    """Whether a column of the row is the beginning of a path, and other rows may have a value there."""
    return any(row[head] is None or isinstance(row[head], Mapping | list) for head in _heads(row, name))


def _heads(row: Mapping[Any, Any], name: str) -> list[str]:
    """The keys that a path may begin with. They are searched, not the path, whose beginnings may be long and many."""
    return [key for key in row if isinstance(key, str) and name.startswith(f"{key}.")] if "." in name else []


def names_of(row: Mapping[str, Any]) -> list[str]:
    """The names of a row's columns for a message; a column of objects by its paths."""
    names = []
    for name, value in row.items():
        names += [f"{name}.{field}" for field in value] if isinstance(value, Mapping) and value else [name]
    return names[:_MOST_NAMED] + ["…"] * (len(names) > _MOST_NAMED)


def text_of(value: Any) -> str:
    """A value as text, in prompts and in answers: a text as it is, nothing as an empty text, all else as JSON."""
    if value is None or value is MISSING:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
