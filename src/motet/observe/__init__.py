"""The live display of jobs while they run, and the table at the end.

view = make_view(console, base="small")
view.start()
...                       # about four times a second:
view.update(jobs)         # a JobProgress of every job
view.stop()
console.print(summary_table(jobs, run=Path("runs/default"), seconds=view.seconds))
"""

from __future__ import annotations

from rich.console import Console

from motet.observe.live import LiveView
from motet.observe.log import LogView
from motet.observe.tables import settings_table, summary_table
from motet.observe.text import glyphs_of
from motet.observe.view import View

__all__ = ["LiveView", "LogView", "View", "glyphs_of", "make_view", "settings_table", "summary_table"]


def make_view(console: Console, base: str = "") -> View:
    """A live view in a terminal, with the name of the base in its title; plain log lines elsewhere."""
    return LiveView(console, base) if console.is_terminal and not console.is_dumb_terminal else LogView(console)
