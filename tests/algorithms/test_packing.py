"""Cutting and merging, as properties that hold for any jobs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.algorithms.packing import TARGETS, Standing, Waiting, cut, merge
from tests.support.counting import calls

pytestmark = pytest.mark.tier1

LENGTHS = st.lists(st.integers(0, 40), max_size=40)
BUDGET = st.integers(1, 60)
SHARES = {name: (consumed, weight) for name, consumed, weight in (("a", 0.0, 1.0), ("b", 30.0, 2.0), ("c", 30.0, 0.5))}
WAITING = st.lists(
    st.builds(
        lambda job, tokens: Waiting(job, tokens, Standing(*SHARES[job])),
        st.sampled_from(sorted(SHARES)),
        st.integers(1, 40),
    ),
    max_size=20,
)


def test_cut_by_hand() -> None:
    assert cut([3, 4, 2, 9, 1], 8) == (range(2), range(2, 3), range(3, 4), range(4, 5))
    assert cut([4, 4, 4], 8) == (range(2), range(2, 3))
    assert cut([9, 9], 8) == (range(1), range(1, 2))
    assert cut([], 8) == ()
    assert cut([1, 1], 1, targets=[TARGETS + 1, 1]) == (range(1), range(1, 2))
    assert cut([1] * 5, 10, targets=[1000, 280, 1, 10 * TARGETS - 1, 1]) == (range(2), range(2, 4), range(4, 5))


@given(LENGTHS, BUDGET)
def test_every_sample_once_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    cuts = cut(lengths, budget)
    assert [index for piece in cuts for index in piece] == list(range(len(lengths)))
    for piece in cuts:
        assert len(piece) == 1 or sum(lengths[i] for i in piece) <= budget
    for piece, following in pairwise(cuts):  # greedy: the next sample did not fit
        assert sum(lengths[i] for i in piece) + lengths[following[0]] > budget


@given(LENGTHS, LENGTHS, BUDGET)
def test_a_cut_depends_on_what_came_before_it_alone(lengths: list[int], more: list[int], budget: int) -> None:
    """Samples that follow do not move earlier cuts: all but the last stay as they are."""
    alone, longer = cut(lengths, budget), cut(lengths + more, budget)
    assert longer[: max(len(alone) - 1, 0)] == alone[:-1]


@given(WAITING, BUDGET)
def test_merge_keeps_the_order_of_a_job_and_the_budget(waiting: list[Waiting], budget: int) -> None:
    chosen = merge(waiting, budget)
    assert len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(waiting)
    assert len(chosen) == 1 or sum(waiting[i].tokens for i in chosen) <= budget
    for job in SHARES:
        own = [index for index, item in enumerate(waiting) if item.job == job]
        taken = [index for index in chosen if waiting[index].job == job]
        assert taken == own[: len(taken)]


@given(WAITING, BUDGET)
def test_merge_leaves_no_room_for_a_cut_that_could_go(waiting: list[Waiting], budget: int) -> None:
    chosen = set(merge(waiting, budget))
    room = budget - sum(waiting[i].tokens for i in chosen)
    heads = {item.job: item for index, item in reversed(list(enumerate(waiting))) if index not in chosen}
    assert all(item.tokens > room for item in heads.values())


@given(WAITING, BUDGET)
def test_the_least_served_job_goes_first(waiting: list[Waiting], budget: int) -> None:
    if waiting:
        first = waiting[merge(waiting, budget)[0]]
        had = [item.standing for item in waiting]
        assert first.standing.consumed / first.standing.weight == min(one.consumed / one.weight for one in had)


@given(WAITING, BUDGET)
def test_company_changes_neither_the_cuts_nor_their_order(waiting: list[Waiting], budget: int) -> None:
    """Batch after batch until nothing waits: every job is trained on its own cuts, in its own order."""
    left, trained, batches = list(waiting), defaultdict(list), 0
    while left:
        chosen = merge(left, budget)
        assert chosen
        for index in chosen:
            trained[left[index].job].append(left[index].tokens)
        left = [item for index, item in enumerate(left) if index not in set(chosen)]
        batches += 1
    assert batches <= len(waiting)
    for job in SHARES:
        assert trained[job] == [item.tokens for item in waiting if item.job == job]


@pytest.mark.parametrize("budget", [1, 64])
def test_a_batch_looks_at_each_waiting_job_a_few_times(budget: int) -> None:
    """Hundreds of jobs wait at once: to compare all of them for each of them would take the square of their number."""
    waiting = [
        Waiting(f"{n}", 8 + n % 3, Standing(100.0 * n % 37, 1.0, f"t{n % 10}", 100.0 + n % 10)) for n in range(200)
    ]
    with calls() as counted:
        chosen = merge(waiting, budget)
    assert len(chosen) == (1 if budget == 1 else 7)
    assert counted["merge.<locals>.place"] < 4 * len(waiting)


def test_shares_follow_the_weights() -> None:
    """Two jobs with endless work and weights 2 : 1, cuts of uneven size: tokens trained are 2 : 1."""
    consumed = {"heavy": 0.0, "light": 0.0}
    cuts = {"heavy": Waiting("heavy", 7, Standing(weight=2.0)), "light": Waiting("light", 5, Standing(weight=1.0))}
    for _ in range(200):
        waiting = [
            replace(cuts[job], standing=replace(cuts[job].standing, consumed=consumed[job]))
            for job in ("light", "heavy")
            for _ in range(4)
        ]
        for index in merge(waiting, budget=24):
            consumed[waiting[index].job] += waiting[index].tokens
    assert consumed["heavy"] / consumed["light"] == pytest.approx(2.0, rel=0.05)


def test_what_the_batch_gives_counts_at_once() -> None:
    waiting = [Waiting("a", 4)] * 4 + [Waiting("b", 4)] * 4
    assert merge(waiting, budget=16) == (0, 4, 1, 5)
    assert merge([Waiting("c", 4, Standing(consumed=6.0)), *waiting], budget=16) == (1, 5, 2, 6)  # 0, 0, 4, 4 before 6


def test_a_small_cut_may_fill_the_batch_but_not_overtake_its_own_job() -> None:
    waiting = [Waiting("a", 6), Waiting("a", 5), Waiting("a", 1), Waiting("b", 3, Standing(consumed=100.0))]
    assert merge(waiting, budget=10) == (0, 3)
    assert merge([Waiting("a", 50), Waiting("b", 1)], budget=10) == (0,)
    assert merge([], budget=10) == ()


def test_a_group_stays_together_where_it_fits():
    """Two groups of three: prompts of 4 tokens that their followers leave out, answers of 2; each group packs into 10."""
    lengths, shared = [6] * 6, [0, 4, 4] * 2
    assert cut(lengths, 20, shared) == (range(6),)
    assert cut(lengths, 19, shared) == (range(3), range(3, 6)), "the second group would not fit whole"
    assert cut([2, *lengths[:3]], 10, [0, *shared[:3]]) == (range(1), range(1, 4)), "it fits whole into the next one"
    assert cut(lengths, 9, shared) == (range(2), range(2, 3), range(3, 5), range(5, 6)), "no group fits"
    assert cut(lengths, 10) == tuple(range(i, i + 1) for i in range(6)), "nothing is shared"


def test_tenants_choose_in_turn_and_their_jobs_within() -> None:
    crowd = [Waiting(f"a{number}", 4, Standing(tenant="a")) for number in range(10)]
    few = [Waiting("b", 4, Standing(tenant="b")) for _ in range(5)]
    chosen = merge([*crowd, *few], budget=40)
    assert sum(index >= 10 for index in chosen) == 5  # half of the budget, as many as it has
    ahead = [*[Waiting("a", 4, Standing(tenant="a", tenant_consumed=8.0))] * 2, *few]
    assert merge(ahead, budget=12) == (2, 3, 0)
    heavy = [Waiting("a", 4, Standing(weight=2.0, tenant="a")) for _ in range(9)]
    assert sum(index < 9 for index in merge([*heavy, *few], budget=24)) == 4  # a token of such a job counts for half
    wide = [Waiting("a", 4, Standing(tenant="a", share=2.0)) for _ in range(9)]
    assert sum(index < 9 for index in merge([*wide, *few], budget=24)) == 4
