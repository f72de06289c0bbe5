"""`motet run`: train the jobs of a file, shown live."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from motet.jobfile import load_jobs
from motet.launch import RunResult, Workshop, run_config
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.types import JobState
from motet.view import make_view, summary_table


def run_file(
    path: Path,
    overrides: Sequence[str],
    *,
    directory: Path | None,
    sequential: bool,
    accept_changes: bool,
    tensorboard: Path | None,
    trust_remote_code: bool,
) -> int:
    """Run a job file; returns the exit code: 0 all succeeded, 1 a job failed, 130 interrupted."""
    config = load_jobs(path, overrides)
    if directory is not None:
        config = config.model_copy(update={"run": str(directory)})
    if trust_remote_code:
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"trust_remote_code": True})})
    console = Console()
    console.print(f"loading {config.base} for {len(config.jobs)} job{'s' if len(config.jobs) > 1 else ''} …")
    view = make_view(console)
    export = _tensorboard(Path(config.run), tensorboard)
    last: list[JobProgress] = []

    def observe(progress: Sequence[JobProgress]) -> None:
        last[:] = progress
        view.update(progress)
        export()

    def started(workshop: Workshop, jobs: Sequence[Job]) -> None:
        for note in workshop.notes:
            console.print(f"note: {note}")
        rates = sorted({f"{job.base_rate:.2g}" for job in jobs if job.config.optimizer.lr == "auto"})
        if rates:
            console.print(f"learning rate (auto): {', '.join(rates)}")
        view.start()

    try:
        result = run_config(
            config, sequential=sequential, accept_changes=accept_changes, observe=observe, started=started
        )
    finally:
        view.stop()
    console.print(summary_table(last))
    return _farewell(console, result, path)


def _farewell(console: Console, result: RunResult, path: Path) -> int:
    console.print(f"report: {result.report}", soft_wrap=True)
    open_jobs = [job for job in result.jobs.values() if not job.state.final]
    if open_jobs:
        console.print(f"{len(open_jobs)} job(s) saved; go on with: motet run {path}", soft_wrap=True)
        return 130
    failed = [job for job in result.jobs.values() if job.state is JobState.FAILED]
    for job in failed:
        console.print(f"{job.name} failed: {job.message}", soft_wrap=True, markup=False, style="red")
    if failed:
        console.print(f"after mending the cause, the same command goes on: motet run {path}", soft_wrap=True)
    return 1 if failed else 0


def _tensorboard(run: Path, log_directory: Path | None) -> Callable[[], None]:
    """Something to call often, which writes TensorBoard events now and then; does nothing without a directory."""
    if log_directory is None:
        return lambda: None
    from motet.tensorboard import TensorBoardExport

    writer = TensorBoardExport(run, log_directory)
    due = 0.0

    def export() -> None:
        nonlocal due
        if time.monotonic() >= due:
            writer.update()
            due = time.monotonic() + 2.0

    return export
