"""Jobs out of configurations: their data is read, what they left open is decided, and what their bytes depend on is written."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from motet.algorithms.kto import Kto
from motet.algorithms.rows import RowAlgorithm
from motet.chat.clock import reads_clock
from motet.chat.conversation import rendered_already
from motet.chat.template import Chat, stop_token_ids
from motet.config import OF_CLIENT, DataConfig, HostConfig, JobConfig, budgets
from motet.config.chain import chains
from motet.config.optimizers import auto_learning_rate
from motet.config.step_tokens import check_decoded, check_step
from motet.config.told import told
from motet.core.errors import AdapterError, ConfigError, DataError, MotetError
from motet.core.model_info import ModelInfo
from motet.core.types import Problem
from motet.data.dataset import Dataset, Longer, Source, read_source, split
from motet.data.problems import Problems
from motet.data.read_back import read_back
from motet.data.row_files import RowLimits
from motet.data.rows import check_rows, is_liked, longest_row
from motet.data.sources import is_elsewhere
from motet.rewards.judge_http import tokens_of
from motet.runtime.beginning import RULES, rate_so_far
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.runtime.reference import shape_of
from motet.runtime.rundir import RunDirectory
from motet.runtime.statements import SHOWN

_RATE_FIELDS = {
    "optimizer": {"lr", "lr_multiplier"},
    "algorithm": {"group_size", "groups_per_step", "updates_per_batch"},
}
"""What the automatic learning rate depends on in a job."""
_MOST_RATINGS = 10_000
"""Rows whose labels are counted."""
_MOST_NOTES, _LONGEST_NOTE = 8, 500
"""On a job, and their letters."""


class Sources:
    """Data that was read, by its section: jobs with the same section share it, and its mistakes."""

    def __init__(self, bounds: RowLimits | None = None) -> None:
        """`bounds` are those of somebody else's data."""
        self._bounds = bounds
        self._read: dict[str, Source | DataError] = {}
        self._whole: dict[str, Dataset] = {}
        self._learned = set[str]()

    def split(self, config: DataConfig, longer: Longer | None = None) -> Dataset:
        """The data of a section; without `longer`, with long prompts too. Raises DataError if it cannot be used."""
        key = key_of(config)
        if longer is None and key in self._whole:
            return self._whole[key]
        data = split(config, self._source(config), longer)
        if longer is None:
            self._whole[key] = data
        return data

    def check_rows(self, config: DataConfig, kind: str) -> None:
        """Look at the rows of a section that are learned from; see `data.rows.check_rows`."""
        data, key = self.split(config), f"{kind} {key_of(config)}"
        if key not in self._learned:
            for part in (data.train, data.holdout):
                check_rows(part, kind, config.source)
            self._learned.add(key)

    def _source(self, config: DataConfig) -> Source:
        if (key := key_of(config)) not in self._read:
            try:
                self._read[key] = read_source(config, self._bounds)
            except DataError as error:
                self._read[key] = error
        if isinstance(known := self._read[key], DataError):
            raise known
        return known


def key_of(config: DataConfig) -> str:
    """The same for data sections that mean the same rows."""
    return f"{config.model_dump_json()} {id(config.rows)}"


@dataclass(frozen=True)
class ReadData:
    """A job's data and how it is worded; jobs with the same data section share one."""

    data: Dataset
    chat: Chat
    longest: tuple[int, Problem] | None
    """None where a client brings the data."""
    trained: int = 0
    """Tokens of the longest that is not held out."""
    row: int = 0
    """Most tokens of a row in all its examples; 0 where rows are prompts."""

    @classmethod
    def of(cls, config: DataConfig, info: ModelInfo, sources: Sources, clock: str, kind: str | None) -> ReadData:
        """`kind` says what rows are read for, where rows are learned."""
        chat = Chat.of(info.tokenizer, config, clock)
        if config.source == OF_CLIENT:
            return cls(Dataset(Problems.of(()), Problems.of(()), None), chat, None)
        data = sources.split(config, chat.longer_than)
        again = "" if kind is None else read_back(chat, data.train, kind)
        if notes := list(filter(None, (rendered_already(chat, data.train), again))):
            data = replace(data, notes=(*data.notes, *(f"{config.source}: {note}" for note in notes)))
        parts = [part for part in (data.train, data.holdout) if part]
        longest = [
            (*chat.longest(part), 0) if kind is None else longest_row(part, kind, chat, config.source, info.vocabulary)
            for part in parts
        ]
        length, problem, _ = max(longest, key=lambda one: one[0])
        row = max(row for _, _, row in longest)
        return cls(data, chat, (length, problem), longest[0][0] if data.train else 0, row)


