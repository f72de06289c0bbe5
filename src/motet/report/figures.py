"""Which curves are drawn, as plain records: the page hands them to plotly.js, tests look at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from motet.report.read import JobRecord, Line, RunRecord, Series, number, series

COLOURS = ("#2e6be6", "#ec7000", "#14a085", "#b5246f", "#a486d6", "#7f6a08")
"""Told apart with any colour vision (smallest OKLab distance 0.09 under deuteranopia and protanopia), on white and on black."""
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon")
DEVICE_COLOURS = {"decode": "#5f7ea8", "train": "#c2a15f", "idle": "#8b919c"}

Kind = Literal["raw", "smooth", "line", "markers", "area"]
_SMOOTH_FROM = 12  # points; shorter curves are drawn as they are
_SPARSE = 0.7  # share of the steps below which points are marked


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    job: int | None
    """Place of the job in the run; None for what belongs to the device."""
    kind: Kind
    points: Series


@dataclass(frozen=True)
class Chart:
    """One picture."""

    key: str
    title: str
    note: str
    """What is to be seen, in a sentence."""
    curves: tuple[Curve, ...]
    x_title: str = "step"
    share: bool = False
    """Values are shares of 1."""
    flat: str = ""
    """Says so where every value is the same."""


SMALL = (  # field of metrics.jsonl, title, note, share
    ("length", "Length", "sampled tokens per rollout", False),
    ("truncated", "Truncated", "share of rollouts that ran into max_tokens", True),
    ("no_signal", "Groups without signal", "share of groups whose rewards are all equal", True),
    ("distinct", "Distinct answers", "share of a group’s answers that differ", True),
    ("entropy", "Entropy", "nats per token", False),
    ("kl_base", "KL to the base", "nats per token, on steps that evaluate", False),
    ("kl_sampler", "KL to the sampler", "nats per token", False),
    ("logprob_gap", "Logprob gap", "largest |trainer − sampler|", False),
    ("grad_norm", "Gradient norm", "before clipping", False),
    ("staleness", "Staleness", "steps that sampling ran ahead", False),
)
_PLAIN = ("logprob_gap", "staleness")  # single values matter: not smoothed
_NOW_AND_THEN = ("kl_base",)  # measured on some steps only: the others are no gaps


def colour(index: int) -> str:
    """The colour of a job, the same in every chart."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Its line style: changes once all colours are taken."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def symbol(index: int) -> str:
    """Its marker: another one when its colour comes again."""
    return SYMBOLS[(index + index // len(COLOURS)) % len(SYMBOLS)]


def learning_charts(run: RunRecord) -> tuple[Chart, ...]:
    """Reward of every step, and held-out evaluations."""
    reward = [curve for index, job in enumerate(run.jobs) for curve in _job_curves(index, job, job.series("reward"))]
    held_out = [
        Curve(job.name, index, "markers", job.evaluations.thinned())
        for index, job in enumerate(run.jobs)
        if job.evaluations
    ]
    return (
        Chart("reward", "Training reward", "mean of each step’s rollouts, thin; smoothed, thick", tuple(reward)),
        Chart("eval", "Held-out reward", "the same problems at every evaluation", tuple(held_out), "version"),
    )


def health_charts(run: RunRecord) -> tuple[Chart, ...]:
    """Small multiples of what tells whether training is sound."""
    charts = []
    for field, title, note, share in SMALL:
        curves = [
            curve
            for index, job in enumerate(run.jobs)
            for curve in _job_curves(index, job, _points(job, field), plain=field in _PLAIN)
        ]
        charts.append(Chart(field, title, note, tuple(curves), share=share, flat=_flat(curves)))
    return tuple(charts)


def device_charts(run: RunRecord) -> tuple[Chart, ...]:
    """What the device did, by the clock. It is shared: lines of all jobs tell about one device."""
    lines = sorted(
        (line for job in run.jobs for line in job.timings if number(line.get("time")) is not None), key=_time
    )
    start = _time(lines[0]) if lines else 0.0
    decode = _over_time(lines, start, lambda line: _device(line, "decode"))
    train = _over_time(lines, start, lambda line: _device(line, "train"))
    idle = _over_time(lines, start, _idle)
    occupancy = _over_time(lines, start, lambda line: _device(line, "occupancy"))
    parts = {"decode": decode, "train": train, "idle": idle}
    areas = tuple(Curve(name, None, "area", points.thinned(400)) for name, points in parts.items() if points)
    full = (Curve("occupancy", None, "line", occupancy.thinned(400)),) if occupancy else ()
    tokens = tuple(
        Curve(job.name, index, "line", _tokens(job, start).thinned(400))
        for index, job in enumerate(run.jobs)
        if _tokens(job, start)
    )
    return (
        Chart("device", "Device time", "share of the time so far", areas, "minutes", share=True),
        Chart("occupancy", "Occupancy", "how full the batches were", full, "minutes", share=True),
        Chart("tokens", "Tokens", "sampled and trained so far, by job", tokens, "minutes"),
    )


def _points(job: JobRecord, field: str) -> Series:
    found = job.series(field)
    return found.known if field in _NOW_AND_THEN else found


def _job_curves(index: int, job: JobRecord, points: Series, *, plain: bool = False) -> list[Curve]:
    if not points:
        return []
    known = len(points.known.xs)
    if known < _SPARSE * job.done or known == 1:
        return [Curve(job.name, index, "markers", points.thinned())]
    if plain or known < _SMOOTH_FROM:
        return [Curve(job.name, index, "line", points.thinned())]
    thinned = points.thinned()
    return [Curve(job.name, index, "raw", thinned), Curve(job.name, index, "smooth", thinned.smoothed())]


def _flat(curves: Sequence[Curve]) -> str:
    values = {value for curve in curves for value in curve.points.known.ys}
    return f"{values.pop():g} throughout" if len(values) == 1 else ""


def _time(line: Line) -> float:
    return number(line.get("time")) or 0.0


def _device(line: Line, part: str) -> float | None:
    device = line.get("device")
    return number(device.get(part)) if isinstance(device, dict) else None


def _idle(line: Line) -> float | None:
    decode, train = _device(line, "decode"), _device(line, "train")
    return None if decode is None or train is None else max(1.0 - decode - train, 0.0)


def _over_time(lines: Sequence[Line], start: float, value: Callable[[Line], float | None]) -> Series:
    return series(((_time(line) - start) / 60, value(line)) for line in lines)


def _tokens(job: JobRecord, start: float) -> Series:
    lines = [line for line in job.timings if number(line.get("time")) is not None]
    keys = ("tokens_sampled", "tokens_trained")
    counts = accumulate(sum(number(line.get(key)) or 0.0 for key in keys) for line in lines)
    return series(((_time(line) - start) / 60, count) for line, count in zip(lines, counts, strict=True))
