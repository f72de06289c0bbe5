"""What is measured on held-out rows: the figure, which version it recommends, and from which version on a job is trained.

Whatever shows a figure beside a version takes both from here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from motet.core.errors import RunError
from motet.core.types import ADAPTER_WEIGHTS
from motet.runtime.checkpoint import Committed, JobDirectory

REWARD, LOG_LIKELIHOOD, ACCURACY = "reward", "log-lik", "accuracy"
_LONGEST_HEADER = 2**24
UNTRAINED = "untrained.txt"
"""A file in a copy of an untrained adapter, which is no longer beside the metrics of its job; it has the reason."""
IS_UNTRAINED = "is untrained: it equals the adapter that the job began with"
_CONFIRMS = 3
Evaluations = Sequence[tuple[int, float]]
"""(version, figure), in order; higher is better."""


def figure_of(line: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of the main figure in a metrics line or its `eval` part; nan if unknown."""
    if ACCURACY in line and REWARD not in line:
        return ACCURACY, math.nan if line[ACCURACY] is None else float(line[ACCURACY])
    name = REWARD if REWARD in line else LOG_LIKELIHOOD
    value = line.get(REWARD) if name == REWARD else line.get("nll", line.get("loss"))
    return name, math.nan if value is None else float(value) if name == REWARD else -float(value)


def ranked(figures: Mapping[str, Any], best_by: str) -> tuple[float, float]:
    """What decides between versions, and between those that are equal in it; more is better.

    The loss decided when jobs without `best_by` began.
    """
    tie = -float(figures["loss"]) if "loss" in figures else 0.0
    return (tie, 0.0) if "loss" in figures and not best_by else (figure_of(figures)[1], tie)


def deciding(rows: Sequence[float]) -> list[float]:
    """Return the rows that choose a version under `eval.confirm`: all but every third one, which can confirm the choice."""
    return [value for place, value in enumerate(rows) if place % _CONFIRMS != _CONFIRMS - 1]


def mean_of(rows: Sequence[float]) -> float:
    """Return the mean over the rows whose reward is known; -inf without any."""
    known = [value for value in rows if math.isfinite(value)]
    return fmean(known) if known else -math.inf


def unchanged(line: Mapping[str, Any]) -> bool:
    """Whether the step of a metrics line left the adapter as it was: without a gradient, without a rate, or skipped."""
    still = "grad_norm" in line and (not line["grad_norm"] or line.get("lr") == 0 or bool(line.get("skipped")))
    return still and not line.get("loaded")


def first_trained(lines: Iterable[Mapping[str, Any]]) -> int | None:
    """The first version that differs from the adapter that the job began with; None if no line changed it."""
    return next((int(line["step"]) + 1 for line in lines if "loss" in line and not unchanged(line)), None)


def lines_of(metrics: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics.jsonl, one after the other."""
    with contextlib.suppress(OSError, ValueError), metrics.open("rb") as file:
        yield from (json.loads(line) for line in file)


def newest_commit(job: JobDirectory) -> Committed | None:
    """The newest commit; None before the first, and where it is damaged."""
    with contextlib.suppress(RunError):
        return job.newest()
    return None


def untrained(adapter: Path, name: str = "") -> str:
    """Why a PEFT directory is untrained; empty if it is trained. The text calls it `name` if given.

    It is a version of a job that no step has changed, or all its matrices B are zero, so that it answers like its base.
    """
    job = adapter.parent.parent
    if (adapter / UNTRAINED).is_file():
        return (adapter / UNTRAINED).read_text("utf-8")
    if adapter.parent.name == "versions" and adapter.name[1:].isdecimal() and (job / "metrics.jsonl").is_file():
        trained_from = first_trained(lines_of(job / "metrics.jsonl"))
        if trained_from is None or int(adapter.name[1:]) < trained_from:
            return f"{name or f'{adapter.name} of {job.name}'} {IS_UNTRAINED}"
    elif (adapter / ADAPTER_WEIGHTS).is_file() and _is_zero(adapter / ADAPTER_WEIGHTS):
        return f"{name or adapter} is untrained: its matrices B are zero, and it answers like its base"
    return ""


def _is_zero(weights: Path) -> bool:
    """Whether all tensors B of a .safetensors file are zero; false where it cannot be read, which others tell."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        parts = json.loads(file.read(min(size, _LONGEST_HEADER)))
        ends = [part["data_offsets"] for name, part in parts.items() if "lora_B" in name]
        for start, end in ends:
            file.seek(8 + size + start)
            if any(file.read(end - start)):
                return False
        return bool(ends)
    return False


def best_after(done: Committed, version: int, score: float, tie: float, *, trained: bool) -> Committed:
    """The counters after a version was evaluated: an untrained one is never the best, but in jobs by older releases."""
    if not math.isfinite(score) or not (trained or not done.best_by):
        return done
    if done.best_reward is not None and (score, tie) <= (done.best_reward, done.best_tie):
        return done
    return replace(done, best_version=version, best_reward=score, best_tie=tie)


def named_best(done: Committed | None) -> int | None:
    """The version that `best` names at a commit: the last one where no trained version was evaluated."""
    if done is None or done.best_version is not None:
        return done.best_version if done else None
    return done.step


def recommended(evaluations: Evaluations, best: int | None, kept: Collection[int]) -> tuple[int, float] | None:
    """The version to take of those `kept` on disk, and its figure, nan if it has none; None if nothing is kept.

    It is `best` of `named_best`. Where that is unknown or not kept, it is the best of those kept, but for version 0.
    """
    known = {version: figure for version, figure in evaluations if math.isfinite(figure)}
    trained = [version for version in kept if version]
    left = [version for version in known if version in trained] or trained or [*kept]
    if best not in kept and left:
        best = max(left, key=lambda version: (known.get(version, -math.inf), version))
    return None if best is None or best not in kept else (best, known.get(best, math.nan))


def rule_text(best_by: str, figure: str) -> str:
    """What a person reads where another figure than the one shown chose the best version; otherwise empty."""
    by_loss = figure == ACCURACY and not best_by
    return "chosen by held-out loss, the rule of the release that began the job" if by_loss else ""