def bytes_of_rows(jobs: Iterable[Job]) -> dict[str, int]:
    """By tenant: the bytes of its jobs' rows, in memory or in unlinked files; jobs of a sweep share them."""
    rows = {(job.tenant, id(job.keeps)): job.data.train.size for job in jobs}
    sizes = Counter[str]()
    for (tenant, _), size in rows.items():
        sizes[tenant] += size
    return dict(sizes)


def prepare(
    config: JobConfig,
    info: ModelInfo,
    directory: RunDirectory,
    sources: Sources,
    clock: str,
    known: MutableMapping[str, ReadData] | None = None,
    original: JobDirectory | None = None,
    step_tokens: int | None = None,
) -> tuple[Job, budgets.Need]:
    """Load a job's data and resolve what it left open; `original` is of the job, if it is derived again.

    The job keeps its `clock` (`clock_at`) if the chat template reads it. If it has not begun, its steps may have `step_tokens`.

    `known` is what was made of data for other jobs; a job keeps its part alive where these references are weak.

    Raises:
        MotetError: something in the job cannot work; nothing has been trained.
    """
    check_reference(config)
    info.adapted(config.adapter.target_modules)  # a target that is not there is told now
    kind = config.algorithm.kind if isinstance(config.algorithm, RowAlgorithm) else None
    if not (config.data.chat_template and reads_clock(info.tokenizer, config.data.chat_template_kwargs)):
        clock = ""
    known, key = {} if known is None else known, f"{key_of(config.data)} {clock} {kind}"
    read = known[key] = known.get(key) or ReadData.of(config.data, info, sources, clock, kind)
    own = directory.job(config.name)
    job = Job(
        config=config,
        data=read.data,
        chat=read.chat,
        directory=own,
        base_rate=_rate(config, info, original or own),
        stop_token_ids=stop_token_ids(info.tokenizer, info.eos_token_ids),
        progress=JobProgress.of(config),
        keeps=read,
    )
    if read.longest is None:
        return job, budgets.Need(0, 0)
    longest, problem = read.longest
    turns, new = config.environment.turns, config.sampling.max_tokens
    if kind is not None:
        _check_rows(job, info, longest, problem)
        need = budgets.Need(longest, 0, least=read.trained)
    else:
        _check_room(job, info, turns, longest, problem)
        need = budgets.Need(longest * turns, new * turns, _judge_tokens(job, info, problem), least=read.trained + 1)
    if step_tokens is not None and not own.steps():
        judged = need.judge_tokens * len(config.rewards)
        check_step(config, step_tokens, read.row or longest, info.max_positions, len(read.data.holdout), judged)
        check_decoded(config, read.data.train.sizes, read.data.holdout.sizes)
    return job, need


def _judge_tokens(job: Job, info: ModelInfo, problem: Problem) -> int:
    """Room that the base needs to judge, for the longest prompt.

    Raises:
        ConfigError: the base has no positions for a question about an empty answer.
    """
    config, chat, found = job.config, replace(Chat.plain(info.tokenizer), clock=job.chat.clock), [0]
    n = max(config.rl.group_size, config.eval.n)
    for reward in config.rewards:
        if reward.name == "judge":
            if (least := tokens_of(reward, chat, problem, n, 0)) > info.max_positions:
                raise ConfigError(
                    f"job {job.name}: reward judge: a question about row {problem.id + 1} and its answer have at least "
                    f"{least} tokens, and the base has positions for {info.max_positions}; shorten args.input, or lower "
                    "args.sampling_params.max_completion_tokens"
                )
            found.append(tokens_of(reward, chat, problem, n, config.sampling.max_tokens))
    return min(info.max_positions, max(found))


