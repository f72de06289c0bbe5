"""The page about speed: written by the bench, but for the part between two marks, which people write."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.speed.measure import Measured
from bench.speed.profiling import GROUPS
from bench.speed.rows import Block
from bench.speed.table import HEAD, cells, markdown, number

NOTICE = "<!-- Written by bench/speed: run `make bench`. The text between the marks of the findings is kept. -->\n\n"
BEGIN, END = "<!-- findings -->", "<!-- end of findings -->"


@dataclass(frozen=True)
class Run:
    """Everything that a run found."""

    title: str
    quick: bool
    blocks: Sequence[Block]
    results: Sequence[Measured]
    environment: Mapping[str, str]
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The answer of the machine's worker; empty where it failed."""
    profiles: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by group of operations, by what was profiled."""


def findings(page: Path) -> str:
    """What people wrote into a page that is there already."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if BEGIN not in text or END not in text:
        return "\n"
    return text.split(BEGIN)[1].split(END)[0]


def compose(run: Run, picture: str, kept: str, processors: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The whole page, with the plot's file beside it, what people wrote, and the last run on each kind of processor."""
    repeats = "few repeats and shorter work: figures are rough" if run.quick else "the medians of several repeats"
    parts = [
        f"{NOTICE}# {run.title}\n",
        paragraph(
            "Motet and others on the same work, in one run on one machine. The sides of a row take turns, repeat after "
            f"repeat, while all other processes are stopped; shown are {repeats}. Start-up and warm-up are excluded: "
            "loading, compiling, and the first repeat of everything. Absolute figures belong to this machine; ratios are "
            "what to look at."
        ),
        markdown(HEAD, [cells(item) for item in run.results]),
        f"![How many times faster Motet is]({picture})\n",
        _by_processor(processors or {}),
        _limits(run),
        _profiles(run),
        f"## Findings\n\n{BEGIN}{kept}{END}\n",
        "## The work, exactly\n",
        "".join(paragraph(_about(block), bullet=True) for block in run.blocks),
        "## Where it was measured\n",
        markdown(("what", "which"), list(run.environment.items())),
        HOW,
    ]
    return "\n".join(part for part in parts if part)


def remember(run: Run, kind: str, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The ratios and shares of the limit of the last run on each kind of processor, with this run's."""
    told = {}
    for item in run.results:
        if item.row.compare != "value":
            *_, ratio, _, share = cells(item)
            told[f"{item.row.work}, against {item.row.against}"] = ratio if share == "–" else f"{ratio}, {share}"
    return {**known, kind: {"date": run.environment.get("date", ""), "rows": told}}


def _by_processor(processors: Mapping[str, Mapping[str, Any]]) -> str:
    if len(processors) < 2:
        return ""
    works = dict.fromkeys(work for item in processors.values() for work in item["rows"])
    lines = [(work, *(str(item["rows"].get(work, "–")) for item in processors.values())) for work in works]
    head = ("ratio, share of limit", *(f"{kind}, {item['date']}" for kind, item in processors.items()))
    return "## On each kind of processor\n\n" + markdown(head, lines)


def _limits(run: Run) -> str:
    if not run.limits:
        return ""
    fastest = sorted({**run.limits["together"]}.items(), key=lambda item: -item[1])[:1]
    apart = sorted(run.limits["apart"].items(), key=lambda item: -item[1])[:1]
    ways = [f"{number(rate / 1e9)} GFLOP/s with all threads in one process ({shape})" for shape, rate in fastest]
    ways += [f"{number(rate / 1e9)} with one process for each core ({shape})" for shape, rate in apart]
    words = (
        f"In the same run, the best rate of bfloat16 products was {number(run.limits['value'] / 1e9)} GFLOP/s "
        f"({'; '.join(ways)}), and memory was read at {number(run.limits['bandwidth'] / 1e9)} GB/s. The limit of a piece of "
        "work is the time of its products at that rate, or of its bytes at that bandwidth, whichever is longer, for each "
        "phase (prompts, decoding, gradients, updates). Counted are products with weights and in attention, and the bytes of "
        "weights, keys and values; nothing else. `limit passed` marks rows for which this is no limit: their weights stay in a "
        "cache, or torch emulates bfloat16 products here, as on processors without a unit for them, and is slower than Motet."
    )
    return f"## The limit\n\n{paragraph(words)}"


def paragraph(words: str, *, bullet: bool = False) -> str:
    """Text in lines of a readable length."""
    width, first, rest = 136, "- " if bullet else "", "  " if bullet else ""
    lines = textwrap.wrap(
        words, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _about(block: Block) -> str:
    return f"**{', '.join(f'`{row.name}`' for row in block.rows)}**: {block.about}"


def _profiles(run: Run) -> str:
    if not run.profiles:
        return ""
    lines = []
    for group in GROUPS:
        shares = [100 * seconds[group] / max(sum(seconds.values()), 1e-12) for seconds in run.profiles.values()]
        lines.append([group, *(f"{share:.1f} %" for share in shares)])
    return (
        "## Where the time goes\n\nShares of one repeat under torch's profiler, which itself costs time in Python.\n\n"
        + markdown(("operations", *run.profiles), lines)
    )


def record(run: Run) -> dict[str, Any]:
    """The same as plain data, for results.json; what is not a number is null."""

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    rows = [
        {
            "name": item.row.name,
            "work": item.row.work,
            "against": item.row.against,
            "compare": item.row.compare,
            "unit": item.row.unit,
            "ratio": None if item.ratio is None else plain(item.ratio.middle),
            "low": None if item.ratio is None else plain(item.ratio.low),
            "high": None if item.ratio is None else plain(item.ratio.high),
            "motet": plain(item.ours),
            "other": plain(item.other),
            "limit": plain(item.limit),
            "met": item.met,
            "reason": item.reason,
            "notes": list(item.notes),
            "repeats": item.repeats,
        }
        for item in run.results
    ]
    return {
        "quick": run.quick,
        "environment": dict(run.environment),
        "limits": dict(run.limits),
        "profiles": {name: dict(groups) for name, groups in run.profiles.items()},
        "rows": rows,
    }


HOW = """## Run it yourself

```sh
make bench            # everything; the peers get environments of their own under .envs/ first
make bench QUICK=1    # a rough table in a few minutes; this page stays as it is
make gpu-quarter      # on one GPU, with bases of random weights
```

`.venv/bin/python -m bench.speed --help` explains how to choose rows and repeats. Run it on a machine that does nothing else.
A peer that cannot be installed or started leaves its rows unmeasured, with the reason.
"""
