"""One line per job, drawn again several times a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from motet.runtime.progress import JobProgress
from motet.types import JobState, ServerLoad
from motet.view.clock import RunClock
from motet.view.lines import job_lines
from motet.view.text import STATE_STYLES, UNICODE, Glyphs, count_text, duration_text, glyphs_of, shorten

_MARGIN = 3  # some terminals wrap when the last column is written, and Ctrl-C writes two characters after the picture
_ROOM_FOR_BASE = 8
_ROOM_FOR_HEADINGS = 6  # lines of the terminal from which on there is one for them
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


@dataclass(frozen=True)
class Frame:
    """One picture of all jobs; fits any width and height it is drawn in."""

    jobs: Sequence[JobProgress]
    base: str
    elapsed: float
    rate: float
    glyphs: Glyphs
    servers: Sequence[ServerLoad] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then a line for each job that fits."""
        width = max(options.max_width - _MARGIN, 20)
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
            duration_text(self.elapsed) + self._of_about(),
            f"{count_text(self.rate)} tok/s",
        ]
        told = dot.join(figures)
        room = width - len("motet  ") - len(told) - len(dot)
        if self.base and room >= _ROOM_FOR_BASE:
            told = shorten(self.glyphs.plain(self.base), room, self.glyphs) + dot + told
        title = Text("motet", style="bold", no_wrap=True).append(f"  {told}", style="not bold")
        title.truncate(width)
        return title

    def _of_about(self) -> str:
        """The time that all will have taken, once every job that is to run has done a step."""
        left = [job.seconds_left for job in self.jobs if job.state in (JobState.RUNNING, JobState.QUEUED)]
        known = [seconds for seconds in left if seconds is not None]
        return f" of ~{duration_text(self.elapsed + max(known))}" if known and len(known) == len(left) else ""

    def _body(self, width: int, height: int) -> Sequence[Text]:
        headed = height + 1 >= _ROOM_FOR_HEADINGS
        height -= headed
        reasons = {job.name: [*self._reason(job, width), *self._warnings(job, width)] for job in self.jobs}
        if sum(1 + len(lines) for lines in reasons.values()) > height:  # jobs first; the summary has the warnings
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
        headings, *drawn = job_lines(shown, width, self.glyphs) or [Text()]
        lines = [headings] if headed and drawn else []
        for job, line in zip(shown, drawn, strict=True):
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
        return self._folded(message, width, "red" if job.state is JobState.FAILED else "bright_black")

    def _warnings(self, job: JobProgress, width: int) -> list[Text]:
        """What the metrics of a running job warn of."""
        told = job.signs.warnings.values() if job.state is JobState.RUNNING else ()
        return [line for warning in told for line in self._folded(f"! {warning}", width, "yellow")]

    def _folded(self, message: str, width: int, style: str) -> list[Text]:
        """At most two lines below a job's own."""
        room = width - 4
        wrapped = Text(message).wrap(Console(width=room), room)
        lines = [line.plain.rstrip() for line in wrapped]
        if len(lines) > _REASON_LINES:
            lines = lines[:_REASON_LINES]
            lines[-1] = lines[-1][: room - 1].rstrip() + self.glyphs.ellipsis
        return [Text("    " + line, style=style, no_wrap=True) for line in lines]


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

    def tell(self, line: str) -> None:
        """Say something above the picture."""
        self._live.console.print(line, style="yellow", markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the last picture on the screen."""
        self._live.stop()

    def frame(self, jobs: Sequence[JobProgress]) -> Frame:
        """The picture of these jobs."""
        clock = self._clock
        return Frame(tuple(jobs), self._base, clock.elapsed, clock.rate, self._glyphs, self._servers())
