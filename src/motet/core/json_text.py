"""JSON of values whose numbers may not be finite, which JSON cannot hold and strict writers refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def _null(number: float) -> None:
    """What stands for any of them."""


def named(number: float) -> str:
    """Its name as protobuf writes it in JSON; Python's `float` and pydantic read it back."""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def finite(value: Any, instead: Callable[[float], str | None] = _null) -> Any:
    """A copy of dicts, lists and tuples in which `instead` gives what replaces each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else instead(value)
    if isinstance(value, dict):
        return {name: finite(item, instead) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, instead) for item in value]
    return value


def json_text(value: Any, instead: Callable[[float], str | None] = _null) -> str:
    """JSON in ASCII, so that half characters can be sent too; numbers that are not finite as in `finite`."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value, instead), allow_nan=False)


def storable(value: Any) -> Any:
    """A copy of plain values whose texts every database keeps: without NUL, and with `?` for half of a surrogate pair."""
    if isinstance(value, str):
        return value.replace("\0", "").encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {storable(name): storable(item) for name, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list) else value


def rough_size(value: object, most: int) -> int:
    """About the bytes of a value as JSON; counted until they are more than `most`."""
    size, rest = 0, [value]
    while rest and size <= most:
        item = rest.pop()
        if isinstance(item, str | Mapping | list | tuple):
            size += len(item) if isinstance(item, str) else 8 * len(item)
        if size <= most and isinstance(item, Mapping):
            rest += (*item, *item.values())
        elif size <= most and isinstance(item, list | tuple):
            rest += item
    return size


def json_pieces(
    value: object, dumps: Callable[[Any], str] = json_text, *, sort_keys: bool = False, depth: int = 3
) -> Iterator[str]:
    """The text of `dumps(value)` in pieces: the values of objects and lists, down to a depth."""
    if depth and isinstance(value, Mapping):
        keys = sorted(value) if sort_keys else value
        parts, ends = ((f"{dumps(key)}: ", value[key]) for key in keys), "{}"
    elif depth and isinstance(value, list | tuple):
        parts, ends = (("", item) for item in value), "[]"
    else:
        yield dumps(value)
        return
    yield ends[0]
    for number, (name, item) in enumerate(parts):
        yield f", {name}" if number else name
        yield from json_pieces(item, dumps, sort_keys=sort_keys, depth=depth - 1)
    yield ends[1]