def _rate(config: JobConfig, info: ModelInfo, directory: JobDirectory) -> float:
    """A rate that was chosen automatically stays: a newer Motet may choose another one."""
    rate = config.optimizer.lr
    if rate == "auto":
        if (known := rate_so_far(directory, config.model_dump(mode="json", include=_RATE_FIELDS))) is not None:
            return known
        rate = auto_learning_rate(info.hidden_size, info.model_type, config.rollouts_per_update)
    return config.optimizer.lr_multiplier * rate


def check_reference(config: JobConfig) -> None:
    """Raise ConfigError if a reference is not there, or a teacher on a server has another temperature."""
    algorithm = config.algorithm
    name = algorithm.compared_with
    if algorithm.reference_server is not None:
        if config.sampling.temperature != 1.0:
            raise ConfigError("sampling.temperature: must be 1 with a teacher on a server, whose logprobs are at 1")
    elif name not in ("base", "start"):
        try:
            shape_of(Path(os.path.expanduser(name)))
        except AdapterError as error:
            raise ConfigError(f"algorithm.{algorithm.compared_field}: {error}") from error


def _check_rows(job: Job, info: ModelInfo, longest: int, problem: Problem) -> None:
    """Refuse data whose longest row the base has no positions for."""
    if longest > info.max_positions:
        most = info.max_positions
        cure = "shorten its answer, or take the row out"  # data.max_prompt_tokens leaves out by prompts alone
        if job.chat.longer_than(problem, most - 1):
            cure = f"shorten it, or leave such rows out by data.max_prompt_tokens: {most - 1}"
        raise ConfigError(
            f"job {job.name}: {job.config.data.source} row {problem.id + 1} has {longest} tokens with its answer, more than "
            f"the {most} positions of {info.name}; {cure}"
        )


def _check_room(job: Job, info: ModelInfo, turns: int, longest: int, problem: Problem) -> None:
    """Refuse data whose longest prompt, of so many tokens, leaves no room for answers."""
    config = job.config
    new = f"{turns} × {config.sampling.max_tokens} new ones"
    room = info.max_positions - turns * config.sampling.max_tokens
    where = f"job {config.name}: "
    if room < 1:
        raise ConfigError(
            f"{where}{new} leave no room in the {info.max_positions} positions of {info.name}; lower sampling.max_tokens"
        )
    if longest > room:
        data = config.data
        n = sum(job.chat.longer_than(one, room) for part in (job.data.train, job.data.holdout) for one in part)
        held_out = problem in job.data.holdout
        source = (held_out and data.eval_source) or data.source
        raise ConfigError(
            f"{where}{source} row {problem.id + 1} has a prompt of {longest} tokens, and {new}; this is more than the "
            f"{info.max_positions} positions of {info.name}. Lower sampling.max_tokens, shorten the {n} "
            f"prompt{'' if n == 1 else 's'} that have no room, or leave them out by data.max_prompt_tokens: {room}"
        )


