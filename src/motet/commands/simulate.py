"""`motet simulate`: how many hosts some jobs need, how long they wait, what they cost, and how fair it is."""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table

from motet.cluster.simulation.outcome import SimulationOutcome, simulate
from motet.commands.answers import check_place, print_table
from motet.config.jobfile import load_simulation
from motet.core.checksums import replace_file
from motet.view.text import plain_console


def show(file: Path, hosts: int | None, plot: Path | None) -> None:
    """Simulate the cluster of a file, print a table, and draw its jobs over time."""
    config = load_simulation(file, hosts)
    check_place("--plot", plot)
    outcome = simulate(config)
    table = Table(
        show_header=False, title=f"{config.hosts.count} hosts, {sum(jobs.count for jobs in config.jobs)} jobs"
    )
    for what, figure in _figures(outcome, priced=config.hosts.costs.price_per_hour > 0):
        table.add_row(what, figure)
    print_table(plain_console(), table)
    if plot is not None:
        _draw(outcome, plot)


def _figures(outcome: SimulationOutcome, *, priced: bool) -> list[tuple[str, str]]:
    median, late = (f"{seconds:,.0f} s" for seconds in outcome.wait)
    figures = [
        ("until the last job has ended", f"{outcome.hours:,.2f} h"),
        ("utilisation of hosts", f"{outcome.utilisation:.1%}"),
        ("the same from the first job to the last that came", _known(f"{outcome.arriving:.1%}", outcome.arriving)),
        ("the same while every tenant had jobs enough", _known(f"{outcome.contended:.1%}", outcome.contended)),
        ("wait for a first slot, median and 99 %", f"{median}, {late}"),
        ("steps an hour", f"{outcome.steps_per_hour:,.0f}"),
        ("tokens trained an hour", f"{outcome.tokens_per_hour:,.0f}"),
        ("most by least tokens per share meanwhile", _known(f"{outcome.fairness:.2f}", outcome.fairness)),
        (
            "hours of a host for a job, and for 100 steps",
            f"{outcome.job_hours:.3f} h, {outcome.step_hours * 100:.3f} h",
        ),
        ("from a step to its version, 99 %", f"{outcome.publish:.2f} s"),
        ("times that a job went on elsewhere", f"{outcome.moves:,}"),
    ]
    return [*figures, ("cost", f"{outcome.cost:,.2f}")] if priced else figures


def _known(text: str, figure: float) -> str:
    """A figure for the time in which tenants competed; there may be none."""
    return "–" if math.isnan(figure) else text


def _draw(outcome: SimulationOutcome, page: Path) -> None:
    import plotly.graph_objects as go

    hours, running, waiting = zip(*outcome.curve, strict=True)
    figure = go.Figure(layout={"xaxis_title": "hours", "yaxis_title": "jobs", "template": "plotly_white"})
    figure.add_scatter(x=hours, y=running, name="have a slot", stackgroup="jobs")
    figure.add_scatter(x=hours, y=waiting, name="wait for one", stackgroup="jobs")
    replace_file(page, figure.to_html().encode())
