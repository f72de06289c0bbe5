"""`motet run`: train the jobs of a file, shown live."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from motet.commands.answers import print_table, same_command, width_of
from motet.config.engine import ClusterConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError
from motet.core.types import JobState
from motet.hosts.running import run_config
from motet.hosts.runs import Run
from motet.observe import glyphs_of, make_view, settings_table, summary_table
from motet.observe.results import RunResult
from motet.observe.text import plain_console
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress


def run_file(
    path: Path,
    overrides: Sequence[str],
    *,
    directory: Path | None,
    sequential: bool = False,
    accept_changes: bool = False,
    ray: str | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Run a job file; returns the exit code: 0 all succeeded or spent their budgets, 1 a job failed, 130 interrupted."""
    config = load_jobs(path, overrides, trust_remote_code=trust_remote_code)
    if directory is not None:
        config = config.model_copy(update={"run": str(directory)})
    if ray is not None:
        config = config.model_copy(update={"cluster": ClusterConfig(launcher="ray", address=ray)})
    _be_the_rank_that_torchrun_wants(config.cluster)
    console = plain_console()
    view = make_view(console, config.base)
    last: list[JobProgress] = []
    printed: list[str] = []

    def observe(progress: Sequence[JobProgress]) -> None:
        last[:] = progress
        view.update(progress)

    def started(run: Run) -> None:
        printed.extend(run.notes)
        _print_notes(console, printed)
        print_rates(console, run.jobs)
        view.watch(run.loads)
        view.start()

    try:
        result = run_config(
            config,
            sequential=sequential,
            accept_changes=accept_changes,
            observe=observe,
            loading=lambda: console.print(f"loading {config.base} for {_counted(len(config.jobs))} …"),
            started=started,
            notify=view.print_line,
        )
    finally:
        view.stop()
    _print_notes(console, result.notes[len(printed) :])
    _print_tables(console, last, Path(config.run), view.seconds)
    return _farewell(console, result, config.base)


def _print_tables(console: Console, jobs: Sequence[JobProgress], run: Path, seconds: Mapping[str, float]) -> None:
    """Print the results of jobs, and of settings if some were trained with several seeds."""
    glyphs, width = glyphs_of(console), width_of(console)
    print_table(console, summary_table(jobs, run, seconds, glyphs, width))
    if (seeds := settings_table(jobs, glyphs, width)) is not None:
        print_table(console, seeds)
        if seeds.row_count > 1:
            console.print(f"compare settings: motet compare {run}", soft_wrap=True)


def print_rates(console: Console, jobs: Sequence[Job]) -> None:
    """Print the learning rates that `auto` chose."""
    rates = sorted({f"{job.base_rate:.2g}" for job in jobs if job.config.optimizer.lr == "auto"})
    if rates:
        console.print(f"learning rate (auto): {', '.join(rates)}")


def _counted(jobs: int) -> str:
    return f"{jobs} job{'s' if jobs > 1 else ''}"


def _be_the_rank_that_torchrun_wants(cluster: ClusterConfig) -> None:
    """Only the first of torchrun's processes returns.

    Raises:
        ConfigError: torchrun started this without cluster.launcher, or the other way round.
    """
    there, meant = "TORCHELASTIC_RUN_ID" in os.environ, cluster.launcher == "torchrun"
    if there != meant:
        raise ConfigError(
            "cluster.launcher is torchrun: start it as torchrun --nproc-per-node N -m motet run FILE"
            if meant
            else "torchrun has started this: set cluster.launcher to torchrun and engine.ranks to its processes, or start "
            "`motet run` without it"
        )
    if there and os.environ["RANK"] != "0":
        from motet.training.sharded.torchrun import take_part

        take_part()


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", soft_wrap=True)


def _farewell(console: Console, result: RunResult, base: str) -> int:
    again = same_command()
    report = result.report or "not written, the disk is full"
    console.print(f"report: {report}", soft_wrap=True)
    made = [job for job in result.jobs.values() if job.best.is_dir() and job.state is not JobState.FAILED]
    for job in made[:1]:
        console.print(f"talk to an adapter: motet chat {base} --adapter {job.best}", soft_wrap=True)
    for job in result.jobs.values():
        if job.spent:
            console.print(f"{job.name} {job.message}", soft_wrap=True)
    if saved := sum(not job.state.final and not job.spent for job in result.jobs.values()):
        console.print(f"{_counted(saved)} saved; resume with: {again}", soft_wrap=True)
        return 130
    failed = any(job.state is JobState.FAILED for job in result.jobs.values())
    if failed:
        console.print(f"fix the cause, then run the same command to resume: {again}", soft_wrap=True)
    return 1 if failed else 0
