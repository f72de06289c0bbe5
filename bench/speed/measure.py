"""Runs blocks: the sides of a block take turns, repeat after repeat, and its rows compare them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.speed.limits import Counts, Machine, Shape, least_seconds
from bench.speed.link import SideFailed, Workers
from bench.speed.ratios import Ratio, compare, cost, middle
from bench.speed.rows import Block, Row, Side

Answers = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Measured:
    """What came of a row."""

    row: Row
    ratio: Ratio | None
    """None where it was not measured."""
    reason: str = ""
    """Why it was not."""
    ours: float = math.nan
    """Median cost of our side, and of the other."""
    other: float = math.nan
    limit: float = math.nan
    """Share of the machine's limit that our side reaches."""
    notes: tuple[str, ...] = ()
    """What the sides said of themselves."""
    repeats: int = 0

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is none or nothing was measured."""
        if self.ratio is None or self.row.goal is None:
            return None
        return self.row.goal.met(self.ratio.middle)


def run_block(
    block: Block, workers: Workers, repeats: int, say: Callable[[str], None]
) -> tuple[Answers, dict[str, str]]:
    """Prepare the sides of a block and measure them in turn: A B A B …

    Returns:
        The answers of each side, and the reason of each side that failed.
    """
    failed: dict[str, str] = {}
    answers: Answers = {name: [] for name in block.sides}

    def attempt(call: Callable[[str, Side], object]) -> None:
        for name, side in block.sides.items():
            if name not in failed:
                try:
                    call(name, side)
                except SideFailed as error:
                    failed[name] = str(error)
                    say(f"{block.name}: {name} is not measured: {error}")

    def ask(side: Side, op: str, args: Mapping[str, Any], **more: bool) -> dict[str, Any]:
        return workers.ask(side.program, {"op": op, "work": side.work, "args": dict(args), **more})

    def prepare(_: str, side: Side) -> None:
        if isinstance(side.warm, Mapping):
            ask(side, "prepare", side.warm, warm=True)
            ask(side, "release", side.warm)
        ask(side, "prepare", side.args, warm=side.warm is True)

    def measure(name: str, side: Side) -> None:
        answers[name].append(ask(side, "measure", side.args))
        say(f"{block.name}: {name}, repeat {len(answers[name])} of {repeats}: {_told(answers[name][-1])}")

    attempt(prepare)
    for _ in range(repeats):
        attempt(measure)
    attempt(lambda _, side: ask(side, "release", side.args))
    return answers, failed


def _told(answer: Mapping[str, Any]) -> str:
    if "value" in answer:
        return f"{answer['value']:.6g}"
    return f"{answer['seconds']:.2f} s for {answer['units']:,} units"


def judge(
    block: Block, answers: Answers, failed: Mapping[str, str], shape: Shape | None, machine: Machine | None
) -> list[Measured]:
    """Compare the sides of a block for each of its rows."""
    found = []
    for row in block.rows:
        names = [name for name in (row.ours, row.other) if name]
        reasons = [f"{name}: {failed[name]}" for name in names if name in failed]
        if reasons or not all(answers.get(name) for name in names):
            found.append(Measured(row, None, "; ".join(reasons) or "no repeat was measured"))
            continue
        ours = [cost(answer, row.field) for answer in answers[row.ours]]
        others = [cost(answer, row.field) for answer in answers[row.other]] if row.other else []
        if not math.isfinite(middle(ours)):
            found.append(Measured(row, None, "no figure: the run was too short"))
            continue
        found.append(
            Measured(
                row=row,
                ratio=compare(row.compare, ours, others),
                ours=middle(ours),
                other=middle(others),
                limit=_share(block.sides[row.ours], answers[row.ours], shape, machine) if not row.field else math.nan,
                notes=tuple(
                    dict.fromkeys(answer["note"] for name in names for answer in answers[name] if "note" in answer)
                ),
                repeats=len(ours),
            )
        )
    return found


def _share(side: Side, answers: Sequence[Mapping[str, Any]], shape: Shape | None, machine: Machine | None) -> float:
    """Least possible seconds by median seconds; NaN where a work has no limit of this kind."""
    if shape is None or machine is None or not all("counts" in answer for answer in answers):
        return math.nan
    rank = int(side.args.get("rank", 0))
    least = [least_seconds(Counts.of(answer["counts"]), shape, rank, machine) for answer in answers]
    return middle(least) / middle([float(answer["seconds"]) for answer in answers])
