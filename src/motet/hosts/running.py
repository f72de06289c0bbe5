"""Run jobs to their end: progress, Ctrl-C, results and the report. `motet.run` and `motet run` both come here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.config import Config, EngineConfig, JobConfig, RunConfig, StopConfig
from motet.config.team import NOT_ON_HOSTS
from motet.core.errors import ConfigError, RunError, for_scripts
from motet.core.types import HostNow, JobState
from motet.hosts.before_loading import Checked, auto_kernels, check_before_loading, check_something_is_left
from motet.hosts.host import Host
from motet.hosts.launch import open_base, own_switches
from motet.hosts.preparing import notes_of, prepare_all
from motet.observe.follow import Followers, begin, job_of_run
from motet.observe.results import JobResult, RunResult
from motet.runtime import rundir
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import NOT_FOLLOWED
from motet.runtime.interrupt import Interrupt
from motet.runtime.job import Job
from motet.runtime.pipeline import Pipeline
from motet.runtime.progress import JobProgress
from motet.runtime.settings import setting_of
from motet.runtime.stopping import ended_early

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel

_Observe = Callable[[Sequence[JobProgress]], None]


def run_config(
    config: RunConfig,
    *,
    base: LoraModel | None = None,
    sequential: bool = False,
    accept_changes: bool = False,
    observe: _Observe | None = None,
    loading: Callable[[], None] = lambda: None,
    started: Callable[[Host, Sequence[Job]], None] = lambda host, jobs: None,
    notify: Callable[[str], None] | None = None,
    watch: Callable[[Callable[[], Sequence[HostNow]]], None] | None = None,
    original: JobDirectory | None = None,
) -> RunResult:
    """Run all jobs to their end (or until Ctrl-C, which finishes the steps under way and saves).

    Args:
        config: the validated jobs.
        base: the base that `config.base` names, where it is loaded already.
        sequential: one job after another instead of all at once; the bytes are the same.
        accept_changes: go on in a run directory that was made with another configuration.
        observe: called a few times a second with the progress of all jobs; what it raises ends the run, with all saved.
        loading: called once, when all that needs no base has been checked.
        started: called once, before the first step, with what was loaded; not where hosts load it.
        notify: called with a line for the person who pressed Ctrl-C, and of hosts that end.
        watch: called once with what says how hosts stand, where there are several.
        original: of the one job, if it is derived again: its rate is taken.

    Raises:
        MotetError: nothing could start; every other failure is a job's state.
    """
    if (config.engine.hosts > 1 or config.cluster.launcher == "ray") and not sequential and base is None:
        return _run_on_hosts(
            config, accept_changes=accept_changes, observe=observe, loading=loading, notify=notify, watch=watch
        )
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(rundir.opened(Path(config.run)))
        seen = stack.enter_context(_followed(config, directory.path, observe, notify))
        checked = _check(config, base, original, accept_changes=accept_changes)
        loading()
        own, slots = auto_kernels(config), 1 if sequential else config.engine.slots
        stack.enter_context(own_switches())
        opened = base or open_base(config, directory, stack, own, of_torchrun=config.cluster.launcher == "torchrun")
        prepared = prepare_all(config.jobs, opened.info, directory, checked.sources, checked.clocks, original)
        jobs = [job for job, _ in prepared]
        at_once = config.model_copy(update={"engine": config.engine.model_copy(update={"slots": slots})})
        host = Host(opened, at_once, directory, [need for _, need in prepared], config.jobs)
        try:
            for job in jobs:
                _take(host, job, checked, accept_changes=accept_changes)
            host.workshop.notes += [*notes_of(jobs), *_notes(checked, [job.progress for job in jobs])]
            started(host, jobs)
            (interrupt := Interrupt(notify)).run(lambda: _run_jobs(jobs, host, slots, interrupt, seen))
        finally:
            host.close()
        results = {job.name: _result(job.directory, job.progress, job.inexact) for job in jobs}
        return RunResult(directory.path, results, _report(directory.path), tuple(host.workshop.notes))


def _check(
    config: RunConfig,
    base: LoraModel | None = None,
    original: JobDirectory | None = None,
    *,
    accept_changes: bool,
) -> Checked:
    checked = check_before_loading(config, accept_changes=accept_changes, loaded=base is not None, begun=original)
    check_something_is_left(config, checked)
    return checked


def _run_on_hosts(
    config: RunConfig,
    *,
    accept_changes: bool,
    observe: _Observe | None,
    loading: Callable[[], None],
    notify: Callable[[str], None] | None,
    watch: Callable[[Callable[[], Sequence[HostNow]]], None] | None,
) -> RunResult:
    from motet.hosts.run import HostedJob, HostedRun, NoticesTo
    from motet.hosts.starts import launcher

    if team := next((job.name for job in config.jobs if job.team), None):
        raise ConfigError(f"job {team}: {NOT_ON_HOSTS}")
    log, notices = logging.getLogger("motet.hosts"), NoticesTo(notify or (lambda line: None))
    log.addHandler(notices)
    try:
        with (
            rundir.opened(Path(config.run), "run") as directory,
            _followed(config, directory.path, observe, notify) as seen,
        ):
            checked = _check(config, accept_changes=accept_changes)
            loading()
            jobs = list[HostedJob]()

            for one in config.jobs:
                at = directory.job(one.name)
                job = HostedJob(one, at, JobProgress.of(one, setting_of(checked.identity(one))))
                job.lines.update(_take_up(at, job.progress, one.stop_when, changed=one.name in checked.changed))
                jobs.append(job)
            notes = _notes(checked, [job.progress for job in jobs])
            launch, own = launcher(config.cluster, config), auto_kernels(config)
            run = HostedRun(config, directory, jobs, launch, accept_changes=accept_changes, own=own)
            if watch is not None:
                watch(run.now)
            interrupt = Interrupt(notify)
            interrupt.run(lambda: run.run(interrupt, seen))
            results = {job.config.name: _result(job.directory, job.progress, job.inexact) for job in jobs}
            return RunResult(directory.path, results, _report(directory.path), tuple(notes))
    finally:
        log.removeHandler(notices)


@contextlib.contextmanager
def _followed(
    config: RunConfig, run: Path, observe: _Observe | None, notify: Callable[[str], None] | None
) -> Iterator[_Observe | None]:
    """Let observers follow jobs from their progress; the function to call with it, None where nobody observes.

    Raises:
        ConfigError: an observer cannot be loaded.
    """
    if not config.observers:
        yield observe
        return

    states = dict[str, JobState]()
    for job in config.jobs:
        begin(run, job.name)

    def seen(progress: Sequence[JobProgress]) -> None:
        for one in progress:
            if states.get(one.name) is not one.state:
                states[one.name] = one.state
                followers.move(job_of_run(run, one.name), one.state)
        if observe is not None:
            observe(progress)

    with Followers(config.observers, run, notify or print) as followers:
        yield seen


def _notes(checked: Checked, jobs: Sequence[JobProgress]) -> list[str]:
    """Which jobs have ended although they were changed, and why a change of the jobs' code may go unnoticed."""
    ended = [job.name for job in jobs if job.name in checked.changed and job.state.final]
    return [
        *(
            f"job {name}: it has ended, so your changes do not apply to it; train it under another name"
            for name in ended
        ),
        *(f"job {name}: {why}" for name, one in checked.identities.items() for why in one.get(NOT_FOLLOWED, ())),
    ]


