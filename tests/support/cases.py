"""Cases of one test of which a few run in every suite, and all by `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def few(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases, of which those that are not kept are left to the soak."""
    found = list(cases)
    assert set(kept) <= set(found), "a case that is to be kept is not there"
    return [case if case in kept else _soak(case) for case in found]


def paired(*fields: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Half of all cases, in which each value of a field meets each of another: fields of two values, but one may have more."""
    places = itertools.product(*(range(len(values)) for values in fields))
    return (case for case, place in zip(itertools.product(*fields), places, strict=True) if sum(place) % 2 == 0)


def _soak(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
