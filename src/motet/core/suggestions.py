"""Names that people write: suggestions for misspelt ones, and those that are given twice."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable


def close_matches(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names most similar to a given one, ignoring case, best first."""
    by_fold: dict[str, str] = {}
    for candidate in known:
        by_fold.setdefault(candidate.casefold(), candidate)
    return [by_fold[fold] for fold in difflib.get_close_matches(name.casefold(), by_fold, n, cutoff)]


def doubled_in(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in the order of their first occurrences."""
    return [name for name, count in Counter(names).items() if count > 1]