def _take(host: Host, job: Job, checked: Checked, *, accept_changes: bool) -> None:
    known = checked.identity(job.config)
    job.progress.setting = setting_of(known)
    host.take(job, known, accept_changes=accept_changes, accept_damage=accept_changes)
    _take_up(job.directory, job.progress, job.config.stop_when, changed=job.name in checked.changed)


def _take_up(directory: JobDirectory, progress: JobProgress, when: StopConfig, *, changed: bool) -> list[int]:
    """Start from what an earlier process left: jobs that ended stay ended (unless more steps are wanted), others go on.

    Gives the steps that are recorded.
    """
    committed = directory.newest()
    if committed is None:
        return []
    progress.step, notes = committed.step, directory.read_tokens(committed)
    lines = [{**line, **notes.get(int(line["step"]), {})} for line in directory.read_metrics(committed)]
    progress.take_up(lines)
    progress.choose(committed.best_version, committed.best_by)
    state = directory.read_status().get("state")
    early = ended_early(directory, when) if committed.step < progress.steps else ""
    if state == JobState.CANCELLED or (state == JobState.SUCCEEDED and (early or committed.step >= progress.steps)):
        progress.state = JobState(state)
        progress.message = (early or "done before") if state == JobState.SUCCEEDED else "cancelled before"
        progress.message += "; your changes do not apply to it" if changed else ""
    return [int(line["step"]) for line in lines]


