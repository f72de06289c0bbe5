"""The live view, the log view and the table at the end, drawn into text."""

from __future__ import annotations

import cProfile
import io
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from motet.core.types import JobState, ServerLoad
from motet.observe import LiveView, LogView, View, glyphs_of, make_view, summary_table
from motet.observe.names import ranks, take_apart
from motet.observe.text import (
    ASCII,
    UNICODE,
    count_text,
    duration_text,
    evaluation_text,
    phase_text,
    recent_reward,
    reward_text,
    shorten,
    sparkline,
    trend,
)
from motet.observe.view import RunClock
from motet.runtime.progress import JobProgress

pytestmark = pytest.mark.tier1

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
    return [line.rstrip() for line in written(console).rstrip("\n").split("\n")]


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
    for part in ("●", "━", "12/40", "sampling 48/128", "0.37 ↗", "█", "0.38 → 0.51", " 4m40s"):
        assert part in add
    assert lines[0].startswith("motet  small · 5 jobs · 0s · ")


def test_wide_terminals_show_rates_and_narrow_ones_drop_columns_in_order() -> None:
    wide, narrow = (next(line for line in draw(some_jobs(), width) if "add" in line) for width in (140, 60))
    assert "410/s" in wide
    assert "48/128" in narrow
    assert "sampling" not in narrow
    assert "0.38 → 0.51" in narrow


@pytest.mark.parametrize("width", range(42, 140, 3))
def test_columns_are_dropped_whole_before_names_become_unreadable(width: int) -> None:
    for jobs in (some_jobs(), some_jobs()[:1]):
        add, *_ = (line for line in draw(jobs, width) if " add" in line)
        assert re.search(r"(0\.38 → 0\.51|4m\d\ds)$", add)
        names = [line.split()[1] for line in draw(jobs, width) if line[:1] == "●"]
        assert min(len(name) for name in names[1:] or ["the only name"]) >= (12 if width > 50 else 8)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_columns_have_headings_that_stand_above_them(width: int) -> None:
    headings, add, *_ = draw(some_jobs(), width)[1:]
    for heading, cell in (
        ("job", "add"),
        ("held-out", "0.38 → 0.51"),
        ("doing", "48/128" if width < 80 else "sampling"),
    ):
        assert headings.index(heading) == add.index(cell)
    for heading, cell in (("steps", "12/40"), ("reward", "0.37 ↗"), ("left", "4m40s")):
        assert headings.index(heading) + len(heading) == add.index(cell) + len(cell)
    assert not any("steps" in line for line in draw(some_jobs(), width, height=5)), (
        "a low terminal has room for jobs alone"
    )


def test_the_title_tells_what_all_will_take() -> None:
    """Once every job has done a step: before, nobody knows."""
    running = [job("add"), job("fast", done=30), job("reverse", JobState.SUCCEEDED, 40)]
    assert "0s of ~4m40s" in draw(running, 80)[0]
    for other in (job("next", JobState.QUEUED, 0), job("first", done=0)):
        assert " of ~" not in draw([*running, other], 80)[0]


