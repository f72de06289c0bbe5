"""Observers follow the files of jobs, each in its own thread, so training never waits for one.

Steps that are not sent yet wait in metrics.jsonl, so a slow observer costs no memory. A file has the number of lines
sent for each job, so that a resumed run continues there. After `kill -9` an observer may receive the newest steps
twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.config.observer import ObserverConfig
from motet.core.errors import RunError
from motet.core.types import JobState
from motet.observe.observing import ObservedJob, ObservedStep, ObserverFactory, StepObserver
from motet.observe.trackers import load
from motet.process.own_code import describe

_POLL_SECONDS = 0.5
_PIECE = 1 << 20
"""Bytes of a log that are read at a time."""
_PATIENCE = 30.0
"""Seconds that a finished run waits for an observer."""


@dataclass
class _Log:
    """A file of JSON lines that is read piece by piece."""

    path: Path
    offset: int = 0
    lines: int = 0

    def read(self) -> list[Mapping[str, object]]:
        """The next whole lines. After the file was cut back, it is read again from its start."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:
                    self.offset = self.lines = 0
                file.seek(self.offset)
                data = file.read(_PIECE)
                while data and b"\n" not in data and (more := file.read(_PIECE)):
                    data += more
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.lines += len(found)
        return found


@dataclass
class _Followed:
    """A job and the progress of one observer with it."""

    job: ObservedJob
    metrics: _Log
    timings: _Log
    sent: int
    """Lines that were sent, in this process or before."""
    ended: str
    """The state that an observer was told at the end of these lines; empty if none was."""
    times: dict[object, float] = field(default_factory=dict)
    observer: StepObserver | None = None
    """None before there is something to send."""
    failed: bool = False


class Follower(threading.Thread):
    """Sends the steps of jobs to one observer."""

    def __init__(self, name: str, make: ObserverFactory, home: Path, notify: Callable[[str], None]) -> None:
        super().__init__(name=f"observer {name}", daemon=True)
        self._title, self._make, self._notify = name, make, notify
        self._places = home / ".observed" / re.sub(r"[^\w.-]+", "_", name)[-80:]
        self._states: dict[str, tuple[ObservedJob, JobState]] = {}
        self._followed: dict[str, _Followed] = {}
        self._deleted: set[str] = set()
        self._lock, self._closing, self._told = threading.Lock(), threading.Event(), False

    def move(self, job: ObservedJob, state: JobState) -> None:
        """Follow a job while it runs; in any other state, send what is left and end its observer."""
        with self._lock:
            self._states[job.id] = (job, state)

    def delete(self, job_id: str) -> None:
        """Remove a job's files, also after a check that may be under way."""
        with self._lock:
            if job_id in self._states:
                self._deleted.add(job_id)

    def run(self) -> None:
        """Check all jobs repeatedly, and once more after `close`."""
        while True:
            closing = self._closing.wait(_POLL_SECONDS)
            with self._lock:
                states = dict(self._states)
            for job_id, (job, state) in states.items():
                self._look(job, state, closing=closing)
                with self._lock:
                    if state is not JobState.RUNNING and self._states[job_id][1] is state:
                        del self._states[job_id]
                    deleted = job_id in self._deleted and job_id not in self._states
                    self._deleted -= {job_id} if deleted else set()
                if deleted:
                    remove(job)
            if closing:
                return

    def close(self) -> None:
        """Send the rest and end all observers."""
        self._closing.set()

    def _look(self, job: ObservedJob, state: JobState, *, closing: bool) -> None:
        """Send what is new. An error of the observer ends it for this job only."""
        entry = self._followed.get(job.id) or self._begin(job)
        ends = closing or state is not JobState.RUNNING
        try:
            while not entry.failed and self._send(entry):
                pass
            if ends and not entry.failed:
                self._end(entry, state)
        except (Exception, SystemExit) as error:
            entry.failed = True
            self._tell(f"observer {self._title} failed and is off for job {job.name}: {describe(error)}")
        if ends:
            self._followed.pop(job.id, None)

    def _begin(self, job: ObservedJob) -> _Followed:
        try:
            count, _, ended = (self._places / job.id).read_text("utf-8").partition(" ")
            sent = int(count)
        except (OSError, ValueError):
            sent, ended = 0, ""
        logs = (_Log(job.path / "metrics.jsonl"), _Log(job.path / "timings.jsonl"))
        entry = self._followed[job.id] = _Followed(job, *logs, sent, ended)
        return entry

    def _end(self, entry: _Followed, state: JobState) -> None:
        """End the observer. If it no longer exists, create another, unless it has received this state already."""
        ended = state.value if state.final else JobState.PAUSED.value
        if state.final and entry.sent and entry.ended != ended:
            entry.observer = entry.observer or self._make(entry.job)
        if entry.observer is not None:
            entry.observer.end(ended)
            self._keep(entry, entry.sent, ended)

    def _keep(self, entry: _Followed, sent: int, ended: str = "") -> None:
        """Store an observer's progress for the next process."""
        entry.sent, entry.ended = sent, ended
        self._places.mkdir(parents=True, exist_ok=True)
        draft = self._places / f"{entry.job.id}.part"
        draft.write_text(f"{sent} {ended}", "utf-8")
        draft.rename(self._places / entry.job.id)

    def _send(self, entry: _Followed) -> bool:
        """Send one piece of a log; returns whether there may be more."""
        before = entry.metrics.offset
        lines = entry.metrics.read()
        first = entry.metrics.lines - len(lines)
        while timings := entry.timings.read():  # written after the metrics of their step
            entry.times |= {line.get("step"): _seconds(line.get("time")) for line in timings}
        done = first
        try:
            for place, line in enumerate(lines, first):
                number = line.get("step")
                ended = entry.times.pop(number, None) or time.time()
                if place >= entry.sent and isinstance(number, int):
                    entry.observer = entry.observer or self._make(entry.job)
                    entry.observer.step(ObservedStep(number, ended, line, entry.job.path))
                done = place + 1
        finally:
            if done > entry.sent:
                self._keep(entry, done)
        return entry.metrics.offset != before

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._notify(f"{text}; jobs continue")