async def _run_jobs(
    jobs: Sequence[Job],
    host: Host,
    slots: int,
    interrupt: Interrupt,
    observe: _Observe | None,
) -> None:
    pipeline = Pipeline(jobs, host.services, slots)
    failures = list[BaseException]()

    def progress() -> list[JobProgress]:
        return [job.progress for job in jobs]

    async def watch() -> None:
        try:
            while observe is not None:
                observe(progress())
                await asyncio.sleep(0.25)
        except (Exception, SystemExit) as error:  # rich ends a program whose output nobody reads any more
            failures.append(error)
            pipeline.stop()

    watching = asyncio.create_task(watch())
    try:
        with interrupt.heard(pipeline.stop, progress):
            async with host.open():
                await pipeline.run()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if observe is not None and not failures:
            observe(progress())
    if failures:
        raise failures[0]


def _result(directory: JobDirectory, progress: JobProgress, inexact: Sequence[str]) -> JobResult:
    last, best = map(directory.version_named, ("latest", "best"))
    return JobResult(
        name=progress.name,
        state=progress.state,
        adapter=last,
        best=best if best.is_dir() else last,
        rewards=tuple(progress.rewards),
        evaluations=tuple(progress.evaluations),
        message=progress.message,
        inexact=tuple(inexact),
        spent=progress.spent,
        setting=progress.setting,
    )


def _report(directory: Path) -> Path | None:
    from motet.observe.report import write_report

    try:
        return write_report(directory)
    except (OSError, RunError):  # a full disk must not hide what became of the jobs
        return None


@for_scripts
def run(
    jobs: Sequence[JobConfig | dict[str, Any]],
    *,
    base: str = "small",
    directory: str | Path | None = None,
    engine: EngineConfig | dict[str, Any] | None = None,
    sequential: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
    observers: Sequence[Any] = (),
) -> RunResult:
    """Train all jobs at once and return their adapters: `motet run` from Python.

    A job is a `JobConfig` or a dict of its fields; its reward may be a function object `(problem, completion) -> float`, or one
    with TRL's signature. The run directory is `runs/<name of the script>` unless given. `observers` are names of trackers, or
    classes or functions that make an observer of a job (`motet.observe.observing`).

    Raises:
        KeyboardInterrupt: Ctrl-C; everything is saved, and the same call goes on.
        ConfigError: a field is wrong.
        MotetError: nothing could start.
    """
    config = config_of(jobs, base, engine, "motet.run", directory, observers)
    start = run_config if quiet else _run_shown
    result = start(config, sequential=sequential, accept_changes=accept_changes)
    if any(job.state is JobState.PAUSED and not job.spent for job in result.jobs.values()):
        raise KeyboardInterrupt(f"saved in {result.directory}; the same call goes on")
    return result


def config_of(
    jobs: Sequence[JobConfig | dict[str, Any]],
    base: str,
    engine: EngineConfig | dict[str, Any] | None,
    where: str,
    directory: str | Path | None = None,
    observers: Sequence[Any] = (),
) -> RunConfig:
    """What a job file would say.

    Raises:
        ConfigError: a field is wrong; `where` stands before what is said of it.
    """
    from motet.config.jobfile import validate_local

    if isinstance(jobs, Mapping | str | Config) or not isinstance(jobs, Iterable):
        raise ConfigError(
            f"{where}: jobs must be a list of jobs (got {type(jobs).__name__}); those of a file are motet.load_jobs(file).jobs"
        )
    tree = {
        "base": base,
        "run": str(directory or f"runs/{_script_name()}"),
        "engine": engine or {},
        "observers": list(observers),
        "jobs": [dict(job) if isinstance(job, Mapping) else job for job in jobs],
    }
    return validate_local(tree, where)


def _script_name() -> str:
    name = Path(sys.argv[0]).stem if sys.argv else ""
    return "notebook" if "ipykernel" in name or not name.strip("-") else name


def _run_shown(config: RunConfig, *, sequential: bool, accept_changes: bool) -> RunResult:
    from motet.observe import make_view
    from motet.observe.text import plain_console

    console = plain_console()
    view = make_view(console, config.base)
    view.start()
    seen: dict[str, Any] = {"observe": view.update, "notify": view.print_line, "watch": view.watch}
    try:
        result = run_config(config, sequential=sequential, accept_changes=accept_changes, **seen)
        for note in result.notes:
            view.print_line(f"note: {note}")
        return result
    finally:
        view.stop()
