"""Values as JSON holds them, for reward processes and logs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from motet.core.plain_yaml import DEEPEST

_WITHIN = {str, int, float, bool, type(None)}
_PLAIN = {*_WITHIN, dict, list}
"""Kinds of values that a parser of JSON makes."""


def as_json(value: Any, *, infinite_as_text: bool = False) -> Any:
    """Convert a value for JSON: sequences to lists, keys to text, NaN to null, other types by `str`.

    Infinite numbers, which JSON does not have, become null, or the texts `inf` and `-inf`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value) if infinite_as_text and not math.isnan(value) else None
    convert = functools.partial(as_json, infinite_as_text=infinite_as_text)
    if isinstance(value, Mapping):
        return {str(name): convert(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(convert, value), key=str)
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return convert(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def check_plain(value: Any, deepest: int = DEEPEST) -> Any:
    """Check an untrusted value before any code walks through it; returns it.

    Raises ValueError if it holds a value that JSON does not have, or is nested too deep.
    """
    level = [value]
    for _ in range(deepest + 1):
        if not level:
            return value
        level = _below(level)
    raise ValueError(f"this is nested more than {deepest} deep, which nothing here needs; write it flatter")


def _below(level: Sequence[Any]) -> list[Any]:
    """What the lists and objects of one level hold. Raises ValueError for the first value that JSON does not have."""
    kinds, below, names = set(map(type, level)), list[Any](), list[Any]()
    if kinds <= _WITHIN:
        return below
    if kinds <= _PLAIN:  # as a parser makes them; to ask each for its kind takes three times as long
        for value in level:
            if type(value) is dict:
                names += value
                below += value.values()
            elif type(value) is list:
                below += value
        if set(map(type, names)) <= {str}:
            return below
    below = []
    for value in level:
        if isinstance(value, dict):
            if (odd := next((name for name in value if not isinstance(name, str)), None)) is not None:
                raise ValueError(f"the name {odd!r:.80} is not text; quote it")
            below += value.values()
        elif isinstance(value, list):
            below += value
        elif not isinstance(value, str | int | float | None):
            raise ValueError(f"{value!r:.80} is not a value that JSON has; quote it if it is meant as text")
    return below
