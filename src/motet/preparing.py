"""Jobs out of configurations: their data is read, what they left open is decided, and what their bytes depend on is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from motet import budgets
from motet.algorithms.client import ClientDriven
from motet.algorithms.rows import RowAlgorithm
from motet.algorithms.schedule import auto_learning_rate
from motet.config import DataConfig, JobConfig, RunConfig
from motet.config.chain import chains
from motet.errors import AdapterError, ConfigError, MotetError
from motet.model_info import ModelInfo
from motet.runtime.identity import of_config
from motet.runtime.job import Job
from motet.runtime.progress import JobProgress
from motet.runtime.reference import shape_of
from motet.runtime.rundir import RunDirectory
from motet.tasks.chat import Chat, stop_token_ids
from motet.tasks.dataset import Dataset, load_dataset
from motet.tasks.row_files import Bounds
from motet.tasks.rows import longest_row
from motet.types import Problem


@dataclass(frozen=True)
class _Read:
    """A job's data and how it is worded; jobs with the same data section share one."""

    data: Dataset
    chat: Chat
    longest: tuple[int, Problem]

    @classmethod
    def of(cls, config: DataConfig, info: ModelInfo, bounds: Bounds | None, kind: str | None) -> _Read:
        """`kind` says what rows are read for, where rows are learned."""
        chat = Chat.of(info.tokenizer, config)
        data = load_dataset(config, bounds, chat.longer_than)
        parts = [part for part in (data.train, data.holdout) if part]
        longest = [
            chat.longest(part) if kind is None else longest_row(part, kind, chat, config.source) for part in parts
        ]
        return cls(data, chat, max(longest, key=lambda pair: pair[0]))


def prepare(
    config: JobConfig,
    info: ModelInfo,
    directory: RunDirectory,
    bounds: Bounds | None = None,
    known: dict[str, _Read] | None = None,
) -> tuple[Job, budgets.Need]:
    """Load a job's data and resolve what it left open.

    Args:
        config: the job.
        info: of the loaded base.
        directory: of the run.
        bounds: of somebody else's data.
        known: data that was read for other jobs.

    Raises:
        MotetError: something in the job cannot work; nothing has been trained.
    """
    _check_reference(config)
    info.adapted(config.adapter.target_modules)  # a target that is not there is told now
    kind = config.algorithm.kind if isinstance(config.algorithm, RowAlgorithm) else None
    known, key = {} if known is None else known, f"{config.data.model_dump_json()} {id(config.data.rows)} {kind}"
    read = known[key] = known.get(key) or _Read.of(config.data, info, bounds, kind)
    rate = config.optimizer.lr
    job = Job(
        config=config,
        data=read.data,
        chat=read.chat,
        directory=directory.job(config.name),
        base_rate=config.optimizer.lr_multiplier
        * (auto_learning_rate(info.hidden_size, info.model_type) if isinstance(rate, str) else rate),
        stop_token_ids=stop_token_ids(info.tokenizer, info.eos_token_ids),
        progress=JobProgress(config.name, config.steps),
        inexact=[info.inexact] if info.inexact else [],
    )
    if kind is not None:
        _check_rows(job, info, *read.longest)
        return job, budgets.Need(read.longest[0], 0)
    turns, new = config.environment.turns, config.sampling.max_tokens
    _check_room(job, info, turns, *read.longest)
    return job, budgets.Need(read.longest[0] * turns, new * turns)


def _check_reference(config: JobConfig) -> None:
    """Refuse a reference or a teacher that is not there, and one on a server that has another temperature."""
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
        raise ConfigError(
            f"job {job.name}: {job.config.data.source} row {problem.id + 1} has {longest} tokens with its answer, more than "
            f"the {info.max_positions} positions of {info.name}; shorten such rows, or leave them out by data.max_prompt_tokens"
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
    configs: Sequence[JobConfig], info: ModelInfo, directory: RunDirectory
) -> list[tuple[Job, budgets.Need]]:
    """Prepare every job, so that all mistakes are told at once.

    Raises:
        ConfigError: one line per job that cannot work; nothing has been trained.
    """
    prepared, wrong = [], []
    known: dict[str, _Read] = {}
    for config in configs:
        try:
            if isinstance(config.algorithm, ClientDriven):
                raise ConfigError("algorithm.type client: clients reach a service alone; start `motet serve`")
            prepared.append(prepare(config, info, directory, known=known))
        except MotetError as error:
            wrong.append(f"job {config.name}: {str(error).removeprefix(f'job {config.name}: ')}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    jobs = {job.name: job for job, _ in prepared}
    for name, start in chains(configs).items():
        jobs[name].before, jobs[name].before_version = jobs[start.job], start.version
    return prepared


def identity(
    job: Job, info: ModelInfo, config: RunConfig, installed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Everything that the job's bytes depend on; goes to job.yaml. `installed` are the functions of an operator's rewards."""
    engine = config.engine
    return {
        "base": Path(info.name).name if Path(info.name).exists() else info.name,
        "rollout": config.rollout.engine,
        "dtype": info.dtype,
        "device": info.device,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
        "kernels": info.processor,
        "numerics": engine.numerics,
        "block_size": engine.block_size,
        "micro_batch_tokens": engine.micro_batch_tokens,
        "learning_rate": job.base_rate,
        "seed": job.seed,
        **of_config(job.config, installed),
    }
