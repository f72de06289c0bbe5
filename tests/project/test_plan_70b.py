"""The plan for a 70B base: computed, told in docs/capacity.md, and refused where memory does not suffice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.plan_70b import Assumptions, busiest, plan
from hypothesis import given
from hypothesis import strategies as st

from motet.training.sharded.trainer import scatter

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_says_what_the_assumptions_give() -> None:
    made, page = plan(Assumptions()), " ".join((DOCS / "capacity.md").read_text().split())
    assert f"A rank would need {sum(made.parts_gb.values()):.0f} of 80 GB" in page
    assert f"would take {made.outcome.steps_per_hour:.0f} steps an hour" in page


def test_a_slower_link_or_fewer_cards_have_their_price() -> None:
    usual = plan(Assumptions())
    assert usual.weights_gb == pytest.approx(141.1, abs=0.1)
    slow = plan(replace(Assumptions(), link_gb_per_second=10.0))
    assert slow.link_seconds > slow.pass_seconds
    assert slow.outcome.steps_per_hour < usual.outcome.steps_per_hour
    assert slow.outcome.cost > usual.outcome.cost


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a card has 80"):
        plan(replace(Assumptions(), slots=64))


def test_segments_have_the_samples_of_a_group_or_more() -> None:
    """Eight completions of 512 tokens share a prompt of 128."""
    assert busiest(Assumptions()) == (1, 4224)
    assert busiest(replace(Assumptions(), segment_tokens=2112)) == (3, 3 * 1664)
    assert busiest(replace(Assumptions(), segment_tokens=1024)) == (7, 7 * 640)  # a sample each, with its prompt


def test_a_rank_keeps_a_gradient_of_each_segment_in_the_type_of_the_base() -> None:
    usual, many = plan(Assumptions()), plan(replace(Assumptions(), segment_tokens=1024, slots=8))
    size, part = 2 * usual.adapter / 1e9, "gradients of segments under way"
    assert usual.parts_gb[part] == pytest.approx(2 * size)  # its own, and one that arrives
    assert many.parts_gb[part] == pytest.approx(8 * size)
    weights = 2 * 7 / 8 * (usual.weights_gb - 4 * 128256 * 8192 / 1e9)
    assert usual.gathered_gb == pytest.approx(weights + size * 7 / 8)


@given(st.lists(st.integers(1, 4224), min_size=1, max_size=60))
def test_no_rank_has_more_than_two_ninths_of_a_pass_however_long_segments_are(lengths: list[int]) -> None:
    while sum(lengths) > Assumptions().train_tokens:
        lengths.pop()
    ranks = scatter(lengths, [0] * len(lengths), 8)
    assert max(sum(n for n, rank in zip(lengths, ranks, strict=True) if rank == one) for one in range(8)) <= 7_509
