"""Names that are given more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def doubled_in(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in the order of their first occurrences."""
    return [name for name, count in Counter(names).items() if count > 1]
