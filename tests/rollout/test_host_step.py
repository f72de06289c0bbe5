"""What a decode step costs the host grows little with its rows, so that a card need not wait for it."""

from __future__ import annotations

import itertools

import pytest
from bench.host_step import Ahead, before_steps

from tests.support.counting import calls

_STEPS = 96


def calls_in_a_step(n_rows: int, tenants: int, max_tokens: int) -> float:
    """On average."""
    begun = None
    with calls(own_thread=True) as counted:
        for decoder in itertools.islice(before_steps(Ahead(), n_rows, tenants, max_tokens), _STEPS):
            begun = counted.total() if begun is None else begun
            decoder.tick()
    return (counted.total() - (begun or 0)) / _STEPS


@pytest.mark.parametrize(("tenants", "each"), [(1, 4), (3, 0)])
def test_rows_are_looked_at_without_a_call_of_a_function_for_each(tenants: int, each: int) -> None:
    """While a row ends and another begins in every fourth step, and while several tenants take turns."""
    few, many = (calls_in_a_step(rows, tenants, each * rows) for rows in (32, 96))
    per_row = (many - few) / 64
    print(f"{per_row:.1f} calls for each row")
    assert per_row < 16