def prepare_all(
    configs: Sequence[JobConfig],
    directory: RunDirectory,
    sources: Sources,
    clocks: Mapping[str, str],
    original: JobDirectory | None,
    info: ModelInfo,
) -> list[tuple[Job, budgets.Need]]:
    """Prepare every job from data that was read, so that all mistakes are told at once; arguments as in `prepare`.

    Raises:
        ConfigError: one line per job that cannot work; nothing has been trained.
    """
    prepared, wrong = [], []
    known: dict[str, ReadData] = {}
    for config in configs:
        try:
            prepared.append(prepare(config, info, directory, sources, clocks[config.name], known, original))
        except MotetError as error:
            wrong.append(f"job {config.name}: {str(error).removeprefix(f'job {config.name}: ')}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    jobs = {job.name: job for job, _ in prepared}
    for name, start in chains(configs).items():
        jobs[name].before, jobs[name].before_version = jobs[start.job], start.version
    _tell_shared(list(jobs.values()))
    return prepared


def _tell_shared(jobs: Sequence[Job]) -> None:
    """Note where a job holds out what another is trained on, as by another seed: a held-out figure may hold for one alone."""
    held = {job.name: [hash(problem.messages) for problem in job.data.holdout] for job in jobs}
    every, names = set(itertools.chain(*held.values())), dict[int, str]()
    for name, data in {id(job.data): (job.name, job.data) for job in jobs}.values():
        names = dict.fromkeys(data.train.prompts_in(every), name) | names
    for job in jobs:
        for other, n in Counter(names[prompt] for prompt in held[job.name] if prompt in names).most_common(1):
            note = (
                f"{n} of {len(held[job.name])} held-out rows have prompts that job {other} is trained on, so they say nothing "
                "of an adapter that has learned there: give both the same data.seed and data.holdout, or an eval_source"
            )
            job.data = replace(job.data, notes=(*job.data.notes, note))


def first_notes(job: Job) -> tuple[str, ...]:
    """What is said on a job when it begins, within bounds."""
    return tuple(note[:_LONGEST_NOTE] for note in itertools.islice(_notes_about(job), _MOST_NOTES))


def _notes_about(job: Job) -> Iterator[str]:
    """What is known of a job's rows, and what its settings do that does not show."""
    rows, ratings = job.data.train, Counter[bool]()
    if isinstance(job.config.algorithm, Kto):
        ratings.update(is_liked(rows[row], "") for row in range(min(len(rows), _MOST_RATINGS)))
    yield from (*job.data.notes, *told(job.config, len(rows), ratings))


def notes_of(jobs: Sequence[Job]) -> list[str]:
    """Which rows were left out, and what settings do that does not show; what is so for several jobs is said once."""
    jobs_by_note: dict[str, list[str]] = {}
    for job in jobs:
        for note in _notes_about(job):
            jobs_by_note.setdefault(note, []).append(job.name)
    return [
        f"{f'job {names[0]}' if len(names) == 1 else f'{len(names)} jobs'}: {note}"
        for note, names in jobs_by_note.items()
    ]


def identity(job: Job, info: ModelInfo, config: HostConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the job's bytes depend on; goes to job.yaml. `known` is what `of_config` says of the job."""
    engine = config.engine
    return {
        "base": Path(info.name).name if Path(info.name).exists() else info.name,
        "rollout": config.rollout.engine,
        "dtype": info.dtype,
        "device": info.device,
        "versions": _versions(),
        "kernels": info.processor,
        "numerics": "exact",  # earlier releases also had `fast`
        "block_size": engine.block_size,
        "micro_batch_tokens": engine.micro_batch_tokens,
        "learning_rate": job.base_rate,
        "seed": job.seed,
        "rules": RULES,
        **({"clock": job.chat.clock} if job.chat.clock else {}),
        **known,
        **({"rows": rows} if (rows := _rows_elsewhere(job)) else {}),
    }


def _rows_elsewhere(job: Job) -> dict[str, str]:
    """The first digits of the sum of rows that no file here has, by their source."""
    data, parts = job.config.data, {"train": job.data.train, "holdout": job.data.holdout}
    sources = {"train": data.source, "holdout": data.eval_source or data.source}
    if data.rows is not None or data.source == OF_CLIENT:
        return {}
    return {
        f"{sources[name]} ({name})": part.sum()[:SHOWN] for name, part in parts.items() if is_elsewhere(sources[name])
    }


@functools.cache
def _versions() -> dict[str, str]:
    """Of the libraries that bytes depend on."""
    return {name: metadata.version(name) for name in ("torch", "transformers")}
