"""The checks of jobs: `check_files` and `check_on_base`, after `config.jobfile.check_fields`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from motet.algorithms.rows import RowAlgorithm
from motet.chat.clock import moment
from motet.chat.template import Chat
from motet.config import OF_CLIENT, JobConfig, RunConfig
from motet.config.budgets import Need
from motet.config.chain import chains, shape_of, unlike
from motet.config.step_tokens import check_decoded, check_step
from motet.core.errors import AdapterError, BaseModelError, ConfigError, MotetError, RunError
from motet.core.model_info import ModelInfo
from motet.core.suggestions import close_matches
from motet.core.types import Problem
from motet.data.dataset import Dataset
from motet.data.reasoning import ScorerSpec
from motet.data.shared import ReadData, Sources
from motet.hosts.launch import check_directories
from motet.model.find import find_adapter, find_files
from motet.rewards.judge_http import of_a_run, tokens_of
from motet.rewards.reward_answers import columns_of
from motet.rewards.reward_checks import check_answers, check_rewards
from motet.rewards.reward_loading import SCORER
from motet.rewards.reward_pool import RewardPool
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import Given
from motet.runtime.interrupt import Interrupt
from motet.runtime.own_environment import check_environment
from motet.runtime.reference import shape_of as shape_of_reference

_AT_ONCE = 4
"""Most processes that load a person's code at the same time."""
_NOWHERE = Path(os.devnull)
"""Discards the output of code that is only checked."""

MOST_NAMED = 8
"""Most jobs named with a mistake that they share."""

Load = Callable[[], Awaitable[None]]


@dataclass
class Refusals:
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


@dataclass(frozen=True)
class Checked:
    """The jobs of a run, beside their directories, and the data that was read."""

    jobs: Sequence[Given]
    sources: Sources


def check_run(
    config: RunConfig,
    *,
    accept_changes: bool = False,
    loaded: bool = False,
    original: JobDirectory | None = None,
) -> Checked:
    """Check everything of a run that does not need the base.

    `loaded`: the base is. `original`: of the one job, if it is derived again.

    Raises:
        ConfigError, RunError: every mistake, one per line; nothing was written.
    """
    refusals, now = Refusals(), moment()  # all jobs of a run that begin have one time
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
    run = Path(config.run)
    jobs = [Given(job, JobDirectory(run / job.name), original=original, now=now) for job in config.jobs]
    for job in jobs:
        with refusals.of(job.config.name):
            job.check(accept_changes=accept_changes)
    sources = Sources() if here else None
    check_files(jobs, sources, RewardPool(elsewhere=of_a_run(run)), refusals)
    refusals.check()
    return Checked(jobs, sources or Sources())


def check_files(
    jobs: Sequence[Given], sources: Sources | None, pool: RewardPool | None = None, refusals: Refusals | None = None
) -> None:
    """Check what jobs name: adapters, data, and with a `pool` a person's code, which separate processes load.

    Without `sources`, files are on other machines. `refusals` takes the mistakes, with the names of jobs.

    Raises:
        ConfigError: every mistake, one per line, where no `refusals` are given.
    """
    configs, told = [job.config for job in jobs], refusals or Refusals()
    made_by_others, names = chains(configs), [job.name for job in configs]
    code: dict[str, tuple[Load, list[str]]] = {}
    for given, job in zip(jobs, configs, strict=True):
        data, name = None, "" if refusals is None else job.name
        if sources is not None:
            with told.of(name):
                check_reference(job)
            with told.of(name):
                _check_start(job, made_by_others, names)
            with told.of(name):
                data = check_data(job, sources)
        if pool is not None and not given.ended:
            with told.of(name):
                for key, load in _own_code(job, data, pool).items():
                    code.setdefault(key, (load, []))[1].append(name)
    if pool is not None and sources is not None and code:
        Interrupt().run(lambda: _load_all(pool, list(code.values()), told))
    if refusals is None:
        told.check()


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


def check_data(job: JobConfig, sources: Sources) -> Dataset | None:
    """Read a job's data. Raises DataError or RewardError if it lacks what the job needs, and says what and where."""
    source = job.data.source
    if source == OF_CLIENT:
        return None
    data = sources.split(job.data)
    if isinstance(job.algorithm, RowAlgorithm):
        sources.check_rows(job.data, job.algorithm.kind)
    check_answers(job.rewards, data, str(source))
    return data


def check_reference(config: JobConfig) -> None:
    """Raise ConfigError if a reference is not there, or a teacher on a server has another temperature."""
    algorithm = config.algorithm
    name = algorithm.compared_with
    if algorithm.reference_server is not None:
        if config.sampling.temperature != 1.0:
            raise ConfigError("sampling.temperature: must be 1 with a teacher on a server, whose logprobs are at 1")
    elif name not in ("base", "start"):
        try:
            shape_of_reference(Path(os.path.expanduser(name)))
        except AdapterError as error:
            raise ConfigError(f"algorithm.{algorithm.compared_field}: {error}") from error


