"""One line per job, drawn again several times a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from motet.runtime.progress import JobProgress
from motet.types import JobState, ServerLoad
from motet.view.clock import RunClock
from motet.view.text import (
    STATE_STYLES,
    UNICODE,
    Glyphs,
    count_text,
    duration_text,
    evaluation_text,
    glyphs_of,
    phase_text,
    recent_reward,
    reward_text,
    shorten,
    sparkline,
    trend,
)

_MAX_NAME, _GOOD_NAME, _MIN_NAME = 24, 12, 8
_MAX_BAR = 24
_REASON_LINES = 2
_MAX_SERVERS = 4
_ORDER = (  # who is shown when not all jobs fit
    JobState.RUNNING,
    JobState.FAILED,
    JobState.PAUSED,
    JobState.QUEUED,
    JobState.SUCCEEDED,
    JobState.CANCELLED,
)


_COLUMNS = ("bar", "steps", "phase", "short phase", "reward", "spark", "eval", "rate", "left", "short left")


@dataclass(frozen=True)
class Plan:
    """Which columns a line has, and how wide those are that can shrink; 0 leaves them out."""

    columns: tuple[str, ...] = ("steps", "phase", "reward", "eval", "rate", "left")
    bar: int = 10
    spark: int = 10


PLANS = (  # from everything to almost nothing; the first that fits is taken
    Plan(),
    Plan(("steps", "phase", "reward", "eval", "left")),
    Plan(("steps", "phase", "reward", "eval", "short left")),
    Plan(("steps", "phase", "reward", "eval", "short left"), 6, 6),
    Plan(("steps", "short phase", "reward", "eval", "short left"), 6, 6),
    Plan(("steps", "short phase", "reward", "eval", "short left"), 6, 0),
    Plan(("steps", "short phase", "reward", "eval"), 6, 0),
    Plan(("steps", "short phase", "reward", "eval"), 0, 0),
    Plan(("steps", "reward", "eval"), 0, 0),
    Plan(("steps", "reward"), 0, 0),
)
"""Layouts of a job's line."""


