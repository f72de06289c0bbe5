"""Writes a run as one HTML file that needs no network, from the files in the run directory only.

write_report(Path("runs/default"))   # runs/default/report.html, and report.svg beside it
curves_svg(Path("runs/default"))     # the reward and evaluation curves as a small static picture
"""

from __future__ import annotations

from pathlib import Path

from motet.core.checksums import replace_file
from motet.observe.report.page import page
from motet.observe.report.read import read_run
from motet.observe.report.svg import curves_of, draw_curves

__all__ = ["curves_svg", "write_report"]


def write_report(run_directory: Path) -> Path:
    """Write report.html and report.svg into a run directory; returns the HTML file.

    Raises:
        RunError: there is no run there, or the disk is full.
    """
    run = read_run(run_directory)
    picture = draw_curves(curves_of(run))
    replace_file(run_directory / "report.svg", picture.encode("utf-8", "replace"))
    path = run_directory / "report.html"
    replace_file(path, page(run, picture).encode("utf-8", "replace"))
    return path


def curves_svg(run_directory: Path) -> str:
    """Reward and held-out evaluation of all jobs as an SVG for pages and READMEs.

    Raises:
        RunError: there is no run there.
    """
    return draw_curves(curves_of(read_run(run_directory)))
