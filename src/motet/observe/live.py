"""The live view: one line per job, redrawn several times a second."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from motet.core.types import HostNow, JobState, ServerLoad
from motet.observe.tables import running_table
from motet.observe.text import STATE_STYLES, UNICODE, Glyphs, count_text, duration_text, shorten
from motet.observe.view import View
from motet.runtime.progress import JobProgress

_MARGIN = 3  # some terminals wrap after the last column, and Ctrl-C writes two characters after the picture
_ROOM_FOR_BASE = 8
_ROOM_FOR_HEADINGS = 6  # least number of terminal lines to show it
_REASON_LINES = 2
_MAX_SERVERS = 4
_ORDER = (  # order of the jobs to show if not all fit
    JobState.RUNNING,
    JobState.FAILED,
    JobState.PAUSED,
    JobState.QUEUED,
    JobState.SUCCEEDED,
    JobState.CANCELLED,
)


@dataclass(frozen=True)
class Frame:
    """One picture of all jobs; fits any width and height."""

    jobs: Sequence[JobProgress]
    base: str
    elapsed: float
    rate: float
    glyphs: Glyphs
    servers: Sequence[ServerLoad | HostNow] = ()
    slow: Mapping[str, str] = field(default_factory=dict)
    """What to do about the slow rewards of jobs, by name."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then a line for each job that fits."""
        width = max(options.max_width - _MARGIN, 20)
        height = max(options.height or console.size.height, 4)
        yield self._title(width)
        servers = self._server_lines(width)[: max(height - 3, 0)]
        yield from self._body(console, options, width, height - 1 - len(servers))
        yield from servers

    # --- what is shown -----------------------------------------------------------------------------------------------

    def _title(self, width: int) -> Text:
        count = len(self.jobs)
        dot = " · " if self.glyphs is UNICODE else " | "
        figures = [
            f"{count} job{'' if count == 1 else 's'}",
            duration_text(self.elapsed) + self._of_about(),
            f"{count_text(self.rate)} tok/s",
        ]
        text = dot.join(figures)
        room = width - len("motet  ") - len(text) - len(dot)
        if self.base and room >= _ROOM_FOR_BASE:
            text = shorten(self.glyphs.plain(self.base), room, self.glyphs) + dot + text
        title = Text("motet", style="bold", no_wrap=True).append(f"  {text}", style="not bold")
        title.truncate(width)
        return title

    def _of_about(self) -> str:
        """The expected total time, once every job that will run has done a step."""
        left = [job.seconds_left for job in self.jobs if job.state in (JobState.RUNNING, JobState.QUEUED)]
        known = [seconds for seconds in left if seconds is not None]
        return f" of ~{duration_text(self.elapsed + max(known))}" if known and len(known) == len(left) else ""

    def _body(self, console: Console, options: ConsoleOptions, width: int, height: int) -> Iterator[RenderableType]:
        headed = height + 1 >= _ROOM_FOR_HEADINGS
        height -= headed
        notes = {job.name: [*self._reason(job, width), *self._warnings(job, width)] for job in self.jobs}
        if (
            sum(1 + len(lines) for lines in notes.values()) > height
        ):  # jobs come first; the summary shows the warnings too
            notes = {job.name: [] if job.state is JobState.QUEUED else self._reason(job, width) for job in self.jobs}
        shown = list(self.jobs)
        if sum(1 + len(lines) for lines in notes.values()) > height:
            shown.sort(key=lambda job: _ORDER.index(job.state))
            used = list(accumulate(1 + len(notes[job.name]) for job in shown))
            del shown[bisect_right(used, height - 1) :]  # one line summarises the others
        if shown:
            table = running_table(shown, width, self.glyphs)
            headings, *drawn = console.render_lines(table, options.update(width=width, height=None), pad=False)
            if headed:
                yield Segments([*headings, Segment.line()])
            for job, line in zip(shown, drawn, strict=True):
                yield Segments([*line, Segment.line()])
                yield from notes[job.name]
        if len(shown) < len(self.jobs):
            names = {job.name for job in shown}
            counts = Counter(job.state for job in self.jobs if job.name not in names)
            states = [f"{counts[state]} {state}" for state in _ORDER if counts[state]]
            others = ", ".join(states).replace(" ", " more ", 1)
            yield Text(f"  +{others}", style="bright_black", no_wrap=True)

    def _server_lines(self, width: int) -> list[Text]:
        """The state of each server; of many, the last ones in total."""
        lines = []
        for server in self.servers[:_MAX_SERVERS]:
            state = JobState.RUNNING if server.up else JobState.FAILED
            name, doing = _doing(server)
            line = Text(f"{self.glyphs.states[state]} ", style=STATE_STYLES[state], no_wrap=True)
            line.append(f"{self.glyphs.plain(name)}  {self.glyphs.plain(doing)}", style="bright_black")
            line.truncate(width)
            lines.append(line)
        if rest := self.servers[_MAX_SERVERS:]:
            up = sum(server.up for server in rest)
            tokens = sum(server.tokens for server in rest if isinstance(server, ServerLoad))
            others = f"  +{len(rest)} more, {up} of them up" + (f", {count_text(tokens)} tokens" if tokens else "")
            lines.append(Text(others, style="bright_black", no_wrap=True))
        return lines

    def _reason(self, job: JobProgress, width: int) -> list[Text]:
        """Why a job failed or waits, or the warnings of a running one, on at most two lines below it."""
        message = self.glyphs.plain(job.message)
        if not message or (job.state is JobState.SUCCEEDED and not job.stopped_early):
            return []
        return self._folded(message, width, "red" if job.state is JobState.FAILED else "bright_black")

    def _warnings(self, job: JobProgress, width: int) -> list[Text]:
        """The warnings from a running job's metrics."""
        warnings = [*job.diagnoses.warnings.values()] if job.state is JobState.RUNNING else []
        warnings += [self.slow[job.name]] if self.slow.get(job.name) else []
        styled = ((f"! {warning}", "red" if warning.startswith("alarm") else "yellow") for warning in warnings)
        return [line for text, style in styled for line in self._folded(text, width, style)]

    def _folded(self, message: str, width: int, style: str) -> list[Text]:
        """At most two lines below a job's line."""
        room = width - 4
        wrapped = Text(message).wrap(Console(width=room), room)
        lines = [line.plain.rstrip() for line in wrapped]
        if len(lines) > _REASON_LINES:
            lines = lines[:_REASON_LINES]
            lines[-1] = lines[-1][: room - 1].rstrip() + self.glyphs.ellipsis
        return [Text("    " + line, style=style, no_wrap=True) for line in lines]


