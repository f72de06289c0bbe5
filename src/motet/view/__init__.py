"""What a person sees while jobs run, and the table at the end.

view = make_view(console, base="small")
view.start()
...                       # about four times a second:
view.update(jobs)         # a JobProgress of every job
view.stop()
console.print(summary_table(jobs, run=Path("runs/default"), seconds=view.seconds))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rich.console import Console

from motet.runtime.progress import JobProgress
from motet.types import ServerLoad
from motet.view.live import LiveView
from motet.view.log import LogView
from motet.view.summary import summary_table
from motet.view.text import glyphs_of

__all__ = ["LiveView", "LogView", "View", "glyphs_of", "make_view", "summary_table"]


class View(Protocol):
    """Shows jobs while they run."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each job ran, as far as this view saw."""

    def watch(self, servers: Callable[[], Sequence[ServerLoad]]) -> None:
        """Show, besides jobs, what these servers do."""

    def start(self) -> None:
        """Begin to show."""

    def update(self, jobs: Sequence[JobProgress]) -> None:
        """Show how things stand now."""

    def tell(self, line: str) -> None:
        """Say something besides."""

    def stop(self) -> None:
        """Leave the last state on the screen."""


def make_view(console: Console, base: str = "") -> View:
    """A live view in a terminal, plain log lines elsewhere.

    Args:
        console: where to write.
        base: name of the base model, for the title.
    """
    return LiveView(console, base) if console.is_terminal and not console.is_dumb_terminal else LogView(console)
