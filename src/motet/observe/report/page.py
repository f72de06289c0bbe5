"""The HTML page: the run as JSON, drawn by the dashboard's scripts.

The file contains them and plotly.js, and needs no network.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from motet.observe.names import ranks, task_of
from motet.observe.report.read import JobRecord, Line, RunRecord, Series, number
from motet.observe.report.svg import escaped, printable
from motet.runtime.settings import OVER_SEEDS, Setting

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_SCRIPTS = ("palette.js", "dom.js", "words.js", "charts.js", "curves.js", "tokens.js")
_STYLES = ("base.css", "parts.css")
_MAX_TEXT = 6000  # characters of one completion or prompt


def dashboard_file(name: str) -> str:
    """The text of a dashboard file."""
    return (resources.files("motet.service") / "dashboard" / name).read_text(encoding="utf-8")


def page(run: RunRecord, picture: str) -> str:
    """The whole file; `picture` has the static curves, shown if scripts are off."""
    from plotly.offline import get_plotlyjs

    here = resources.files("motet.observe.report")
    styles = [*map(dashboard_file, _STYLES), (here / "report.css").read_text(encoding="utf-8")]
    scripts = [*map(dashboard_file, _SCRIPTS), (here / "report.js").read_text(encoding="utf-8")]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(run.name)} · Motet</title><style>{''.join(styles)}</style></head>\n<body><main>"
        f"<noscript><p>{escaped(run.name)}: tables, samples and interactive charts need JavaScript.</p>{picture}</noscript>"
        f'</main>\n<script type="application/json" id="report-data">{_json(_run(run))}</script>\n'
        f'<script>{get_plotlyjs()}</script>\n<script type="module">{_one_module("".join(scripts))}</script></body></html>\n'
    )


def _one_module(scripts: str) -> str:
    """Remove imports and exports from joined modules."""
    return re.sub(r"^(import .*\n|export )", "", scripts, flags=re.MULTILINE)


def _json(data: Any) -> str:
    """Safe inside a script element: without <, > and &, and ASCII, so that no character ends a line of JavaScript."""
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run(run: RunRecord) -> dict[str, Any]:
    device = {name: _series(points) for name, points in run.device().items()}
    jobs = [_job(job, run.start) for job in run.jobs]
    settings = _settings(run.settings)
    return {"name": run.name, "device": device, "jobs": jobs, "settings": settings, "seeds": OVER_SEEDS}


def _settings(groups: Sequence[Setting]) -> list[dict[str, Any]]:
    """The results of each setting over its seeds, with its rank within its task; empty if no setting has several seeds."""
    if all(len(group.jobs) < 2 for group in groups):
        return []
    places = ranks((group.name, group.held_out.mean if group.held_out else None) for group in groups)
    return [
        {
            "name": group.name,
            "place": places.get(group.name),
            "jobs": len(group.jobs),
            "seeds": group.held_out.n if group.held_out else 0,
            "before": group.before and _short(group.before.mean),
            "mean": group.held_out and _short(group.held_out.mean),
            "half": group.held_out and _short(group.held_out.half),
        }
        for group in sorted(groups, key=lambda group: (task_of(group.name), places.get(group.name, len(groups))))
    ]


def _job(job: JobRecord, start: float) -> dict[str, Any]:
    return {
        "name": job.name,
        "state": job.state,
        "message": printable(job.message),
        "inexact": printable("; ".join(job.inexact)),
        "warnings": [printable(warning) for warning in job.warnings],
        "config": printable(job.config_text),
        "base": Path(job.base).name if Path(job.base).is_absolute() else job.base,
        "planned": job.planned,
        "done": job.done,
        "tokens": job.tokens,
        "best": job.best and job.best[0],
        "best_figure": job.best and _short(job.best[1]),
        "figure": job.figure,
        "rule": job.rule,
        "adapter": _adapter(job),
        "evaluations": job.evaluations.ys,
        "series": {field: _series(points) for field, points in job.columns.items()},
        "used": _series(job.used(start)),
        "versions": job.pair_versions,
        "pairs": [
            {
                "prompt": _cut(pair.prompt),
                "answer": _cut(pair.answer),
                "before": _rollout(pair.before),
                "after": _rollout(pair.after),
            }
            for pair in job.pairs
        ],
    }


def _adapter(job: JobRecord) -> str:
    """The best version that exists."""
    if job.best is None:
        return "none yet"
    return f"{job.name}/versions/v{job.best[0]}"


def _series(points: Series) -> dict[str, list[float | None]]:
    thinned = points.thinned()
    return {"x": [_short(x) for x in thinned.xs], "y": [_short(y) for y in thinned.ys]}


def _rollout(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    turns, parts, branches = line.get("turns"), line.get("reward_parts"), line.get("branches")
    return {
        "turns": [_cut(text) for text in (turns if isinstance(turns, list) and turns else [line.get("completion")])],
        "reward": number(line.get("reward")),
        "reward_parts": {name: number(part) for name, part in parts.items()} if isinstance(parts, dict) else {},
        "branches": [
            {"turn": number(branch.get("turn")), "after": number(branch.get("after"))}
            for branch in (branches if isinstance(branches, list) else [])
            if isinstance(branch, dict)
        ],
        "error": _cut(line.get("error")),
        "finish_reason": line.get("finish_reason") if isinstance(line.get("finish_reason"), str) else "",
        "tokens": number(line.get("tokens")),
    }


def _cut(value: Any) -> str:
    text = "" if value is None else printable(str(value))
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"


def _short(value: float) -> float | None:
    """Round to five significant digits, which are enough for a picture; whole numbers stay whole, and a gap is null."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")