def check_on_base(config: JobConfig, info: ModelInfo, read: ReadData, step_tokens: int | None = None) -> Need:
    """Check the targets, lengths and sizes of a job; returns what it needs. Its steps may have `step_tokens`."""
    if read.longest is None:
        return Need(0, 0)
    longest, problem = read.longest
    turns, new = config.environment.turns, config.sampling.max_tokens
    if isinstance(config.algorithm, RowAlgorithm):
        _check_rows(config, read, info, longest, problem)
        need = Need(longest, 0, least=read.trained)
    else:
        _check_room(config, read, info, turns, longest, problem)
        need = Need(longest * turns, new * turns, _judge_tokens(config, read, info, problem), least=read.trained + 1)
    if step_tokens is not None:
        judged = need.judge_tokens * len(config.rewards)
        check_step(config, step_tokens, read.row or longest, info.max_positions, len(read.data.holdout), judged)
        check_decoded(config, read.data.train.sizes, read.data.holdout.sizes)
    return need


def _judge_tokens(config: JobConfig, read: ReadData, info: ModelInfo, problem: Problem) -> int:
    """Room that the base needs to judge, for the longest prompt.

    Raises:
        ConfigError: the base has no positions for a question about an empty answer.
    """
    chat, found = replace(Chat.plain(info.tokenizer), clock=read.chat.clock), [0]
    n = max(config.rl.group_size, config.eval.n)
    for reward in config.rewards:
        if reward.name == "judge":
            if (least := tokens_of(reward, chat, problem, n, 0)) > info.max_positions:
                raise ConfigError(
                    f"job {config.name}: reward judge: a question about row {problem.id + 1} and its answer have at least "
                    f"{least} tokens, and the base has positions for {info.max_positions}; shorten args.input, or lower "
                    "args.sampling_params.max_completion_tokens"
                )
            found.append(tokens_of(reward, chat, problem, n, config.sampling.max_tokens))
    return min(info.max_positions, max(found))


def _check_rows(config: JobConfig, read: ReadData, info: ModelInfo, longest: int, problem: Problem) -> None:
    """Refuse data whose longest row the base has no positions for."""
    if longest > info.max_positions:
        most = info.max_positions
        cure = "shorten its answer, or take the row out"  # data.max_prompt_tokens leaves out by prompts alone
        if read.chat.longer_than(problem, most - 1):
            cure = f"shorten it, or leave such rows out by data.max_prompt_tokens: {most - 1}"
        raise ConfigError(
            f"job {config.name}: {config.data.source} row {problem.id + 1} has {longest} tokens with its answer, more than "
            f"the {most} positions of {info.name}; {cure}"
        )


def _check_room(config: JobConfig, read: ReadData, info: ModelInfo, turns: int, longest: int, problem: Problem) -> None:
    """Refuse data whose longest prompt, of so many tokens, leaves no room for answers."""
    new = f"{turns} × {config.sampling.max_tokens} new ones"
    room = info.max_positions - turns * config.sampling.max_tokens
    where = f"job {config.name}: "
    if room < 1:
        raise ConfigError(
            f"{where}{new} leave no room in the {info.max_positions} positions of {info.name}; lower sampling.max_tokens"
        )
    if longest > room:
        data = config.data
        n = sum(read.chat.longer_than(one, room) for part in (read.data.train, read.data.holdout) for one in part)
        held_out = problem in read.data.holdout
        source = (held_out and data.eval_source) or data.source
        raise ConfigError(
            f"{where}{source} row {problem.id + 1} has a prompt of {longest} tokens, and {new}; this is more than the "
            f"{info.max_positions} positions of {info.name}. Lower sampling.max_tokens, shorten the {n} "
            f"prompt{'' if n == 1 else 's'} that have no room, or leave them out by data.max_prompt_tokens: {room}"
        )


def _own_code(job: JobConfig, data: Dataset | None, pool: RewardPool) -> Mapping[str, Load]:
    """A person's code that a separate process must load, by a key that identifies it among jobs.

    Raises:
        MotetError: it has a fault that shows without loading it.
    """
    code: dict[str, Load] = {}
    scorer = None if data is None else data.scorer
    columns = columns_of(data.train, data.holdout) if data is not None else None
    if check_rewards(job.rewards, columns) and not (
        data is None and any(reward.name == SCORER for reward in job.rewards)
    ):
        described = [reward.model_dump(mode="json") for reward in job.rewards]
        functions = [id(reward.function) for reward in job.rewards]
        load = functools.partial(_load_rewards, job, scorer, pool, columns)
        code[f"{json.dumps(described)} {functions} {scorer} {columns}"] = load
    if job.environment.own and not isinstance(job.algorithm, RowAlgorithm):
        aside = getattr(job.algorithm, "over_provision", 1.0) > 1
        code[f"{job.environment.model_dump_json()} {aside}"] = lambda: check_environment(job, _NOWHERE)
    return code


async def _load_rewards(
    job: JobConfig, scorer: ScorerSpec | None, pool: RewardPool, columns: Sequence[str] | None
) -> None:
    try:
        await pool.register(job.name, job.rewards, scorer, _NOWHERE, columns)
    finally:
        await pool.unregister(job.name)


async def _load_all(pool: RewardPool, code: Sequence[tuple[Load, list[str]]], refusals: Refusals) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def look(load: Load) -> MotetError | None:
        async with turns:
            try:
                await load()
            except MotetError as error:
                return error
        return None

    try:
        found = await asyncio.gather(*(look(load) for load, _ in code))
    finally:
        await pool.close()
    for error, (_, jobs) in zip(found, code, strict=True):
        if error is not None:
            for job in jobs:
                refusals.note(job, error)