def _doing(server: ServerLoad | HostNow) -> tuple[str, str]:
    """A server's name and activity."""
    name = server.name if isinstance(server, HostNow) else server.url.partition("://")[2]
    if not server.up:
        return name, f"away: {server.note}"
    if isinstance(server, HostNow):
        return name, f"{server.jobs:>3} jobs  {count_text(server.tokens_per_second):>6} tok/s"
    return name, f"{server.requests:>3} requests  {count_text(server.tokens):>6} tokens  {server.versions} versions"


class LiveView(View):
    """All jobs of a run in a terminal."""

    def __init__(self, console: Console, base: str = "") -> None:
        super().__init__(console)
        self._base = base
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def start(self) -> None:
        """Start drawing. Other output of the console appears above."""
        super().start()
        self._live.start()

    def update(self, jobs: Sequence[JobProgress]) -> None:
        """Draw the current state."""
        self.clock.see(jobs)
        self._live.update(self.frame(jobs), refresh=True)

    def print_line(self, line: str) -> None:
        """Print a text above the picture."""
        self._live.console.print(line, style="yellow", markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the last picture on the screen."""
        self._live.stop()

    def frame(self, jobs: Sequence[JobProgress]) -> Frame:
        """The picture of these jobs."""
        clock = self.clock
        slow = {job.name: clock.slow(job) for job in jobs}
        return Frame(tuple(jobs), self._base, clock.elapsed, clock.rate, self.glyphs, self.servers(), slow)
