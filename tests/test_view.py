"""The live view, the log view and the table at the end, drawn into text."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from motet.runtime.progress import JobProgress
from motet.types import JobState
from motet.view import LiveView, LogView, View, glyphs_of, make_view, summary_table
from motet.view.clock import RunClock
from motet.view.text import (
    ASCII,
    UNICODE,
    count_text,
    duration_text,
    evaluation_text,
    recent_reward,
    reward_text,
    shorten,
    sparkline,
    trend,
)

REASON = (
    "97 of 128 rollouts have no reward. The commonest: [red]ValueError[/red]\n\x1b[31mno\x07 number "
    + "in the text " * 20
)


def job(name: str, state: JobState = JobState.RUNNING, done: int = 12, steps: int = 40, **more: object) -> JobProgress:
    fields: dict[str, object] = {
        "phase": "sampling" if state is JobState.RUNNING else "",
        "rollouts_done": 48,
        "rollouts_wanted": 128,
        "rewards": [0.1 + 0.03 * step for step in range(done)],
        "tokens": 4100 * done,
        "started": time.monotonic() - 120 if done else 0.0,
    }
    return JobProgress(name, steps, state, done, **(fields | more))  # type: ignore[arg-type]


def some_jobs() -> list[JobProgress]:
    return [
        job("add", evaluations=[(0, 0.38), (10, 0.51)]),
        job("sort-numbers-r64-lr0.0003-seed17", done=31, evaluations=[(0, 0.12), (30, 0.48)], phase="training"),
        job("reverse", JobState.SUCCEEDED, 40, evaluations=[(0, 0.05), (40, 0.91)]),
        job("math", JobState.FAILED, 7, message=REASON),
        job("count-letters", JobState.QUEUED, 0),
    ]


def terminal(width: int, height: int = 24, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=file, width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False)


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.TextIOWrapper)
    buffer = file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(file.encoding)


def draw(jobs: Sequence[JobProgress], width: int, height: int = 24, encoding: str = "utf-8") -> list[str]:
    console = terminal(width, height, encoding)
    console.print(LiveView(console, "small").frame(jobs))
    return written(console).rstrip("\n").split("\n")


# --- live --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_lines_fit_the_width(width: int, count: int) -> None:
    lines = draw(some_jobs()[:count], width)
    assert all(cell_len(line) < width for line in lines)
    assert len([line for line in lines if line[:1] in "●○✓✗"]) == count


def test_at_80_columns_everything_but_the_rate_is_there() -> None:
    lines = draw(some_jobs(), 80)
    add = next(line for line in lines if "add" in line)
    for part in ("●", "━", "12/40", "sampling 48/128", "0.37 ↗", "█", "0.38 → 0.51", "-4m40s"):
        assert part in add
    assert lines[0].startswith("motet  small · 5 jobs · 0s · ")


def test_wide_terminals_show_rates_and_narrow_ones_drop_columns_in_order() -> None:
    wide, narrow = (next(line for line in draw(some_jobs(), width) if "add" in line) for width in (140, 60))
    assert "410 tok/s" in wide
    assert "4m40s left" in wide
    assert "48/128" in narrow
    assert "sampling" not in narrow
    assert "0.38 → 0.51" in narrow


@pytest.mark.parametrize("width", range(40, 140, 3))
def test_columns_are_dropped_whole_before_names_become_unreadable(width: int) -> None:
    for jobs in (some_jobs(), some_jobs()[:1]):
        add, *_ = (line for line in draw(jobs, width) if " add" in line)
        assert re.search(r"(0\.38 → 0\.51|-4m40s|4m40s left)$", add)
        names = [line.split()[1] for line in draw(jobs, width) if line[:1] == "●"]
        assert min(len(name) for name in names[1:] or ["the only name"]) >= (12 if width > 50 else 8)


def test_long_names_keep_both_ends() -> None:
    line = next(line for line in draw(some_jobs(), 80) if "31/40" in line)
    assert "sort-numb…eed17" in line


def test_a_failed_job_tells_why_below_its_line() -> None:
    lines = draw(some_jobs(), 80)
    place = next(index for index, line in enumerate(lines) if line.startswith("✗ math"))
    assert lines[place + 1].startswith("    97 of 128 rollouts have no reward. The commonest: [red]ValueError[/red]")
    assert lines[place + 2].endswith("…")
    assert lines[place + 3].startswith("○ count-l")
    assert "\x07" not in "".join(lines)


def test_states_can_be_told_without_colour() -> None:
    lines = draw([job(f"j-{state}", state) for state in JobState], 80)[1:]
    assert len({line[0] for line in lines}) == len(JobState)
    assert all(
        state.value in line for state, line in zip(JobState, lines, strict=True) if state is not JobState.RUNNING
    )


def test_more_jobs_than_lines_show_running_ones_first() -> None:
    jobs = [*(job(f"wait{index}", JobState.QUEUED, 0) for index in range(12)), *some_jobs()]
    lines = draw(jobs, 80, height=8)
    assert len(lines) <= 8
    assert lines[1].startswith("● add")
    assert lines[2].startswith("● sort")
    assert lines[3].startswith("✗ math")
    assert lines[-1] == "  +12 more queued, 1 succeeded"  # one queued job still fits
    assert sum("○" in line for line in lines) == 1


def test_a_terminal_with_ascii_only(capsys: pytest.CaptureFixture[str]) -> None:
    lines = draw(some_jobs(), 80, encoding="ascii")
    assert "\n".join(lines).isascii()
    assert any(line.startswith("x math") for line in lines)


def test_rewards_that_are_no_numbers() -> None:
    lines = draw([job("a", rewards=[math.nan, math.nan]), job("b", rewards=[0.5, math.nan, math.inf])], 80)
    assert "n/a" in lines[1]
    assert "0.50" in lines[2]


def test_live_view_leaves_the_last_picture() -> None:
    console = terminal(80)
    view = LiveView(console, "small")
    view.start()
    view.update([job("add", done=3)])
    view.update([job("add", done=4)])
    view.stop()
    assert "3/40" in written(console)
    assert written(console).rindex("4/40") > written(console).rindex("3/40")


def test_drawing_many_jobs_is_quick() -> None:
    jobs = [job(f"job-{index}", done=500, steps=1000) for index in range(60)]
    console = terminal(120, 70)
    frame = LiveView(console).frame(jobs)
    started = time.process_time()
    console.print(frame)
    assert time.process_time() - started < 1.0  # four times a second, on a busy machine; takes about 0.05 s


# --- log ---------------------------------------------------------------------------------------------------------


class Log:
    def __init__(self, width: int = 40) -> None:
        self.console = Console(file=io.StringIO(), width=width, color_system=None)
        self.view = LogView(self.console)

    def lines(self, *jobs: JobProgress) -> list[str]:
        file = self.console.file
        assert isinstance(file, io.StringIO)
        file.seek(0)
        file.truncate()
        self.view.update(jobs)
        return file.getvalue().splitlines()


def test_one_line_for_each_finished_step() -> None:
    log, add = Log(), job("add", done=0, steps=40, started=time.monotonic() - 60)
    assert log.lines(add) == ["add  running"]
    assert log.lines(add) == []
    add.step, add.rewards, add.evaluations, add.tokens = 1, [0.4321], [(0, 0.38)], 72_000
    assert log.lines(add) == ["add  step 1/40  reward 0.43  eval 0.38  1.2k tok/s  39m00s left"]
    assert log.lines(add) == []
    add.step, add.rewards = 3, [0.4321, 0.5, 0.625]
    add.evaluations.append((2, 0.51))
    second, third = log.lines(add)
    assert second == "add  step 2/40  reward 0.50  eval 0.38  1.2k tok/s"
    assert third == "add  step 3/40  reward 0.62  eval 0.38→0.51  1.2k tok/s  12m20s left"


def test_states_and_failures_are_told_once() -> None:
    log, add = Log(), job("add", JobState.QUEUED, 0)
    assert log.lines(add) == []
    add.state = JobState.FAILED
    add.message = REASON
    (line,) = log.lines(add)
    assert line.startswith(
        "add  failed after 0/40 steps: 97 of 128 rollouts have no reward. The commonest: [red]ValueError"
    )
    assert "in the text in the text" in line  # not cut, not wrapped
    assert "\x1b" not in line
    assert log.lines(add) == []


def test_the_last_step_and_the_end_of_a_job_keep_their_order() -> None:
    log, add = Log(), job("add", done=1, steps=2)
    log.lines(add)
    add.step, add.state = 2, JobState.SUCCEEDED
    add.rewards = [0.1, 0.2]
    add.evaluations = [(0, 0.1), (2, 0.9)]
    step, end = log.lines(add)
    assert step.startswith("add  step 2/2  reward 0.20  eval 0.10  ")
    assert end.startswith("add  succeeded after 2/2 steps  eval 0.10→0.90  2m00s")


def test_a_resumed_job_counts_on() -> None:
    log = Log()
    resumed = job("add", done=12, first_step=10, rewards=[0.3, 0.4])
    first, *steps = log.lines(resumed)
    assert first == "add  running from step 10"
    assert [line.split("  ")[1] for line in steps] == ["step 11/40", "step 12/40"]


# --- which view, and time ----------------------------------------------------------------------------------------


def test_make_view_looks_at_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    views: list[View] = [make_view(terminal(80), "small"), make_view(Console(file=io.StringIO()))]
    assert [type(view) for view in views] == [LiveView, LogView]


def test_clock_stops_with_a_job_and_measures_the_present_rate() -> None:
    now = 1000.0
    clock = RunClock(lambda: now)
    add = job("add", tokens=0, started=990.0)
    for _ in range(30):
        now += 1.0
        add.tokens += 200 if now > 1010 else 1000
        clock.see([add])
    assert clock.rate == pytest.approx(200)
    assert clock.seconds["add"] == pytest.approx(40)
    add.state = JobState.SUCCEEDED
    now += 100
    clock.see([add])
    assert clock.seconds["add"] == pytest.approx(40)


# --- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_summary_table(width: int, tmp_path: Path) -> None:
    for version in (20, 39, 40):
        (tmp_path / "reverse" / "versions" / f"v{version}").mkdir(parents=True)
    jobs = some_jobs()
    jobs[2].evaluations = [(0, 0.05), (20, 0.95), (40, 0.91)]
    console = terminal(width)
    console.print(summary_table(jobs, Path(tmp_path), {"reverse": 130.0}, width=width))
    lines = written(console).splitlines()
    assert all(cell_len(line.rstrip()) <= width for line in lines)
    row = next(line for line in lines if line.lstrip().startswith("reverse"))
    room = [part for part, needed in (("164k", 96), ("2m10s", 88)) if width >= needed]
    for part in ("succeeded", "40/40", "0.16→1.21", "0.05→0.91", "+0.86", *room, "v40"):
        assert part in row
    assert "best v20" in row or width == 80
    text = " ".join(" ".join(lines).split())
    assert "math failed: 97 of 128 rollouts have no reward. The commonest: [red]ValueError[/red] no number" in text
    assert "/<job>/versions/<version>" in "".join(line.strip() for line in lines)


def test_summary_without_anything() -> None:
    console = terminal(80, encoding="ascii")
    console.print(summary_table([job("a", JobState.QUEUED, 0), *some_jobs()], glyphs=glyphs_of(console)))
    assert "0.38->0.51" in written(console)


# --- words -------------------------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    assert [count_text(value) for value in (0, 7, 999, 1000, 1234, 9999, 34_567, 999_999, 2.5e6, 7e9)] == (
        "0 7 999 1.0k 1.2k 10k 35k 1.0M 2.5M 7.0G".split()
    )
    assert [duration_text(value) for value in (0, 8.4, 59.6, 130, 3600, 11_100, 187_200)] == (
        "0s 8s 1m00s 2m10s 1h00m 3h05m 2d04h".split()
    )
    assert [reward_text(value) for value in (0.4321, -1.5, 12.34, 512.0, 12_345.0, math.nan, None)] == (
        "0.43 -1.50 12.3 512 1.2e+04 n/a n/a".split()
    )
    assert duration_text(None) == ""


def test_sparkline_and_trend() -> None:
    rising = [step / 99 for step in range(100)]
    assert sparkline(rising, 8, UNICODE) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5] * 4, 8, UNICODE) == "▁▁▁▁"
    assert sparkline([math.nan], 8, UNICODE) == ""
    assert [trend(values, UNICODE) for values in (rising, rising[::-1], [0.5] * 9, [0.5])] == ["↗", "↘", "→", " "]
    assert recent_reward([0.0] * 10 + [1.0] * 5) == 1.0
    assert evaluation_text([(0, 0.12), (4, 0.3), (8, 0.48)], ASCII) == "0.12 -> 0.48"


@pytest.mark.parametrize("width", range(20))
def test_shortened_names_have_the_width(width: int) -> None:
    for name in ("adapter-with-a-long-name", "東京の長い名前です東京", "short"):
        assert cell_len(shorten(name, width, UNICODE)) <= width