class Followers:
    """The observers of a run or a service, if any."""

    def __init__(
        self, observers: Sequence[ObserverConfig], home: Path, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        """Load the observers, as `load` does; they may write to `home`, and `notify` receives the first error of each."""
        self.home, self._notify = home, notify
        self._followers = [Follower(observer.name, load(observer), home, notify) for observer in observers]

    def __bool__(self) -> bool:
        return bool(self._followers)

    def __enter__(self) -> Followers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a thread for each observer."""
        for follower in self._followers:
            follower.start()

    def move(self, job: ObservedJob, state: JobState) -> None:
        """Tell observers the state of a job. An observer is created when there is something to send. Thread-safe."""
        for follower in self._followers:
            follower.move(job, state)

    def delete(self, job: ObservedJob) -> None:
        """Remove the files of a job of a service that has ended."""
        for follower in self._followers:
            follower.delete(job.id)
        remove(job)

    def close(self, seconds: float = _PATIENCE) -> None:
        """Send the remaining steps within this time; infinity waits for every observer."""
        for follower in self._followers:
            follower.close()
        late = time.monotonic() + seconds
        for feed in self._followers:
            feed.join(None if seconds == math.inf else max(late - time.monotonic(), 0.0))
            if feed.is_alive():
                self._notify(f"{feed.name} has not received all steps; the next run of this directory sends the rest")


def remove(job: ObservedJob) -> None:
    """Remove the files that observers have written below the service's home about a job."""
    for place in _places_of(job.home, job.tenant):
        for found in (*place.glob(f"*-{job.id}"), *place.glob(f"wandb/*-{job.id}")):
            shutil.rmtree(found, ignore_errors=True)
    for progress in (job.home / ".observed").glob(f"*/{job.id}"):
        progress.unlink(missing_ok=True)


def remove_tenant(home: Path, tenant: str) -> None:
    """Remove the files that observers have written below a service's `home` about all jobs of a tenant."""
    for place in _places_of(home, tenant):
        shutil.rmtree(place, ignore_errors=True)


def _places_of(home: Path, tenant: str) -> list[Path]:
    """The directories of a tenant, one for each kind of files."""
    kinds = [folder for folder in home.iterdir() if folder.name != ".observed"] if tenant and home.is_dir() else []
    return [folder / tenant for folder in kinds if (folder / tenant).is_dir()]


def send(run_directory: Path, observers: Sequence[ObserverConfig]) -> None:
    """Send the steps of a finished run that its observers have not received yet.

    Raises ConfigError if an observer cannot be loaded, RunError if there is no run or an observer failed.
    """
    jobs = [path.parent for path in sorted(run_directory.glob("*/metrics.jsonl"))]
    if not jobs:
        raise RunError(f"{run_directory} has no metrics yet: give the directory of a run that has begun")
    faults = list[str]()
    followers = Followers(observers, run_directory, faults.append)
    followers.start()
    for path in jobs:
        followers.move(job_of_run(run_directory, path.name), JobState.RUNNING)
        followers.move(job_of_run(run_directory, path.name), _state(path))
    followers.close(math.inf)
    if faults:
        raise RunError(faults[0])


def job_of_run(run_directory: Path, name: str) -> ObservedJob:
    """A job of a run directory."""
    try:
        run_id = str(json.loads((run_directory / "run.json").read_text("utf-8"))["run_id"])
    except (OSError, ValueError, TypeError, KeyError):
        run_id = run_directory.resolve().name
    job_id = re.sub(r"[^\w-]+", "_", whole := f"{run_id}-{name}")
    if job_id != whole:  # otherwise `a.1` and `a=1` would be one job
        job_id += f"-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    with contextlib.suppress(FileNotFoundError):
        job_id += "-" + _times(run_directory, name).read_text("utf-8")
    return ObservedJob(job_id, name, run_directory.resolve().name, "", run_directory / name, run_directory)


def begin(run_directory: Path, name: str) -> None:
    """Before a job of a run begins or resumes: one that was removed gets another id, as its observers know the old steps."""
    job, times = job_of_run(run_directory, name), _times(run_directory, name)
    metrics = job.path / "metrics.jsonl"
    if any(run_directory.glob(f".observed/*/{job.id}")) and not (metrics.is_file() and metrics.stat().st_size):
        times.write_text(str(int(times.read_text("utf-8")) + 1 if times.is_file() else 2), "utf-8")


def _times(run_directory: Path, name: str) -> Path:
    """The file that counts how often a job was begun, if more than once."""
    return run_directory / ".observed" / f"{name}.times"


def _state(path: Path) -> JobState:
    try:
        return JobState(json.loads((path / "status.json").read_text("utf-8"))["state"])
    except (OSError, ValueError, TypeError, KeyError):
        return JobState.PAUSED


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
