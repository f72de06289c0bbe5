"""Signals to processes: what was killed, which process is whose, and where own code begins something."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

ROUGH = (signal.SIGKILL,) * 5 + (signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGHUP)
"""What most processes get. A crash in compiled code looks the same as such a signal from outside."""
_AIM_SECONDS, _LOOK_SECONDS = 20.0, 0.003


@dataclass(frozen=True)
class Kill:
    """One signal to one process."""

    moment: str
    process: str
    job: str
    """Whose own code the process runs; `-` if it is not of one job."""
    sent: str

    def __str__(self) -> str:
        return f"{self.sent:8} {self.process:20} {self.moment:12} {self.job}"


@dataclass
class Tally:
    """What was killed, and what came of it."""

    kills: list[Kill] = field(default_factory=list)
    compared: int = 0
    marked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what another counted, too."""
        self.kills += other.kills
        self.compared += other.compared
        self.marked.update(other.marked)
        self.wrong += other.wrong

    def table(self) -> str:
        """Kills by process and moment, then by job."""
        moments = list(dict.fromkeys(kill.moment for kill in self.kills))
        cells = Counter((kill.process, kill.moment) for kill in self.kills)
        lines = [f"| killed | {' | '.join(moments)} | all |", "|---" * (len(moments) + 2) + "|"]
        for process, n in Counter(kill.process for kill in self.kills).most_common():
            lines.append(f"| {process} | {' | '.join(str(cells[process, moment] or '') for moment in moments)} | {n} |")
        by_job = Counter(kill.job for kill in self.kills if kill.job != "-").most_common()
        lines += ["", "| own code of job | kills |", "|---|---|", *(f"| {job} | {n} |" for job, n in by_job)]
        lines += [
            "",
            "signals: " + ", ".join(f"{n} {name}" for name, n in Counter(k.sent for k in self.kills).most_common()),
        ]
        marked = ", ".join(f"{name} {n}" for name, n in self.marked.items()) or "none"
        return "\n".join(
            [*lines, f"{self.compared} files compared; jobs marked as inexact: {marked}; wrong: {len(self.wrong)}"]
        )


# --- processes --------------------------------------------------------------------------------------------------------------


def name_of(process: Any) -> str:
    """The module or script that a process runs."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        if "-m" in words[:-1]:
            module, *rest = words[words.index("-m") + 1 :]
            return f"motet {rest[0]}" if module == "motet" and rest else str(module).removeprefix("motet.")
        if found := [Path(word).stem for word in words if word.endswith(".py")]:
            return str(found[0])
        return "multiprocessing" if any("multiprocessing" in word for word in words) else " ".join(words)[:40] or "?"
    return "?"


def job_of(process: Any) -> str:
    """The job to whose log a process prints."""
    with contextlib.suppress(OSError):
        log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
        if log.suffix == ".log" and (log.parent / "job.yaml").exists():
            return log.parent.name
    return "-"


def family(process: Any) -> list[Any]:
    """A process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


class Marks:
    """The files that own code leaves where it begins something."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place, self._seen = place, set(os.listdir(place))

    def next(self, loading: bool, alive: Any) -> int:
        """The id of the next process that loads own code, or begins a first call; 0 if none does in time."""
        until = time.monotonic() + _AIM_SECONDS
        while time.monotonic() < until and alive.poll() is None:
            for name in set(os.listdir(self.place)) - self._seen:
                self._seen.add(name)
                if ("-load-" in name) == loading:
                    return int(name.rpartition("-")[2])
            time.sleep(_LOOK_SECONDS)
        return 0
