"""Jobs out of configurations: their data is read, what they left open is decided, and what their bytes depend on is written."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from motet.algorithms.kto import Kto
from motet.algorithms.rows import RowAlgorithm
from motet.chat.clock import reads_clock
from motet.chat.template import stop_token_ids
from motet.config import OF_CLIENT, HostConfig, budgets
from motet.config.chain import chains
from motet.config.optimizers import auto_learning_rate
from motet.config.told import told
from motet.core.model_info import ModelInfo
from motet.data.rows import is_liked
from motet.data.shared import ReadData, Sources, key_of
from motet.data.sources import is_elsewhere
from motet.hosts.checks import Checked, Refusals, check_on_base
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import RULES, Given
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.runtime.rundir import RunDirectory
from motet.runtime.statements import SHOWN

_MOST_RATINGS = 10_000
"""Rows whose labels are counted."""
_MOST_NOTES, _LONGEST_NOTE = 8, 500
"""On a job, and their letters."""


def bytes_of_rows(jobs: Iterable[Job]) -> dict[str, int]:
    """By tenant: the bytes of its jobs' rows, in memory or in unlinked files; jobs of a sweep share them."""
    rows = {(job.tenant, id(job.keeps)): job.data.train.size for job in jobs}
    sizes = Counter[str]()
    for (tenant, _), size in rows.items():
        sizes[tenant] += size
    return dict(sizes)


def prepare(
    given: Given,
    info: ModelInfo,
    sources: Sources,
    known: MutableMapping[str, ReadData] | None = None,
    *,
    place: JobDirectory | None = None,
    step_tokens: int | None = None,
) -> tuple[Job, budgets.Need]:
    """Read a job's data for a base, and resolve what it left open.

    The job keeps its clock if the chat template reads it. If it has not begun, its steps may have `step_tokens`.

    `known` is what was made of data for other jobs; a job keeps its part alive where these references are weak. `place` is
    where the job is, by default its own directory.

    Raises:
        MotetError: something in the job cannot work; nothing has been trained.
    """
    config, data = given.config, given.config.data
    info.adapted(config.adapter.target_modules)  # a target that is not there is told now
    kind = config.algorithm.kind if isinstance(config.algorithm, RowAlgorithm) else None
    dated = data.chat_template and reads_clock(info.tokenizer, data.chat_template_kwargs)
    clock = given.clock if dated else ""
    known, key = {} if known is None else known, f"{key_of(data)} {clock} {kind}"
    read = known[key] = known.get(key) or ReadData.of(data, info, sources, clock, kind)
    need = check_on_base(config, info, read, None if given.steps else step_tokens)
    job = Job(
        config=config,
        data=read.data,
        chat=read.chat,
        directory=place or given.directory,
        base_rate=_rate(given, info),
        stop_token_ids=stop_token_ids(info.tokenizer, info.eos_token_ids),
        progress=JobProgress.of(config),
        keeps=read,
    )
    return job, need


def _rate(given: Given, info: ModelInfo) -> float:
    """A rate that was chosen automatically stays: a newer Motet may choose another one."""
    config, rate = given.config, given.config.optimizer.lr
    if rate == "auto":
        if (known := given.rate) is not None:
            return known
        rate = auto_learning_rate(info.hidden_size, info.model_type, config.rollouts_per_update)
    return config.optimizer.lr_multiplier * rate


def prepare_all(checked: Checked, scratch: RunDirectory | None, info: ModelInfo) -> list[tuple[Job, budgets.Need]]:
    """Prepare every job of a run, so that all mistakes are told at once; with a `scratch` directory, it stays as it is.

    Raises:
        ConfigError: one line per job that cannot work; nothing has been trained.
    """
    prepared, refusals = list[tuple[Job, budgets.Need]](), Refusals()
    known: dict[str, ReadData] = {}
    for given in checked.jobs:
        with refusals.of(given.config.name):
            place = scratch.job(given.config.name) if scratch else None
            prepared.append(prepare(given, info, checked.sources, known, place=place))
    refusals.check()
    jobs = {job.name: job for job, _ in prepared}
    for name, start in chains([job.config for job in jobs.values()]).items():
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
