"""Run jobs to their end: progress, Ctrl-C, results and the report. `motet.run` and `motet run` both come here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.config import Config, EngineConfig, JobConfig, RunConfig
from motet.core.errors import ConfigError, RunError, for_scripts
from motet.core.types import JobState
from motet.hosts.checks import Checked, check_run
from motet.hosts.host import opened_host
from motet.hosts.launch import auto_kernels, own_switches
from motet.hosts.preparing import notes_of, prepare_all
from motet.hosts.runs import HostedRun, Observe, Run, follow, notices_to
from motet.observe.follow import Followers, begin, job_of_run
from motet.observe.results import JobResult, RunResult
from motet.runtime import rundir
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import TOO_LATE, Given
from motet.runtime.identity import NOT_FOLLOWED
from motet.runtime.interrupt import Interrupt
from motet.runtime.progress import JobProgress
from motet.runtime.settings import setting_of

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel


def run_config(
    config: RunConfig,
    *,
    base: LoraModel | None = None,
    sequential: bool = False,
    accept_changes: bool = False,
    observe: Observe | None = None,
    loading: Callable[[], None] = lambda: None,
    started: Callable[[Run], None] = lambda run: None,
    notify: Callable[[str], None] | None = None,
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
        started: called once, before the first step, with the run; one of several hosts has no job in this process.
        notify: called with a line for the person who pressed Ctrl-C, and of hosts that end.
        original: of the one job, if it is derived again.

    Raises:
        MotetError: nothing could start; every other failure is a job's state.
    """
    if sequential:
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"slots": 1, "hosts": 1})})
    several = config.on_hosts and not sequential and base is None
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(rundir.opened(Path(config.run), "run" if several else ""))
        seen = stack.enter_context(_followed(config, directory.path, observe, notify))
        loaded = base is not None
        checked = check_run(config, accept_changes=accept_changes, loaded=loaded, original=original)
        _check_something_is_left(checked)
        loading()
        own = auto_kernels(config.engine, (given.directory for given in checked.jobs))
        if several:
            stack.enter_context(notices_to(notify))
            run: Run = HostedRun(config, directory, own, accept_changes=accept_changes)
        else:
            stack.enter_context(own_switches())
            jobs = functools.partial(prepare_all, checked, None)
            run = host = stack.enter_context(opened_host(config, directory, own, jobs, base=base))
            for job, given in zip(host.jobs, checked.jobs, strict=True):
                host.take(job, given.known, accept_changes=accept_changes, accept_damage=accept_changes)
            run.notes.extend(notes_of(host.jobs))
        progress = run.progress()
        run.notes.extend(_taken_up(checked, progress))
        started(run)
        (interrupt := Interrupt(notify)).run(lambda: follow(run, interrupt, seen))
    results = {job.name: _result(job, directory.job(job.name)) for job in progress}
    return RunResult(directory.path, results, _report(directory.path), tuple(run.notes))


def _check_something_is_left(checked: Checked) -> None:
    """Refuse accepted changes that no job can take up any more. Raises RunError."""
    changed = [given for given in checked.jobs if given.changed]
    if changed and all(given.ended for given in checked.jobs):
        told = "".join(f"job {given.config.name}: {given.told}" for given in changed)
        raise RunError(f"{told}{TOO_LATE}")


@contextlib.contextmanager
def _followed(
    config: RunConfig, run: Path, observe: Observe | None, notify: Callable[[str], None] | None
) -> Iterator[Observe | None]:
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


def _taken_up(checked: Checked, progress: Sequence[JobProgress]) -> list[str]:
    """Start from what earlier processes left; gives why accepted changes do not apply, and why some may go unnoticed."""
    notes = list[str]()
    for given, now in zip(checked.jobs, progress, strict=True):
        now.setting = setting_of(given.known)
        _take_up(Given(given.config, given.directory), now, changed=bool(given.changed))
        if given.changed and now.state.final:
            notes.append(
                f"job {now.name}: it has ended, so your changes do not apply to it; train it under another name"
            )
    return [
        *notes,
        *(f"job {job.config.name}: {why}" for job in checked.jobs for why in job.known.get(NOT_FOLLOWED, ())),
    ]


def _take_up(given: Given, progress: JobProgress, *, changed: bool) -> None:
    """Jobs that ended stay ended (unless more steps are wanted), others go on."""
    directory, committed = given.directory, given.newest
    if committed is None:
        return
    progress.step, notes = committed.step, directory.read_tokens(committed)
    progress.take_up({**line, **notes.get(int(line["step"]), {})} for line in directory.read_metrics(committed))
    progress.choose(committed.best_version, committed.best_by)
    if given.ended:
        progress.state = JobState(given.state)
        progress.message = (given.early or "done before") if given.state == JobState.SUCCEEDED else "cancelled before"
        progress.message += "; your changes do not apply to it" if changed else ""


def _result(progress: JobProgress, directory: JobDirectory) -> JobResult:
    last, best = map(directory.version_named, ("latest", "best"))
    return JobResult(
        name=progress.name,
        state=progress.state,
        adapter=last,
        best=best if best.is_dir() else last,
        rewards=tuple(progress.rewards),
        evaluations=tuple(progress.evaluations),
        message=progress.message,
        inexact=tuple(progress.inexact),
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
    from motet.config.chain import take_shapes
    from motet.config.jobfile import validate

    if isinstance(jobs, Mapping | str | Config) or not isinstance(jobs, Iterable):
        raise ConfigError(
            f"{where}: jobs must be a list of jobs (got {type(jobs).__name__}); those of a file are motet.load_jobs(file).jobs"
        )
    run, trees = (
        str(directory or f"runs/{_script_name()}"),
        [dict(job) if isinstance(job, Mapping) else job for job in jobs],
    )
    tree = {
        "base": base,
        "run": run,
        "engine": engine or {},
        "observers": list(observers),
        "jobs": take_shapes(trees, run),
    }
    return validate(tree, where)


def _script_name() -> str:
    name = Path(sys.argv[0]).stem if sys.argv else ""
    return "notebook" if "ipykernel" in name or not name.strip("-") else name


def _run_shown(config: RunConfig, *, sequential: bool, accept_changes: bool) -> RunResult:
    from motet.observe import make_view
    from motet.observe.text import plain_console

    console = plain_console()
    view = make_view(console, config.base)
    view.start()
    try:
        result = run_config(
            config,
            sequential=sequential,
            accept_changes=accept_changes,
            observe=view.update,
            started=lambda run: view.watch(run.loads),
            notify=view.print_line,
        )
        for note in result.notes:
            view.print_line(f"note: {note}")
        return result
    finally:
        view.stop()
