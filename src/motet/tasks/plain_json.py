"""Values as JSON holds them: what crosses to reward processes and what goes into logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """A value as JSON holds it: sequences as lists, keys as text, NaN as null, what JSON has no word for as `str`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((as_json(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return as_json(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
