"""What the model wrote before and after, and what the job was asked for. Everything here came from users or models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from motet.report.escape import shown
from motet.report.figures import colour, symbol
from motet.report.read import JobRecord, Line, Pair, RunRecord, number

_SHAPES = {  # corners of a marker, and by how many of them it is turned
    "circle": (0, 0.0),
    "square": (4, 0.5),
    "diamond": (4, 0.0),
    "triangle-up": (3, 0.0),
    "triangle-down": (3, 0.5),
    "pentagon": (5, 0.0),
}
_MAX_TEXT = 6000  # characters of one completion or prompt


def samples(run: RunRecord) -> str:
    """Before and after of every job that has evaluations."""
    with_pairs = [(index, job) for index, job in enumerate(run.jobs) if job.pairs]
    if not with_pairs:
        return ""
    parts = [_job_samples(index, job, is_open=place == 0) for place, (index, job) in enumerate(with_pairs)]
    return (
        '<section><h2>Before and after</h2><p class="about">The first held-out problems in data order, not a choice of the '
        "best: what the first and the newest evaluated version answered.</p>" + "".join(parts) + "</section>"
    )


def configurations(run: RunRecord) -> str:
    """job.yaml of every job."""
    parts = [
        f"<details><summary>{swatch(index)}{shown(job.name)}</summary>"
        f'<div class="inside"><pre class="config">{shown(job.config_text)}</pre></div></details>'
        for index, job in enumerate(run.jobs)
        if job.config_text
    ]
    return f"<section><h2>Configuration</h2>{''.join(parts)}</section>" if parts else ""


def swatch(index: int) -> str:
    """The job's marker in its colour."""
    sides, turn = _SHAPES[symbol(index)]
    radius = 6.0 if sides == 0 else 7.0
    angles = [2 * math.pi * (corner + turn) / sides for corner in range(sides)]
    points = " ".join(f"{7 + radius * math.sin(a):.1f},{7 - radius * math.cos(a):.1f}" for a in angles)
    shape = f'<polygon points="{points}"' if sides else f'<circle cx="7" cy="7" r="{radius:g}"'
    return f'<svg class="swatch" width="14" height="14" aria-hidden="true">{shape} fill="{colour(index)}"/></svg>'


def _job_samples(index: int, job: JobRecord, *, is_open: bool) -> str:
    first, last = job.pair_versions or (0, 0)
    told = f"version {first} and {last}" if last != first else f"version {first} only so far"
    sides = "".join(_sample(pair, first, last) for pair in job.pairs)
    return (
        f"<details{' open' if is_open else ''}><summary>{swatch(index)}{shown(job.name)}"
        f'<span class="about-job">{told}</span></summary><div class="inside">{sides}</div></details>'
    )


def _sample(pair: Pair, first: int, last: int) -> str:
    answer = (
        f'<div class="answer"><span class="label">reference</span>{_text(pair.answer)}</div>' if pair.answer else ""
    )
    after = _side("after", last, pair.after, pair.before) if last != first else ""
    return (
        '<article class="sample"><div class="problem"><div><span class="label">problem</span>'
        f'<div class="prompt">{_text(pair.prompt)}</div></div>{answer}</div>'
        f'<div class="sides">{_side("before", first, pair.before, None)}{after}</div></article>'
    )


def _side(when: str, version: int, line: Line | None, earlier: Line | None) -> str:
    title = f"<span>{when} · v{version}</span>"
    if line is None:
        return f'<div class="side"><header>{title}</header><p class="soft">not in this evaluation</p></div>'
    turns = line.get("turns")
    texts = [str(turn) for turn in turns] if isinstance(turns, list) and turns else [str(line.get("completion") or "")]
    written = "".join(f"<pre>{_text(text) or '(nothing)'}</pre>" for text in texts)
    return f'<div class="side"><header>{title}{_reward(line, earlier)}</header>{written}{_ending(line)}</div>'


def _reward(line: Line, earlier: Line | None) -> str:
    value = number(line.get("reward"))
    before = number(earlier.get("reward")) if earlier else None
    if value is None:
        return '<span class="bad">no reward</span>'
    change = "" if before is None or before == value else ("good" if value > before else "bad")
    arrow = {"good": " ▲", "bad": " ▼"}.get(change, "")
    return f'<span title="{_parts(line)}">reward <b class="{change}">{value:.3g}{arrow}</b></span>'


def _parts(line: Line) -> str:
    parts: Any = line.get("reward_parts")
    known = parts.items() if isinstance(parts, Mapping) else ()
    return shown(", ".join(f"{name} {value:.3g}" for name, item in known if (value := number(item)) is not None))


def _ending(line: Line) -> str:
    if line.get("error"):
        return f'<p class="bad">{_text(str(line["error"]))}</p>'
    return '<p class="warm">cut off at max_tokens</p>' if line.get("finish_reason") == "length" else ""


def _text(text: str) -> str:
    cut = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"
    return shown(cut)
