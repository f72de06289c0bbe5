"""A few kinds of steps at their limits, and the turns of the engine's loop: `python -m bench.engine_loop` measures all."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.engine_loop import MOST_SECONDS, measured

FEW = (
    "sft: wide rows",
    "RL: large groups",
    "RL: many rewards",
    "agents: nobody",
    "worker: many groups",
    "Tinker: many data",
)


@pytest.mark.soak
@pytest.mark.alone
def test_no_kind_of_step_holds_the_engines_loop(tmp_path: Path) -> None:
    figures = measured(tmp_path, FEW, seconds=3.0)
    assert len(figures) == len(FEW)
    assert [one.kind for one in figures if one.outcome.startswith(("refused", "failed", "4", "5"))] == []
    assert {one.kind: one.turn for one in figures if one.turn > MOST_SECONDS} == {}
