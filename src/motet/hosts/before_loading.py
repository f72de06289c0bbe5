"""Checks a run before its base is loaded, and reports the mistakes of all jobs at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.algorithms.client import ClientDriven
from motet.algorithms.rows import RowAlgorithm
from motet.chat.clock import moment
from motet.config import JobConfig, RunConfig
from motet.config.chain import chains, shape_of, unlike
from motet.config.team import NOT_ON_HOSTS
from motet.core.errors import AdapterError, BaseModelError, ConfigError, DataError, MotetError, RewardError, RunError
from motet.core.near import close_matches
from motet.core.nested import MISSING, names_of, value_at
from motet.core.types import JobState
from motet.data.dataset import Dataset
from motet.data.reasoning import ScorerSpec
from motet.hosts.launch import check_directories
from motet.hosts.preparing import Sources, check_reference
from motet.kernels.cpu.choice import Choice, of_jobs
from motet.model.find import find_adapter, find_files
from motet.rewards import judge_http, reward_elsewhere
from motet.rewards.judge_http import of_a_run
from motet.rewards.numbers import last_number
from motet.rewards.reward_answers import columns_of
from motet.rewards.reward_forms import adapted
from motet.rewards.reward_loading import NO_SCORER, OWN, SCORER, built_in
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls
from motet.rewards.reward_workers import load_request
from motet.rewards.rewards import BUILTIN, NEED_AN_ANSWER
from motet.runtime.beginning import check_rules, clock_at
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import computed_by, of_config
from motet.runtime.interrupt import Interrupt
from motet.runtime.opening import check_identity, of_another_job
from motet.runtime.own_environment import check_environment
from motet.runtime.stopping import ended_early

_AT_ONCE = 4
"""Most processes that load a person's code at the same time."""
_NOWHERE = Path(os.devnull)
"""Discards the output of code that is only checked."""

TOO_LATE = (
    "It has ended, so nothing of the changed job would be trained. Give it another name or run directory (--run; in Python and "
    "notebooks directory=…) to train it, or undo the change to see what it gave."
)

MOST_NAMED = 8
"""Most jobs named with a mistake that they share."""

Load = Callable[[], Awaitable[None]]


