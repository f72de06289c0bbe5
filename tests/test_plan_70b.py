"""The plan for a 70B base (`docs/plan-70b.md`): computed, and refused where memory does not suffice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.plan_70b import BEGIN, END, PAGE, Assumptions, plan, written


def test_the_page_is_what_the_assumptions_give() -> None:
    kept = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert kept.strip() == written(Assumptions()).strip()


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
