"""How rows of a decode batch are shared out among tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.rollout.batch_rows import row_limits

pytestmark = pytest.mark.tier1

TENANTS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(1, 300), st.integers(0, 40), st.sampled_from([0.25, 1.0, 3.0])),
    min_size=1,
)


def limits(rows: int, tenants: dict[str, tuple[int, int, float]]) -> dict[str, int]:
    """Of tenants that want so many rows, have some of them, and have a share."""
    whole = sum(share for _, _, share in tenants.values())
    return row_limits(
        {name: wanted for name, (wanted, _, _) in tenants.items()},
        {name: had for name, (_, had, _) in tenants.items()},
        {name: share / whole for name, (_, _, share) in tenants.items()},
        rows,
    )


@given(TENANTS, st.integers(1, 64))
def test_rows_are_all_given_and_each_tenant_has_one_before_anybody_has_two(tenants, rows):
    found = limits(rows, tenants)
    wanted = sum(wanted for wanted, _, _ in tenants.values())
    if len(tenants) > 1 and wanted > rows:
        assert sum(found.values()) == rows
        assert all(found[name] <= tenants[name][0] for name in tenants)
        assert min(found.values()) >= 1 or max(found.values()) == 1
    else:
        assert set(found.values()) == {rows}


def test_a_tenant_that_wants_little_gets_it_and_others_share_the_rest():
    assert limits(8, {"chat": (1, 0, 1.0), "long": (100, 8, 1.0)}) == {"chat": 1, "long": 7}
    assert limits(8, {"a": (100, 8, 1.0), "b": (100, 0, 1.0)}) == {"a": 4, "b": 4}
    assert limits(9, {"a": (100, 8, 2.0), "b": (100, 0, 1.0)}) == {"a": 6, "b": 3}


def test_a_row_that_cannot_be_halved_stays_where_it_is():
    for a, b in ((100, 90), (90, 100)):
        assert limits(7, {"a": (a, 4, 1.0), "b": (b, 3, 1.0)}) == {"a": 4, "b": 3}
    assert limits(1, {"a": (9, 1, 1.0), "b": (1, 0, 1.0)}) == {"a": 1, "b": 0}
