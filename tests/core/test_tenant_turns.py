"""Tenants take turns in the decoder by the time that they took."""

from __future__ import annotations

import pytest

from motet.core.tenant_turns import LEAD, SLACK, Cost, Payer, TenantTurns

pytestmark = pytest.mark.tier1


def payer(tenant: str, share: float = 1.0) -> Payer:
    return Payer(f"job of {tenant}", tenant, share)


def ticked(turns: TenantTurns, rows: dict[str, int], shares: dict[str, float], seconds: float) -> dict[str, int]:
    """How often each tenant's rows got a token in so much time."""
    had = dict.fromkeys(rows, 0)
    while seconds > 0:
        turns.come(rows)
        due = [name for name in rows if turns.had(name) <= turns.due_until(rows)]
        cost = 0.002 + 0.0002 * sum(rows[name] for name in due)
        turns.charge(cost, [(payer(name, shares.get(name, 1.0)), rows[name]) for name in due])
        seconds -= cost
        for name in due:
            had[name] += 1
    return had


@pytest.mark.parametrize("greedy", [8, 256, 4096])
def test_a_few_rows_keep_half_their_pace_beside_any_number(greedy: int) -> None:
    alone = ticked(TenantTurns(), {"small": 8}, {}, 20.0)["small"]
    beside = ticked(TenantTurns(), {"small": 8, "greedy": greedy}, {}, 20.0)
    assert beside["small"] >= 0.45 * alone
    assert beside["greedy"] > 0


def test_equal_tenants_share_their_ticks() -> None:
    had = ticked(TenantTurns(), {"a": 64, "b": 64}, {}, 20.0)
    together = int(20.0 / (0.002 + 0.0002 * 128))
    assert min(had.values()) >= 0.95 * together


def test_twice_the_share_is_twice_the_time() -> None:
    had = ticked(TenantTurns(), {"a": 200, "b": 200}, {"a": 2.0}, 50.0)
    assert had["a"] / had["b"] == pytest.approx(2.0, rel=0.1)


def test_time_without_rows_is_no_credit() -> None:
    turns = TenantTurns()
    ticked(turns, {"a": 8, "b": 8}, {}, 1.0)
    ticked(turns, {"a": 8}, {}, 100.0)
    had = ticked(turns, {"a": 8, "b": 8}, {}, 1.0)
    assert had["a"] >= 0.8 * had["b"]


def test_a_tenant_that_calls_and_one_that_decodes_have_one_account() -> None:
    turns = TenantTurns()
    turns.come(["caller"], "calls")
    turns.come(["decoder"], "decodes")
    turns.charge(1.0, [(payer("caller"), 1)])
    assert turns.ahead("caller", "decodes") == 1.0
    assert turns.ahead("caller", "nowhere") == 0.0
    turns.charge(0.25, [(payer("decoder"), 1)])
    assert turns.ahead("caller", "decodes") == 0.75
    turns.come(["new"], "calls")
    assert turns.ahead("new", "decodes") == 0.0, "whoever comes starts level with the one that had least"


def test_a_tenant_that_is_charged_after_it_left_begins_at_the_level_of_the_others() -> None:
    turns = TenantTurns()
    turns.come(["here"])
    turns.charge(1.0, [(payer("here"), 1)])
    turns.come(["here", "too"])
    turns.charge(0.5, [(payer("gone"), 1)])
    turns.come(["here", "too", "gone"])
    assert turns.had("gone") == 1.5


def test_seconds_are_charged_by_parts_and_counted_by_job() -> None:
    turns = TenantTurns()
    turns.come(["a", "b"])
    one, other, double = Payer("1", "a"), Payer("2", "a"), Payer("3", "b", 2.0)
    assert turns.charge(2.0, [(one, 1), (double, 4), (other, 2), (one, 1)]) == {
        "1": 500_000,
        "2": 500_000,
        "3": 1_000_000,
    }
    assert (turns.had("a"), turns.had("b")) == (1.0, 0.5)
    assert turns.charge(2.0, [(one, 0)]) == turns.charge(2.0, []) == {}
    assert (turns.had("a"), turns.due_until(["a", "b"])) == (1.0, 0.5 + SLACK)


def test_a_tenant_that_is_hardly_ahead_shares_the_tick() -> None:
    turns, found = TenantTurns(), []
    turns.come(["a", "b"])
    for seconds in (SLACK, 1e-5):
        turns.charge(seconds, [(payer("a"), 1)])
        found.append(turns.had("a") <= turns.due_until(["a", "b"]))
    assert found == [True, False]


def test_who_is_asked_may_be_ahead_of_others_but_not_of_its_own_work() -> None:
    turns = TenantTurns()
    turns.come(["asked", "other"], "calls")
    turns.come(["asked"], "decodes", frozenset(["asked"]))
    turns.charge(LEAD / 2, [(payer("asked"), 1)])
    assert turns.ahead("other", "decodes") == pytest.approx(LEAD / 2), "the other waits, though it had less"
    assert turns.ahead("asked", "decodes") == 0.0, "calls of its own job take turns with its answers"
    turns.charge(LEAD, [(payer("asked"), 1)])
    assert turns.ahead("other", "decodes") == pytest.approx(-LEAD / 2)


def test_company_is_several_tenants_within_seconds() -> None:
    now = [100.0]
    turns, found = TenantTurns(lambda: now[0]), []
    for tenants, seconds in ((["a", ""], 0.0), (["a", "b"], 1.0), (["a"], 1.0), (["a"], 0.0)):
        turns.come(tenants)
        found.append(turns.company)
        now[0] += seconds
    assert found == [False, True, True, False], "calls of nobody are no company, and one that pauses comes back"


@pytest.mark.parametrize(
    ("same", "each", "most"),
    [(0.004, 0.0003, 13), (0.0, 0.01, 8), (0.028, 0.00001, 256), (0.001, 0.00001, 200)],
    ids=["a CPU", "slow", "a device that takes as long for one row", "fast"],
)
def test_a_piece_is_as_large_as_it_is_worth(same: float, each: float, most: int) -> None:
    cost = Cost()
    for rows in [256, 8, 200, 120, 40, 256, 64] * 6:
        cost.add(rows, same + each * rows)
    assert cost.most(256) == pytest.approx(most, rel=0.15)


def test_a_piece_is_a_32nd_in_whole_rows_at_least() -> None:
    cost = Cost()
    for rows in (100, 8, 40):
        cost.add(rows, 0.01 * rows)
    assert cost.most(96) == 3
    assert cost.most(4) == 1


def test_a_piece_of_unknown_cost_is_whole() -> None:
    cost = Cost()
    assert cost.most(256) == 256
    cost.add(100, 0.01)
    assert cost.most(256) == pytest.approx(30, abs=1), "the first one counts as proportional to its size"


@pytest.mark.parametrize(("rows", "seconds", "most"), [(1, 0.01, 3), (8, 0.0, 96)])
def test_a_single_row_tells_its_cost_and_no_time_tells_none(rows: int, seconds: float, most: int) -> None:
    cost = Cost()
    cost.add(rows, seconds)
    assert cost.most(96) == most