@dataclass(frozen=True)
class Frame:
    """One picture of all jobs; fits any width and height it is drawn in."""

    jobs: Sequence[JobProgress]
    base: str
    elapsed: float
    rate: float
    glyphs: Glyphs
    seconds: Mapping[str, float] = field(default_factory=dict)
    servers: Sequence[ServerLoad] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then a line for each job that fits."""
        width = max(options.max_width - 1, 20)  # the last column stays free: some terminals wrap when it is written
        height = max(options.height or console.size.height, 4)
        yield self._title(width)
        servers = self._server_lines(width)[: max(height - 3, 0)]
        yield from self._body(width, height - 1 - len(servers))
        yield from servers

    # --- what is shown -----------------------------------------------------------------------------------------------

    def _title(self, width: int) -> Text:
        count = len(self.jobs)
        dot = " · " if self.glyphs is UNICODE else " | "
        figures = [
            f"{count} job{'' if count == 1 else 's'}",
            duration_text(self.elapsed),
            f"{count_text(self.rate)} tok/s",
        ]
        told = dot.join(figures)
        room = width - len("motet  ") - len(told) - len(dot)
        if self.base and room >= _MIN_NAME:
            told = shorten(self.glyphs.plain(self.base), room, self.glyphs) + dot + told
        title = Text("motet", style="bold", no_wrap=True).append(f"  {told}", style="not bold")
        title.truncate(width)
        return title

    def _body(self, width: int, height: int) -> Sequence[Text]:
        reasons = {job.name: self._reason(job, width) for job in self.jobs}
        needed = {job.name: 1 + len(reasons[job.name]) for job in self.jobs}
        shown = list(self.jobs)
        if sum(needed.values()) > height:
            shown.sort(key=lambda job: _ORDER.index(job.state))
            used, fitting = 1, []  # one line tells about the rest
            for job in shown:
                used += needed[job.name]
                if used > height:
                    break
                fitting.append(job)
            rest, shown = shown[len(fitting) :], fitting
        else:
            rest = []
        lines: list[Text] = []
        for job, line in zip(shown, self._lines(shown, width), strict=True):
            lines.extend([line, *reasons[job.name]])
        if rest:
            counts = Counter(job.state for job in rest)
            states = [f"{counts[state]} {state}" for state in _ORDER if counts[state]]
            told = ", ".join(states).replace(" ", " more ", 1)
            lines.append(Text(f"  +{told}", style="bright_black", no_wrap=True))
        return lines

    def _server_lines(self, width: int) -> list[Text]:
        """What each server does; many are told in sum."""
        lines = []
        for server in self.servers[:_MAX_SERVERS]:
            state = JobState.RUNNING if server.up else JobState.FAILED
            host = server.url.partition("://")[2]
            told = (
                f"{server.requests:>3} requests  {count_text(server.tokens):>6} tokens  {server.versions} versions"
                if server.up
                else f"away: {server.note}"
            )
            line = Text(f"{self.glyphs.states[state]} ", style=STATE_STYLES[state], no_wrap=True)
            line.append(f"{self.glyphs.plain(host)}  {self.glyphs.plain(told)}", style="bright_black")
            line.truncate(width)
            lines.append(line)
        if rest := self.servers[_MAX_SERVERS:]:
            up, tokens = sum(server.up for server in rest), count_text(sum(server.tokens for server in rest))
            told = f"  +{len(rest)} more servers, {up} of them up, {tokens} tokens"
            lines.append(Text(told, style="bright_black", no_wrap=True))
        return lines

    def _reason(self, job: JobProgress, width: int) -> list[Text]:
        """Why a job failed, or what to know of a running one, on at most two lines below it."""
        message = self.glyphs.plain(job.message)
        if not message or job.state in (JobState.SUCCEEDED, JobState.QUEUED):
            return []
        style = "red" if job.state is JobState.FAILED else "bright_black"
        room = width - 4
        wrapped = Text(message).wrap(Console(width=room), room)
        lines = [line.plain.rstrip() for line in wrapped]
        if len(lines) > _REASON_LINES:
            lines = lines[:_REASON_LINES]
            lines[-1] = lines[-1][: room - 1].rstrip() + self.glyphs.ellipsis
        return [Text("    " + line, style=style, no_wrap=True) for line in lines]

    # --- columns -----------------------------------------------------------------------------------------------------

    def _lines(self, jobs: Sequence[JobProgress], width: int) -> list[Text]:
        """One line a job with the widest plan that fits; what is left over goes to the bar."""
        if not jobs:
            return []
        cells = [self._cells(job) for job in jobs]
        longest = min(max(cell_len(self.glyphs.plain(job.name)) for job in jobs), _MAX_NAME)
        history = max(len(job.rewards) for job in jobs)
        for plan in PLANS:
            widths = {name: max(cell_len(row[name].plain) for row in cells) for name in plan.columns}
            widths |= {"bar": plan.bar, "spark": min(plan.spark, history)}
            fixed = sum(size + 1 for size in widths.values() if size) + 2
            name_width = min(longest, max(width - fixed, _MIN_NAME))
            if fixed + name_width <= width and name_width >= min(longest, _GOOD_NAME):
                break
        if widths["bar"]:
            widths["bar"] += max(min(width - fixed - name_width, _MAX_BAR - plan.bar), 0)
        return [
            self._line(job, row, {"bar": 0, **widths}, name_width, width) for job, row in zip(jobs, cells, strict=True)
        ]

    def _line(
        self, job: JobProgress, cells: Mapping[str, Text], widths: Mapping[str, int], name_width: int, width: int
    ) -> Text:
        quiet = "" if job.state is JobState.RUNNING else "bright_black"
        drawn = {
            "bar": self._bar(job, widths["bar"]),
            "spark": Text(sparkline(job.rewards, widths["spark"], self.glyphs), style=quiet or "cyan"),
        }
        line = Text(no_wrap=True)
        shown = shorten(self.glyphs.plain(job.name), name_width, self.glyphs)
        line.append(f"{self.glyphs.states[job.state]} ", style=STATE_STYLES[job.state])
        line.append(shown + " " * (name_width - cell_len(shown)), style="bold")
        for name in _COLUMNS:
            if not (size := widths.get(name, 0)):
                continue
            cell = drawn.get(name) or cells.get(name, Text())
            space = " " * (size - cell_len(cell.plain))
            line.append(" ")
            line.append_text(Text.assemble(space, cell) if cell.justify == "right" else Text.assemble(cell, space))
        line.rstrip()
        line.truncate(width)
        return line

    def _cells(self, job: JobProgress) -> dict[str, Text]:
        """Everything that does not depend on the plan."""
        running = job.state is JobState.RUNNING
        left = duration_text(job.seconds_left) if running else ""
        taken = "" if running else duration_text(self.seconds.get(job.name))
        return {
            "steps": Text(f"{job.step}/{job.steps}", justify="right"),
            "phase": Text(phase_text(job), style=STATE_STYLES[job.state]),
            "short phase": Text(phase_text(job, short=True), style=STATE_STYLES[job.state]),
            "reward": self._reward(job),
            "eval": Text(
                evaluation_text(job.evaluations, self.glyphs), style="bold" if len(job.evaluations) > 1 else ""
            ),
            "rate": Text(
                f"{count_text(job.tokens_per_second)} tok/s" if running and job.tokens else "", justify="right"
            ),
            "left": Text(left and f"{left} left", justify="right"),
            "short left": Text(f"-{left}" if left else taken, style="" if running else "bright_black", justify="right"),
        }

    def _bar(self, job: JobProgress, width: int) -> Text:
        done = round(width * min(job.step / job.steps, 1.0)) if job.steps else 0
        bar = Text(self.glyphs.bar[0] * done, style=STATE_STYLES[job.state])
        return bar.append(self.glyphs.bar[1] * (width - done), style="bright_black")

    def _reward(self, job: JobProgress) -> Text:
        value = recent_reward(job.rewards)
        if value is None:
            return Text("n/a" if job.rewards else "", justify="right")
        arrow = trend(job.rewards, self.glyphs)
        style = {self.glyphs.arrows[2]: "green", self.glyphs.arrows[0]: "red"}.get(arrow, "")
        return Text(f"{reward_text(value)} ", justify="right").append(arrow, style=style)


class LiveView:
    """All jobs of a run in a terminal."""

    def __init__(self, console: Console, base: str = "", clock: Callable[[], float] | None = None) -> None:
        self._glyphs = glyphs_of(console)
        self._base = base
        self._clock = RunClock(clock) if clock else RunClock()
        self._servers: Callable[[], Sequence[ServerLoad]] = tuple
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each job ran, as far as this view saw."""
        return self._clock.seconds

    def watch(self, servers: Callable[[], Sequence[ServerLoad]]) -> None:
        """Show, below the jobs, what these servers do."""
        self._servers = servers

    def start(self) -> None:
        """Begin to draw. Other output through the console appears above."""
        self._clock.begin()
        self._live.start()

    def update(self, jobs: Sequence[JobProgress]) -> None:
        """Draw how things stand now."""
        self._clock.see(jobs)
        self._live.update(self.frame(jobs), refresh=True)

    def stop(self) -> None:
        """Leave the last picture on the screen."""
        self._live.stop()

    def frame(self, jobs: Sequence[JobProgress]) -> Frame:
        """The picture of these jobs."""
        clock = self._clock
        seconds, servers = dict(clock.seconds), self._servers()
        return Frame(tuple(jobs), self._base, clock.elapsed, clock.rate, self._glyphs, seconds, servers)