SWEEP = [f"first-letters-of-words-lr={lr}-rank={rank}" for lr in ("1e-05", "0.0001") for rank in (8, 32)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_variants_of_a_sweep_have_columns_for_what_differs(width: int) -> None:
    _, headings, *lines = draw([job(name, evaluations=[(0, 0.2)]) for name in SWEEP], width)
    assert headings.split()[:3] == ["job", "lr", "rank"]
    assert [tuple(line.split()[2:4]) for line in lines] == [
        ("1e-05", "8"),
        ("1e-05", "32"),
        ("0.0001", "8"),
        ("0.0001", "32"),
    ]
    assert all(
        line.index(" 8 " if place % 2 == 0 else " 32 ") + 1 == headings.index("rank")
        for place, line in enumerate(lines)
    )


def test_what_does_not_differ_takes_no_room() -> None:
    names = take_apart(["add-lr=0.1-rank=8", "add-lr=0.2-rank=8", "other"])
    assert (names.fields, names.values["other"], names.stems["add-lr=0.1-rank=8"]) == (("lr",), ("",), "add")


def test_names_that_differ_only_in_the_middle_stay_apart() -> None:
    names = [f"a-long-experiment-{word}-of-this-evening" for word in ("one", "two", "three")]
    shown = take_apart(names).shown(16, UNICODE)
    assert len(set(shown.values())) == 3
    assert all(cell_len(name) <= 16 for name in shown.values())


HOPELESS = {"reward": 0.0, "reward_std": 0.0, "no_signal": 1.0, "distinct": 0.5}


def hopeless(name: str, state: JobState = JobState.RUNNING, steps: int = 12) -> JobProgress:
    """A job whose metrics warn."""
    made = job(name, state, steps, rewards=[])
    made.take_up({"step": step, **HOPELESS} for step in range(steps))
    return made


def test_warnings_stand_below_their_job_where_there_is_room() -> None:
    lines = draw([hopeless("hard"), job("add")], 80)
    assert lines[3].startswith("    ! hint: no signal in 100% of the groups (mean reward 0): too hard or too")
    assert lines[5].startswith("● add")
    assert not any(
        "no signal" in line for line in draw([hopeless(f"hard-{index}") for index in range(9)], 80, height=12)
    )


def test_long_names_keep_both_ends() -> None:
    line = next(line for line in draw(some_jobs(), 80) if "31/40" in line)
    assert "sort-num…eed17" in line


def test_a_failed_job_tells_why_below_its_line() -> None:
    lines = draw(some_jobs(), 80)
    place = next(index for index, line in enumerate(lines) if line.startswith("✗ math"))
    assert lines[place + 1].startswith("    97 of 128 rollouts have no reward. The commonest: [red]ValueError[/red]")
    assert lines[place + 2].endswith("…")
    assert lines[place + 3].startswith("○ count-l")
    assert "\x07" not in "".join(lines)


def test_states_can_be_told_without_colour() -> None:
    lines = draw([job(f"j-{state}", state) for state in JobState], 80)[2:]
    assert len({line[0] for line in lines}) == len(JobState)
    assert all(
        state.value in line for state, line in zip(JobState, lines, strict=True) if state is not JobState.RUNNING
    )


def test_more_jobs_than_lines_show_running_ones_first() -> None:
    jobs = [*(job(f"wait{index}", JobState.QUEUED, 0) for index in range(12)), *some_jobs()]
    lines = draw(jobs, 80, height=8)
    assert len(lines) <= 8
    assert lines[2].startswith("● add")
    assert lines[3].startswith("● sort")
    assert lines[4].startswith("✗ math")
    assert lines[-1] == "  +13 more queued, 1 succeeded"


def test_what_a_job_waits_for_is_told_where_there_is_room() -> None:
    jobs = [
        *some_jobs()[:4],
        job("full", JobState.QUEUED, 0, message="the disk is full: it goes on when there is room"),
    ]
    *all_jobs, reason = draw(jobs, 80, height=10)
    assert reason.strip() == "the disk is full: it goes on when there is room"
    assert draw(jobs, 80, height=9) == all_jobs


def test_a_terminal_with_ascii_only(capsys: pytest.CaptureFixture[str]) -> None:
    lines = draw(some_jobs(), 80, encoding="ascii")
    assert "\n".join(lines).isascii()
    assert any(line.startswith("x math") for line in lines)


def test_rewards_that_are_no_numbers() -> None:
    lines = draw([job("a", rewards=[math.nan, math.nan]), job("b", rewards=[0.5, math.nan, math.inf])], 80)
    assert "n/a" in lines[2]
    assert "0.50" in lines[3]


def test_live_view_leaves_the_last_picture() -> None:
    console = terminal(80)
    view = LiveView(console, "small")
    view.start()
    view.update([job("add", done=3)])
    view.update([job("add", done=4)])
    view.stop()
    assert "3/40" in written(console)
    assert written(console).rindex("4/40") > written(console).rindex("3/40")


def calls_to_draw(jobs: int, steps: int) -> int:
    """Function calls that one picture of so many jobs takes."""
    console = terminal(120, 70)
    frame = LiveView(console).frame([job(f"job-{index}", done=steps, steps=2 * steps) for index in range(jobs)])
    profile = cProfile.Profile()
    profile.runcall(console.print, frame)
    return sum(entry.callcount for entry in profile.getstats())


def test_drawing_many_jobs_is_cheap() -> None:
    """The picture is drawn four times a second."""
    few, many = calls_to_draw(6, 500), calls_to_draw(60, 500)
    assert many < 12 * few
    assert many < 500_000


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
    (first,) = log.lines(add)
    assert re.fullmatch(r"add  step 1/40  reward 0\.43  eval 0\.38  1\.2k tok/s  39m\d\ds left", first)
    assert log.lines(add) == []
    add.step, add.rewards = 3, [0.4321, 0.5, 0.625]
    add.evaluations.append((2, 0.51))
    second, third = log.lines(add)
    assert second == "add  step 2/40  reward 0.50  1.2k tok/s", "an evaluation is told once"
    assert re.fullmatch(r"add  step 3/40  reward 0\.62  eval 0\.38→0\.51  1\.2k tok/s  12m\d\ds left", third)


def test_a_job_whose_rewards_run_says_so_once_a_minute_and_what_helps() -> None:
    log, now = Log(), [0.0]
    log.view.clock = RunClock(lambda: now[0])
    add = job("add", done=0, started=0.1, rollouts_done=8, rollouts_wanted=64)
    assert log.lines(add) == ["add  running"]
    with add.held_out.sampled(16), add.held_out.sampled(8):
        now[0] = 59
        assert log.lines(add) == []
        now[0] = 61
        assert log.lines(add) == ["add  step 0/40  sampling 8/64  after 1m01s"]
        with add.held_out.scored(16), add.held_out.scored(8):
            now[0] = 110
            assert log.lines(add) == []
            assert phase_text(add) == "scoring 0/24 (evaluation)"
            now[0] = 121
            (line,) = log.lines(add)
            assert line == (
                "add  step 0/40  scoring 0/24 (evaluation)  after 2m01s"  # for 11 s only: nothing is blamed
            )
            now[0] = 182
            (line,) = log.lines(add)
            assert line.endswith(
                "(evaluation)  after 3m02s: rewards are slow: score more at once (engine.reward_processes), "
                "or make the function async if it is not"
            )
            assert "rewards are slow" in drawn_of(add, log.view.clock)
            with add.training.sampled(8):
                assert phase_text(add) == "sampling 8/64"
                with add.training.scored(8):
                    assert (phase_text(add), phase_text(add, short=True)) == ("scoring 8/64", "scoring")
        now[0] = 243
        (line,) = log.lines(add)
        assert line == "add  step 0/40  sampling 8/64  after 4m03s"
    add.state = JobState.PAUSED
    now[0] = 400
    assert log.lines(add) == ["add  paused"]


def drawn_of(one: JobProgress, clock: RunClock) -> str:
    console = terminal(100)
    view = LiveView(console)
    view.clock = clock
    console.print(view.frame([one]))
    return written(console)


def test_a_server_that_dies_is_told_and_one_that_the_run_has_stopped_is_not() -> None:
    log, now = Log(width=80), list[ServerLoad]()
    log.view.servers = lambda: now
    for up, note, told in (
        (True, "", ["server http://a answers"]),
        (False, "no answer", ["server http://a is away: no answer"]),
        (True, "", ["server http://a answers"]),
        (False, "", []),
    ):
        now[:] = [ServerLoad("http://a", up, 0, 0, 0, note)]
        assert log.lines() == told


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


def test_a_note_of_a_job_is_written_once() -> None:
    log, add = Log(), job("add", done=0)
    assert log.lines(add) == ["add  running"]
    add.message = "a command is not obeyed"
    assert [log.lines(add), log.lines(add)] == [["add  note: a command is not obeyed"], []]


def test_a_warning_is_written_once_though_its_numbers_change() -> None:
    log, hard = Log(), hopeless("hard", steps=9)
    assert [line for line in log.lines(hard) if "hint" in line] == [
        "hard  hint: no signal in 100% of the groups (mean reward 0): too hard or too easy for this base; take other "
        "problems, give partial rewards, or raise algorithm.group_size (docs/not-learning.md#no-signal)"
    ]
    hard.step += 1
    hard.stepped({"step": 9, **HOPELESS, "no_signal": 0.9})
    assert len(log.lines(hard)) == 1


def test_the_last_step_and_the_end_of_a_job_keep_their_order() -> None:
    log, add = Log(), job("add", done=1, steps=2)
    log.lines(add)
    add.step, add.state = 2, JobState.SUCCEEDED
    add.rewards = [0.1, 0.2]
    add.evaluations = [(0, 0.1), (2, 0.9)]
    step, end = log.lines(add)
    assert step.startswith("add  step 2/2  reward 0.20  ")
    assert "eval" not in step
    assert end.startswith("add  succeeded after 2/2 steps  eval 0.10→0.90  2m00s")


def test_a_resumed_job_counts_on() -> None:
    log = Log()
    resumed = job("add", done=12, first_step=10, rewards=[0.3, 0.4])
    first, *steps = log.lines(resumed)
    assert first == "add  running from step 10"
    assert [line.split("  ")[1] for line in steps] == ["step 11/40", "step 12/40"]


def test_steps_of_an_earlier_process_are_not_printed_again() -> None:
    log = Log()
    taken_up = job("add", done=2, rewards=[0.3, 0.4], started=0.0)
    assert log.lines(taken_up) == ["add  running from step 2"]


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


def test_a_job_that_waits_and_runs_again_keeps_its_seconds_and_has_the_rate_of_now() -> None:
    now = 1000.0
    clock = RunClock(lambda: now)
    raced = job("add", tokens=4000, started=990.0)
    clock.see([raced])
    raced.state = JobState.QUEUED
    now = 1050.0
    clock.see([raced])
    assert clock.seconds["add"] == pytest.approx(10)
    raced.state = JobState.RUNNING
    raced.begin(12)
    raced.started = 1055.0
    now = 1060.0
    clock.see([raced])
    assert clock.seconds["add"] == pytest.approx(15)
    assert raced.tokens_per_second == 0


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
    room = ["2m10s", "164k", "40/40"] if width > 80 else []
    for part in ("succeeded", "0.05→0.95 (v20), last 0.91", "+0.90", *room, "v20 (newest v40)"):
        assert part in row
    text = " ".join(" ".join(lines).split())
    assert "math failed: 97 of 128 rollouts have no reward. The commonest: [red]ValueError[/red] no number" in text
    assert "/<job>/versions/<version>" in "".join(line.strip() for line in lines)


def test_a_best_version_that_is_not_kept_is_said_to_be_gone(tmp_path: Path) -> None:
    for version in (0, 39, 40):
        (tmp_path / "add" / "versions" / f"v{version}").mkdir(parents=True)
    console = terminal(160)
    jobs = [job("add", JobState.SUCCEEDED, 40, evaluations=[(0, 0.3), (20, 0.95), (40, 0.2)])]
    console.print(summary_table(jobs, tmp_path, width=160))
    (row,) = [line for line in written(console).splitlines() if line.lstrip().startswith("add")]
    assert row.rstrip().endswith("v40 (v20 was best, not kept)"), "the untrained one is better, and never taken"
    assert "0.30→0.20" in row


def summary(jobs: Sequence[JobProgress], width: int) -> list[str]:
    console = terminal(width)
    console.print(summary_table(jobs, width=width))
    return [line.rstrip() for line in written(console).splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_variants_of_a_sweep_are_ranked_with_their_errors(width: int) -> None:
    values = dict(zip(SWEEP, (0.3, 0.7, math.nan, 0.5), strict=True))
    jobs = [job(name, evaluations=[(0, 0.2), (40, value)], errors=[0.05, 0.06]) for name, value in values.items()]
    lines = summary([job("other", evaluations=[(0, 0.9)]), *jobs], width)
    assert lines[1].split()[:4] == ["place", "job", "lr", "rank"]
    rows = [line.split() for line in lines[3:8]]
    assert [(row[0], *row[2:4]) for row in rows[1:4]] == [
        ("1.", "1e-05", "32"),
        ("2.", "0.0001", "32"),
        ("3.", "1e-05", "8"),
    ]
    assert rows[0][0] == "other", "alone with its task, it has no place"
    assert rows[4][1:3] == ["0.0001", "8"], "nor has what came to nothing"
    assert "0.20→0.70 ±0.06" in lines[4]
    assert all(cell_len(line) <= width for line in lines)


def test_variants_of_the_data_are_other_tasks() -> None:
    jobs = [("add-source=toy_add", 0.3), ("add-source=toy_sub", 0.4), ("b-seed=1", 0.3), ("b-seed=2", 0.3), ("c", 0.1)]
    assert ranks(jobs) == {"b-seed=1": 1, "b-seed=2": 1}


def test_the_summary_warns_in_full() -> None:
    text = " ".join(" ".join(summary([hopeless("hard", JobState.SUCCEEDED), job("add")], 80)).split())
    assert (
        "hard: hint: no signal in 100% of the groups (mean reward 0): too hard or too easy for this base; take other problems"
        in text
    )


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
    noise = [0.0] * 20 + [0.00026, 0.0, 0.00026]
    assert (sparkline(noise, 6, UNICODE), trend(noise, UNICODE)) == ("▁" * 6, "→"), "beside 0.00"
    assert [trend(values, UNICODE) for values in (rising, rising[::-1], [0.5] * 9, [0.5])] == ["↗", "↘", "→", " "]
    assert recent_reward([0.0] * 10 + [1.0] * 5) == 1.0
    assert evaluation_text([(0, 0.12), (4, 0.3), (8, 0.48)], ASCII) == "0.12 -> 0.48"


def test_a_gain_that_chance_explains_has_no_colour() -> None:
    for error, style in ((0.05, ""), (0.01, "bold green"), (math.nan, "bold green")):
        sort = job("sort", JobState.SUCCEEDED, done=30, evaluations=[(0, 0.4), (30, 0.5)])
        sort.errors = [error, error]
        cells = summary_table([sort]).columns
        (gain,) = (column for column in cells if column.header == "gain")
        (cell,) = gain.cells
        assert isinstance(cell, Text)
        assert (cell.plain, cell.style) == ("+0.10", style)


@pytest.mark.parametrize("width", range(20))
def test_shortened_names_have_the_width(width: int) -> None:
    for name in ("adapter-with-a-long-name", "東京の長い名前です東京", "short"):
        assert cell_len(shorten(name, width, UNICODE)) <= width
