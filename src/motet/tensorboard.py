"""Export of metrics.jsonl to TensorBoard event files. Needs the `tensorboard` extra, not torch and not TensorFlow.

write_events(Path("runs/default"), Path("runs/default/tensorboard"))   # once
with TensorBoardExport(run, log_dir) as export:                        # while jobs run
export.update()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from motet.errors import MotetError, RunError
from motet.report.read import Line, number, numbers_in, parse_lines, read_lines

_SUFFIX = ".motet"  # ends the name of event files written here, so that a later export replaces those and no others


def write_events(run_directory: Path, log_dir: Path) -> int:
    """Write the metrics of every job to `log_dir/<job>`; returns how many lines.

    An earlier export to the same place is replaced, other files there stay.

    Raises:
        MotetError: tensorboard is not installed.
        RunError: there is no run there, or `log_dir` cannot be written.
    """
    with TensorBoardExport(run_directory, log_dir) as export:
        lines = export.update()
    if not export.jobs:
        raise RunError(f"{run_directory} has no metrics yet: give the directory of a run that has begun")
    return lines


@dataclass
class _JobExport:
    """How far one job's metrics are written."""

    writer: Any
    offset: int = 0
    """Bytes of metrics.jsonl that were read."""


class TensorBoardExport:
    """Follows a run: each update writes the lines that are new."""

    def __init__(self, run_directory: Path, log_dir: Path) -> None:
        """Nothing is written yet.

        Raises:
            MotetError: tensorboard is not installed.
            RunError: `log_dir` cannot be written.
        """
        _require_tensorboard()
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"TensorBoard events cannot be written to {log_dir}: {error.strerror}") from error
        self._run = run_directory
        self._log_dir = log_dir
        self._jobs: dict[str, _JobExport] = {}

    def __enter__(self) -> TensorBoardExport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def jobs(self) -> tuple[str, ...]:
        """Jobs that have metrics."""
        return tuple(self._jobs)

    def update(self) -> int:
        """Write every whole line that is new; returns how many. Jobs may appear at any time.

        Where a file was cut back (a run that resumed from an earlier commit), the job is written anew.
        """
        count = 0
        for path in sorted(self._run.glob("*/metrics.jsonl")):
            name = path.parent.name
            if name in self._jobs and path.stat().st_size < self._jobs[name].offset:
                self._jobs.pop(name).writer.close()
            if name not in self._jobs:
                self._jobs[name] = _JobExport(_new_writer(self._log_dir / name))
            count += _write_new(self._jobs[name], path)
        return count

    def close(self) -> None:
        """Flush and close all files."""
        for job in self._jobs.values():
            job.writer.close()


def scalars(line: Line) -> Iterator[tuple[str, float]]:
    """Every finite number of a line of metrics.jsonl; nested fields are joined by a slash."""
    return ((field, value) for field, value in numbers_in(line) if field != "step" and math.isfinite(value))


def _require_tensorboard() -> None:
    try:
        import_module("tensorboard.summary.writer.event_file_writer")
    except ImportError as error:
        raise MotetError("TensorBoard is not installed: pip install '.[tensorboard]' in Motet's directory") from error


def _new_writer(directory: Path) -> Any:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for earlier in directory.glob(f"events.out.tfevents.*{_SUFFIX}"):
        earlier.unlink()
    return EventFileWriter(str(directory), filename_suffix=_SUFFIX)


def _write_new(job: _JobExport, path: Path) -> int:
    """Write the whole lines after the offset and move it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    with path.open("rb") as file:
        file.seek(job.offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    job.offset += len(whole)
    if not whole:
        return 0
    times = _times(path.with_name("timings.jsonl"))
    otherwise = path.stat().st_mtime
    count = 0
    for line in parse_lines(whole.decode("utf-8", "replace")):
        step = line.get("step")
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        if isinstance(step, int) and values:
            wall_time = times.get(step, otherwise)
            job.writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
            count += 1
    job.writer.flush()
    return count


def _times(path: Path) -> dict[int, float]:
    """When each step ended."""
    lines = ((line.get("step"), number(line.get("time"))) for line in read_lines(path))
    return {step: time for step, time in lines if isinstance(step, int) and time is not None}
