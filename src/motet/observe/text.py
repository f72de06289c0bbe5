"""Numbers, durations, trends and states as short text. Pure functions."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from motet.core.types import JobState
from motet.runtime.held_out import Evaluations
from motet.runtime.progress import JobProgress

RECENT = 5
"""Number of steps whose mean reward is shown as the current reward."""
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, titles, links
_FLAT = 0.05  # share of the range of rewards that counts as no change

STATE_STYLES: dict[JobState, str] = {
    JobState.QUEUED: "bright_black",
    JobState.RUNNING: "cyan",
    JobState.PAUSED: "yellow",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "magenta",
}


def safe(text: str) -> str:
    """A text without escape sequences, control characters except line ends, and half characters, which cannot be printed."""
    text = _ESCAPES.sub("", text)
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


@dataclass(frozen=True)
class Glyphs:
    """Characters that a terminal can show."""

    blocks: str
    """A sparkline's levels, from low to high."""
    arrows: tuple[str, str, str]
    """Falling, level, rising."""
    to: str
    """Between before and after."""
    plus_minus: str
    """Before a standard error."""
    ellipsis: str
    states: dict[JobState, str]
    """One character a state, so that states differ without colour."""

    def plain(self, text: str) -> str:
        """One line without control characters: texts of users and models must not steer the terminal."""
        text = _ESCAPES.sub("", text)
        text = " ".join("".join(" " if unicodedata.category(char)[0] == "C" else char for char in text).split())
        return text if self.to == "→" else text.encode("ascii", "replace").decode()


def _states(characters: str) -> dict[JobState, str]:
    return dict(zip(JobState, characters, strict=True))


UNICODE = Glyphs("▁▂▃▄▅▆▇█", ("↘", "→", "↗"), "→", "±", "…", _states("○●‖✓✗–"))
ASCII = Glyphs("_.-=*#", ("-", "=", "+"), "->", "+-", "~", _states(".*|+x-"))


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints a text as it is: names and paths may look like markup or emoji."""
    return Console(emoji=False, markup=False, stderr=stderr)


def glyphs_of(console: Console) -> Glyphs:
    """The characters that this console's encoding has."""
    return UNICODE if console.encoding.lower().startswith("utf") and not console.legacy_windows else ASCII


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]


def reward_text(value: float | None) -> str:
    """A reward in about four characters."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if abs(value) >= 9999.5:
        return f"{value:.1e}"
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def count_text(value: float) -> str:
    """12, 1.2k, 340k, 5.6M."""
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (math.inf, "G")):
        if value < limit * 0.9995:
            scaled = value / (limit / 1e3) if limit < math.inf else value / 1e9
            return f"{scaled:.1f}{unit}" if unit and scaled < 9.95 else f"{scaled:.0f}{unit}"
    return "n/a"  # not a number


def duration_text(seconds: float | None) -> str:
    """8s, 2m10s, 3h05m, 2d04h."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    whole = max(round(seconds), 0)
    for size, unit, part, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{part_unit}"
    return f"{whole}s"


def recent_reward(rewards: Sequence[float]) -> float | None:
    """Mean over the last few steps that have a reward."""
    last = finite(rewards)[-RECENT:]
    return fmean(last) if last else None


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The whole history in `width` characters: means of equal parts, scaled to their range."""
    known = finite(values)
    if not known or width < 1:
        return ""
    cells = min(width, len(known))
    edges = [index * len(known) // cells for index in range(cells + 1)]
    means = [fmean(known[start:end]) for start, end in pairwise(edges)]
    low, spread = min(means), max(means) - min(means)
    if reward_text(low) == reward_text(low + spread):  # a picture beside a number shows no more than it
        spread = 0.0
    top = len(glyphs.blocks) - 1
    return "".join(glyphs.blocks[round((mean - low) / spread * top) if spread > 0 else 0] for mean in means)


def trend(values: Sequence[float], glyphs: Glyphs) -> str:
    """An arrow: the last few steps compared with the few before, relative to the range of all."""
    known = finite(values)
    if len(known) < 2:
        return " "
    width = min(RECENT, len(known) // 2)
    before, now = fmean(known[-2 * width : -width]), fmean(known[-width:])
    change, spread = now - before, max(known) - min(known)
    if abs(change) <= _FLAT * spread or reward_text(before) == reward_text(now):
        return glyphs.arrows[1]
    return glyphs.arrows[2] if change > 0 else glyphs.arrows[0]


def evaluation_text(evaluations: Evaluations, glyphs: Glyphs, gap: str = " ") -> str:
    """`0.12 → 0.48`, the first and the newest; one number before training."""
    if not evaluations:
        return ""
    first, last = reward_text(evaluations[0][1]), reward_text(evaluations[-1][1])
    return first if len(evaluations) == 1 else f"{first}{gap}{glyphs.to}{gap}{last}"


def held_out_text(
    evaluations: Evaluations, taken: tuple[int, float] | None, glyphs: Glyphs, error: str = "", gap: str = ""
) -> str:
    """`0.12→0.48`, where 0.48 is the figure of the version `taken`; `0.25→0.86 (v15), last 0.78` if a newer one was evaluated.

    `error` follows the figure of the version taken.
    """
    known = [(version, figure) for version, figure in evaluations if math.isfinite(figure)]
    if not known:
        return ""
    (first, before), (last, now) = known[0], known[-1]
    if taken is None or not math.isfinite(taken[1]):  # the version to take was not evaluated
        return f"{evaluation_text(known, glyphs, gap=gap)} (v{last})"
    change = "" if taken[0] == first else f"{reward_text(before)}{gap}{glyphs.to}{gap}"
    figure = f"{change}{reward_text(taken[1])}{error}"
    return figure if taken[0] == last else f"{figure} (v{taken[0]}), last {reward_text(now)}"


def phase_text(job: JobProgress, *, short: bool = False) -> str:
    """The activity of a running job; the state of any other."""
    if job.state is not JobState.RUNNING:
        return job.state.value
    activity = job.activity
    if activity != "sampling":
        return (activity.partition(" ")[0] if short else activity) or "starting"
    count = f"{job.rollouts_done}/{job.rollouts_wanted}"
    return count if short else f"sampling {count}"


def shorten(text: str, width: int, glyphs: Glyphs) -> str:
    """At most `width` cells; a longer text loses its middle, because names often differ at their ends."""
    if cell_len(text) <= width:
        return text
    if width < 6:
        return set_cell_size(text, max(width - 1, 0)) + (glyphs.ellipsis if width > 0 else "")
    head = (width - 1) * 2 // 3
    tail = width - 1 - head
    end = next(text[start:] for start in range(len(text)) if cell_len(text[start:]) <= tail)
    return set_cell_size(text, head) + glyphs.ellipsis + end