@dataclass
class _Refusals:
    """The mistakes so far; equal ones are reported once, with their jobs."""

    errors: list[MotetError] = field(default_factory=list)
    jobs_by_reason: dict[str, list[str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, job: str = "") -> Iterator[None]:
        """Record an error that the block raises."""
        try:
            yield
        except MotetError as error:
            self.note(job, error)

    def note(self, job: str, error: MotetError) -> None:
        """Record why a job cannot run."""
        self.errors.append(error)
        self.jobs_by_reason.setdefault(str(error).removeprefix(f"job {job}: "), []).append(job)

    def check(self) -> None:
        """Raise the recorded mistakes, if any."""
        if not self.errors:
            return
        kinds = {type(error) for error in self.errors}
        kind: type[MotetError] = kinds.pop() if kinds in ({RunError}, {BaseModelError}) else ConfigError
        raise kind("\n".join(f"{_named(jobs)}{reason}" for reason, jobs in self.jobs_by_reason.items())) from (
            self.errors[0]
        )


def _named(jobs: Sequence[str]) -> str:
    names = [name for name in jobs if name]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"job {names[0]}: " if len(names) == 1 else f"jobs {', '.join(names[:MOST_NAMED])}{more}: "


@dataclass
class Checked:
    """Data read during the checks of a run's jobs."""

    sources: Sources = field(default_factory=Sources)
    """The jobs' data."""
    identities: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The identity of each job (`of_config`), by name."""
    clocks: dict[str, str] = field(default_factory=dict)
    """The time that each job's chat template sees, by name."""
    now: str = field(default_factory=moment)
    """That of jobs that begin now: all of a run have one time."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """How jobs differ from their directories, by name, if that is accepted."""

    def identity(self, job: JobConfig) -> dict[str, Any]:
        """The identity of a job."""
        if job.name not in self.identities:
            self.identities[job.name] = of_config(job)
        return self.identities[job.name]

    def clock_of(self, job: JobConfig, directory: JobDirectory) -> str:
        """The clock of a job with this directory, or with that of the job that is derived again. Raises RunError."""
        if job.name not in self.clocks:
            self.clocks[job.name] = clock_at(directory, self.identity(job), self.now)
        return self.clocks[job.name]


def on_hosts(config: RunConfig) -> bool:
    """Whether hosts in other processes run the jobs."""
    return config.engine.hosts > 1 or config.cluster.launcher == "ray"


def auto_kernels(config: RunConfig) -> Choice | None:
    """The kernels that `auto` selects: those that the run's jobs began with, or the fastest here.

    Raises:
        ConfigError: the jobs began with own kernels, which do not support a setting.
    """
    if config.engine.kernels != "auto":
        return None
    choice = of_jobs(computed_by(JobDirectory(Path(config.run) / job.name) for job in config.jobs))
    if choice.kept and (setting := config.engine.excludes(choice.kernels)):
        raise ConfigError(
            f"jobs of this run began with Motet's own kernels, which do not know the setting engine.{setting}: leave it out"
        )
    return choice


def check_before_loading(
    config: RunConfig,
    *,
    accept_changes: bool = False,
    loaded: bool = False,
    begun: JobDirectory | None = None,
) -> Checked:
    """Check everything that does not need the base; returns the data that was read.

    `loaded`: the base is. `begun`: a directory with the job's clock.

    Raises:
        ConfigError, RunError: every mistake, one per line; nothing was written.
    """
    refusals, checked = _Refusals(), Checked()
    here = config.cluster.launcher != "ray"  # files and devices of a cluster are the nodes'
    if here and not loaded:
        with refusals.of():
            find_files(config.base)
        with refusals.of():
            _check_devices(config)
    if here:
        with refusals.of():
            check_directories(config.engine)
    if here and config.rollout.engine != "embedded":
        from motet.hosts.servers import check_settings

        with refusals.of():
            check_settings(config.rollout)
    pool = RewardPool(elsewhere=of_a_run(Path(config.run)))
    made_by_others, names = chains(config.jobs), [job.name for job in config.jobs]
    code: dict[str, tuple[Load, list[str]]] = {}
    for job in config.jobs:
        directory = JobDirectory(Path(config.run) / job.name)
        with refusals.of(job.name):
            if changes := changes_of(directory, job, checked.identity(job), accept_changes=accept_changes):
                checked.changed[job.name] = changes
            checked.clock_of(job, begun or directory)
        with refusals.of(job.name):
            _check_fields(job, hosted=on_hosts(config) and not loaded)
        data = None
        if here:
            with refusals.of(job.name):
                check_reference(job)
            with refusals.of(job.name):
                _check_start(job, made_by_others, names)
            with refusals.of(job.name):
                data = check_data(job, checked.sources)
        if not has_ended(directory, job):
            with refusals.of(job.name):
                for key, load in _own_code(job, data, pool).items():
                    code.setdefault(key, (load, []))[1].append(job.name)
    if here and code:
        Interrupt().run(lambda: _load_all(list(code.values()), refusals))
    refusals.check()
    return checked


def _check_fields(job: JobConfig, *, hosted: bool) -> None:
    """Refuse a job that no run can train, or none on hosts in other processes."""
    if isinstance(job.algorithm, ClientDriven):
        raise ConfigError("algorithm.type client: clients reach a service alone; start `motet serve`")
    if hosted and job.team:
        raise ConfigError(NOT_ON_HOSTS)
    own = "reward is a function" if any(reward.function is not None for reward in job.rewards) else ""
    if hosted and (own := own or ("rows are" if job.data.rows is not None else "")):
        raise ConfigError(
            f"its {own} of this process, which hosts do not have; name a file instead (file.py:function, data.source), or set "
            "engine.hosts to 1"
        )


def _check_devices(config: RunConfig) -> None:
    """Refuse a missing GPU."""
    engine = config.engine
    others = engine.n_ranks - 1 if config.cluster.launcher == "local" else 0
    wanted = [device for device in engine.devices or [engine.device] if device != "cpu"]
    if not others:
        wanted = [device for device in wanted if device != "auto"]
    if not wanted:
        return
    from motet.model.accelerator import place_of

    for device in wanted:
        place_of(device, others)
    several = engine.devices or [engine.device] * engine.hosts
    firsts = sorted(place.index or 0 for one in several if (place := place_of(one)).type != "cpu") if others else []
    if any(after - before < engine.n_ranks for before, after in itertools.pairwise(firsts)):
        apart = ", ".join(f"cuda:{number * engine.n_ranks}" for number in range(engine.hosts))
        raise ConfigError(
            f"engine.devices: each host's {engine.n_ranks} ranks take that many GPUs, from its device on, and they overlap; "
            f"set it to [{apart}]"
        )


def _check_start(job: JobConfig, made_by_others: Container[str], names: Sequence[str]) -> None:
    """Refuse a missing initial adapter, unless a job above makes it."""
    init = job.adapter.init
    if init is None or job.name in made_by_others:
        return
    directory = Path(os.path.expanduser(init))
    try:
        find_adapter(directory)
    except AdapterError as error:
        above = names[: names.index(job.name)]
        near = close_matches(init.partition("@")[0], above, n=1, cutoff=0.5)
        meant = f", did you mean {near[0]!r}?" if near else ""
        hint = "" if directory.exists() else f", and no job above has this name{meant}"
        raise ConfigError(f"adapter.init: {error}{hint}") from error
    if wrong := unlike(job.adapter, shape_of(directory)):
        raise ConfigError(f"adapter.init: {directory} {wrong}")


def check_data(job: JobConfig, sources: Sources) -> Dataset:
    """Read a job's data. Raises DataError or RewardError if it lacks what the job needs, and says what and where."""
    data, source = sources.split(job.data), job.data.source
    if isinstance(job.algorithm, RowAlgorithm):
        sources.check_rows(job.data, job.algorithm.kind)
    named = [reward.name for reward in job.rewards if reward.function is None]
    if SCORER in named and data.scorer is None:
        raise RewardError(NO_SCORER)
    needy = [name for name in named if name in NEED_AN_ANSWER]
    if needy and not any(problem.answer for problem in data.train):
        columns = ", ".join(names_of(data.train[0].metadata)) or "none"
        raise DataError(
            f"reward {needy[0]!r} compares with a reference answer, and no row of {source} has one; name its column in "
            f"data.answer (other columns: {columns}), or take another reward"
        )
    if "numeric" in named and all(last_number(problem.answer) is None for problem in data.train):
        raise DataError(
            f"reward 'numeric' compares numbers, and no answer of {source} has one, such as {data.train[0].answer!r:.80}; "
            f"name a column with numbers in data.answer (columns: {', '.join(names_of(data.train[0].metadata))}), write them "
            "in digits, or take another reward"
        )
    for reward in job.rewards:
        column = str(reward.args.get("column", "tests"))  # args may hold anything
        if (
            reward.name == "code"
            and reward.function is None
            and not any(value_at(row.metadata, column) not in (None, MISSING, "", []) for row in data.train)
        ):
            raise DataError(
                f"reward 'code': no row of {source} has tests in the column {column!r:.80}; name theirs in args (column: …; "
                f"the columns: {', '.join(names_of(data.train[0].metadata)) or 'none'})"
            )
    return data


def changes_of(
    directory: JobDirectory, job: JobConfig, identity: Mapping[str, Any], *, accept_changes: bool
) -> list[str]:
    """The accepted differences of a job from its directory. Raises RunError for others, and says what to do."""
    ended = has_ended(directory, job)
    changes = check_identity(directory, identity, accept_changes=accept_changes or ended)
    if changes and ended and not accept_changes:
        raise RunError(f"{of_another_job(directory, changes)}{TOO_LATE}")
    if not (ended or accept_changes):
        check_rules(directory)
    return changes


def check_something_is_left(config: RunConfig, checked: Checked) -> None:
    """Refuse accepted changes that no job can take up any more. Raises RunError."""
    places = {job.name: JobDirectory(Path(config.run) / job.name) for job in config.jobs}
    if checked.changed and all(has_ended(places[job.name], job) for job in config.jobs):
        told = (f"job {name}: {of_another_job(places[name], changes)}" for name, changes in checked.changed.items())
        raise RunError("".join(told) + TOO_LATE)


def has_ended(directory: JobDirectory, job: JobConfig) -> bool:
    """Whether a job is finished: it is not trained again, and its code needs no check."""
    state, done = directory.read_status().get("state"), directory.steps()
    if state != JobState.SUCCEEDED or not done:
        return bool(state == JobState.CANCELLED)
    return done[-1] >= job.steps or bool(ended_early(directory, job.stop_when))


def _own_code(job: JobConfig, data: Dataset | None, pool: RewardPool) -> Mapping[str, Load]:
    """A person's code that a separate process must load, by a key that identifies it among jobs.

    Raises:
        MotetError: it has a fault that shows without loading it.
    """
    code: dict[str, Load] = {}
    scorer = None if data is None else data.scorer
    columns = columns_of(data.train, data.holdout) if data is not None else None
    if _check_rewards(job, columns) and not (data is None and any(reward.name == SCORER for reward in job.rewards)):
        described = [reward.model_dump(mode="json") for reward in job.rewards]
        functions = [id(reward.function) for reward in job.rewards]
        load = functools.partial(_load_rewards, job, scorer, pool, columns)
        code[f"{json.dumps(described)} {functions} {scorer} {columns}"] = load
    if job.environment.own and not isinstance(job.algorithm, RowAlgorithm):
        aside = getattr(job.algorithm, "over_provision", 1.0) > 1
        code[f"{job.environment.model_dump_json()} {aside}"] = lambda: check_environment(job, _NOWHERE)
    return code


def _check_rewards(job: JobConfig, columns: Sequence[str] | None) -> bool:
    """Whether a process must load a person's code. Raises RewardError if a reward is wrong, and says what to do."""
    own, here = False, []
    for reward in job.rewards:
        if reward.function is None and reward.name in reward_elsewhere.ELSEWHERE:
            if reward.name == "worker":
                raise reward_elsewhere.needs_a_service(reward.name)
            (judge_http if reward.name == "judge" else reward_elsewhere).check(reward)
            continue
        if reward.function is not None:
            adapted(reward.function, reward.args, reward.name, columns)
        elif ":" in reward.name:
            own = True
        elif reward.name in BUILTIN:
            built_in(reward.name, reward.args)
        elif reward.name != SCORER:
            OWN.find(reward.name)
        Walls().around(reward)
        here.append(reward)
    if here:
        load_request(here, None, walled=False)
    return own


async def _load_rewards(
    job: JobConfig, scorer: ScorerSpec | None, pool: RewardPool, columns: Sequence[str] | None
) -> None:
    try:
        await pool.register(job.name, job.rewards, scorer, _NOWHERE, columns)
    finally:
        await pool.unregister(job.name)


async def _load_all(code: Sequence[tuple[Load, list[str]]], refusals: _Refusals) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def look(load: Load) -> MotetError | None:
        async with turns:
            try:
                await load()
            except MotetError as error:
                return error
        return None

    found = await asyncio.gather(*(look(load) for load, _ in code))
    for error, (_, jobs) in zip(found, code, strict=True):
        if error is not None:
            for job in jobs:
                refusals.note(job, error)
