"""Run parts within a limit: side by side, or one alone where its time is measured. Results are kept as they come."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.figures import Figure, figures_in
from bench.speed.programs import OFFLINE

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77
"""Exit code of a part that this machine cannot run."""
LEAST_SECONDS = 3.0
"""A part that would get less is not started."""
_LOOK_SECONDS = 0.05
_NO_TESTS = 5
"""pytest's exit code where all tests were deselected."""
_GRACE_SECONDS = 5.0
"""In which a part that is cut may say what it knows, such as the failures of its tests."""
_BESIDE = {"MOTET_MEASURE_PRODUCTS": "0"}
"""Variables of parts that others may run beside: what they measure would be wrong."""
_TEST = re.compile(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
_TESTS = re.compile(r"\bcollected (?:\d+ items? / .*?/ )?(\d+) (?:items?|selected)")


@dataclass(frozen=True)
class Part:
    """A command that runs by itself."""

    name: str
    shows: str
    words: tuple[str, ...]
    """After the interpreter."""
    limit: float
    """Seconds; then it is ended, and the figures that it has printed stay."""
    needs: str = ""
    """The part that makes its base."""
    alone: bool = False
    """Whether it measures time, and nothing may run beside it."""
    makes: Path | None = None
    """The base that it makes. It runs in each session, as the base may be gone."""


@dataclass(frozen=True)
class Result:
    """What became of a part."""

    name: str
    state: str
    """passed, failed, cut, not here or not run."""
    seconds: float
    said: str
    """The last line that says something."""
    figures: tuple[Figure, ...] = ()


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    began: float
    ends: float


def kept(place: Path) -> dict[str, Result]:
    """Results of earlier sessions, by the name of the part."""
    found = [json.loads(file.read_text()) for file in sorted(place.glob("*.result.json"))]
    return {
        result["name"]: Result(**{**result, "figures": tuple(Figure(**f) for f in result["figures"])})
        for result in found
    }


class Schedule:
    """Parts in order of worth. `ended` is called with all results after each of them."""

    def __init__(
        self, parts: Sequence[Part], place: Path, limit: float, ended: Callable[[dict[str, Result]], None]
    ) -> None:
        self._pending, self._place, self._ended = list(parts), place, ended
        self._end = time.monotonic() + limit
        self._running: list[_Running] = []
        self._failed: set[str] = set()
        self._waited_for = {part.name for part in parts}
        self._workers = max(2, (os.cpu_count() or 2) // 2)
        self.results = kept(place)

    def run(self) -> dict[str, Result]:
        """Run all; returns the results, also those of earlier sessions."""
        try:
            while self._pending or self._running:
                self._start()
                self._look()
                time.sleep(_LOOK_SECONDS)
        finally:
            for running in self._running:
                end(running.process)
        return self.results

    def _start(self) -> None:
        """Start what may start now; a part that runs alone lets none that comes after it begin before."""
        for part in list(self._pending):
            if part.needs in self._failed:
                self._leave_out(part, f"{part.needs} made no base")
            elif self._end - time.monotonic() < LEAST_SECONDS:
                self._leave_out(part, "the time was over")
            elif len(self._running) >= (1 if part.alone else self._workers):
                return
            elif part.needs in self._waited_for:
                if part.alone:
                    return
            elif part.alone and (self._running or part is not self._pending[0]):
                return
            else:
                self._launch(part)
                if part.alone:
                    return

    def _launch(self, part: Part) -> None:
        self._pending.remove(part)
        with (self._place / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *part.words],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **OFFLINE, "PYTHONUNBUFFERED": "1", **({} if part.alone else _BESIDE)},
            )
        now = time.monotonic()
        self._running.append(_Running(part, process, now, min(now + part.limit, self._end)))

    def _leave_out(self, part: Part, why: str) -> None:
        self._pending.remove(part)
        before = self.results.get(part.name)
        if before is None or before.state == "not run":
            self._keep(part, Result(part.name, "not run", 0.0, why))
        else:
            self._over(part, before.state)

    def _look(self) -> None:
        """Take the results of what has ended, and end what has used up its time."""
        for running in list(self._running):
            code, now = running.process.poll(), time.monotonic()
            if code is None and now < running.ends:
                continue
            end(running.process, signal.SIGINT)
            self._running.remove(running)
            log = (self._place / f"{running.part.name}.log").read_text(errors="replace")
            self._keep(running.part, result_of(running.part, code, log, now - running.began))

    def _keep(self, part: Part, result: Result) -> None:
        self.results[part.name] = result
        (self._place / f"{part.name}.result.json").write_text(json.dumps(asdict(result), indent=1))
        self._over(part, result.state)
        why = "" if result.state == "passed" else result.said
        print(f"{result.state:8} {result.seconds:6.1f} s  {part.name}  {why}", flush=True)
        self._ended(self.results)

    def _over(self, part: Part, state: str) -> None:
        self._waited_for.discard(part.name)
        if state in ("failed", "cut", "not run"):
            self._failed.add(part.name)


def result_of(part: Part, code: int | None, log: str, seconds: float) -> Result:
    """The result of a part that ended with this code; None if it was ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-.") and not line.startswith('{"group"')]
    said = lines[-1].strip(" =")[:200] if lines else ""
    state = {0: "passed", SKIPPED: "not here", _NO_TESTS: "not here", None: "cut"}.get(code, "failed")
    if state == "passed" and " skipped" in said and " passed" not in said:
        state = "not here"
    if state == "cut":
        said = f"ended after {seconds:.0f} s{_tests_in(log)}"
    return Result(part.name, state, round(seconds, 1), said, tuple(figures_in(log)))


def _tests_in(log: str) -> str:
    """What became of tests until then."""
    if (every := _TESTS.search(log)) is None:
        return ""
    counts = Counter(state.lower() for state in _TEST.findall(log))
    return f": {', '.join(f'{n} {state}' for state, n in counts.items()) or '0 ended'} of {every[1]} tests"


def end(
    process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGKILL, seconds: float = _GRACE_SECONDS
) -> None:
    """End a part and all that it started; with SIGINT `first` it has some seconds to say what it knows."""
    for sent in (first, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    process.wait()
