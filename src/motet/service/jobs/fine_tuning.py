"""Fine-tuning requests of the `openai` package, converted to Motet jobs, and their stored form.

The jobs are ordinary jobs of the tenant: `motet ls` shows them, and all job routes accept them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from motet.config import DataConfig
from motet.config.jobfile import merge
from motet.core.errors import ConfigError, DataError, GraderError
from motet.core.types import Problem
from motet.data.dataset import load_dataset
from motet.data.problems import Problems
from motet.data.row_files import OF_A_JOB
from motet.data.rows import answer_of, pair_of
from motet.rewards.graders.shapes import Grader, columns, judges, parse
from motet.service.adapters.adapters import Adapters, NoModelError
from motet.service.database.store import IN_PARTS, Store, first_of, size_of
from motet.service.database.tables import Event, FineTuning, StoredFile, StoredJob, now
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal, bad_field
from motet.service.schemas.fine_tuning import (
    Dpo,
    DpoHyperparameters,
    FineTuningRequest,
    Hyperparameters,
    Method,
    Reinforcement,
    ReinforcementHyperparameters,
    Supervised,
)
from motet.service.storage import Storage

_OWN = ("name", "base", "data", "reward", "rewards", "seed", "steps")
_GROUP, _BATCH = 8, 16
"""Values of `auto`."""
_ALGORITHMS: Mapping[type, str] = {Supervised: "sft", Dpo: "dpo"}
_CHUNK = 200
_RETRY_SECONDS = 900.0

RowCheck = Callable[[Problem, str], object]
"""Raises `DataError`, with the given row name, for a row that cannot be learned from."""


class FineTunings:
    """Jobs created through the fine-tuning routes."""

    def __init__(self, store: Store, storage: Storage, adapters: Adapters) -> None:
        self._store, self._storage, self._adapters = store, storage, adapters

    def job_of(self, who: Principal, asked: FineTuningRequest) -> dict[str, Any]:
        """The job for a request, as in a job file. Raises `Refusal` with the field that is wrong or not supported."""
        method = _method(asked)
        check: RowCheck = answer_of if isinstance(method, Supervised) else pair_of
        reward: dict[str, Any] = {}
        if isinstance(method, Reinforcement):
            grader = self.checked_grader(who, method.grader, "method.reinforcement.grader")
            check = _has_columns(grader)
            reward = {"reward": {"name": "judge" if judges(grader) else "grader", "args": method.grader}}
        training, problems = self._rows(who, asked.training_file, "training_file", check)
        held_out: dict[str, Any] = {"holdout": 0}
        if asked.validation_file is not None:
            validation, others = self._rows(who, asked.validation_file, "validation_file", check)
            held_out = {"holdout": validation.rows, "eval_source": validation.id}
            problems = problems.without(others)
        if not problems:
            raise bad_field("validation_file", "it contains all rows of training_file, so none is left to train on")
        tree: dict[str, Any] = {
            "name": f"{asked.suffix or 'ft'}-{secrets.token_hex(4)}",
            "data": {
                "source": training.id,
                **({} if check is pair_of else {"prompt": "messages"}),
                **held_out,
            },
            **reward,
            **self._start(who, asked.model),
            **({} if asked.seed is None else {"seed": asked.seed}),
        }
        return _with_own(merge(tree, _hyperparameters(method, len(problems))), asked.motet or {})

    def checked_grader(self, who: Principal, spec: Mapping[str, Any], where: str = "grader") -> Grader:
        """A grader that can run here. Raises `Refusal` with the field that is wrong or not available."""
        try:
            grader = parse(spec, where)
            for judge in judges(grader):
                self._adapters.of_model(who, judge.model)
        except GraderError as error:
            raise Refusal(400, str(error), error.where) from error
        except NoModelError as error:
            raise bad_field(f"{where}.model", error) from error
        return grader

    def _rows(self, who: Principal, file_id: str, field: str, check: RowCheck) -> tuple[StoredFile, Problems]:
        """An uploaded file for a job, and its rows, each of which can be used."""
        file = self._store.file(who, file_id)
        if file is None:
            raise bad_field(field, f"there is no file {file_id!r}; upload it first")
        path = self._storage.upload(file.id, file.filename)
        prompt = None if check is pair_of else "messages"
        try:
            problems = load_dataset(DataConfig(source=str(path), prompt=prompt, holdout=0), OF_A_JOB).train
            for problem in problems:
                check(problem, f"{file.filename} row {problem.id + 1}")
        except DataError as error:
            raise bad_field(field, str(error).replace(str(path), file.filename)) from error
        return file, problems

    def _start(self, who: Principal, model: str) -> dict[str, Any]:
        """The adapter's shape and base: those of a version to continue from, or the default shape over a base."""
        bases = self._adapters.bases
        if (base := bases.find(model)) is not None:
            return {"adapter": {}, "base": base}
        named = self._adapters.named(who, model)
        if named is None or self._adapters.resolve(named) is None:
            of_these = f"the base, {bases.first!r}"
            if bases.several:
                of_these = f"a base ({', '.join(bases.names)})"
            raise bad_field(
                "model", f"{model!r} cannot be trained here: name {of_these}, or a version of an adapter, as job@best"
            )
        if isinstance(named.thing, StoredJob):
            shape: Mapping[str, Any] = named.thing.spec["adapter"]
        else:
            shape = {name: getattr(named.thing, name) for name in ("rank", "alpha", "target_modules")}
        adapter = {**{name: shape[name] for name in ("rank", "alpha", "target_modules")}, "init": model}
        return {"adapter": adapter, "base": bases.of(named.thing.base)}

    def keep(self, job_id: str, request: Mapping[str, Any]) -> None:
        """Store the request of a job, unless it is stored already."""
        try:
            with self._store.transaction() as session:
                session.add(FineTuning(job_id=job_id, request=dict(request)))
        except IntegrityError:  # the same request again
            return

    def just_made(self, who: Principal, request: Mapping[str, Any]) -> tuple[StoredJob, FineTuning] | None:
        """The tenant's job of the same request within the last minutes."""
        own, since = StoredJob.tenant_id == who.tenant_id, now() - _RETRY_SECONDS
        query = select(StoredJob, FineTuning).join(FineTuning).where(own, StoredJob.created > since)
        query = query.order_by(StoredJob.number.desc()).limit(_CHUNK)
        with self._store.transaction() as session, session.execute(query, execution_options=IN_PARTS) as newest:
            return next(((job, made) for job, made in newest if made.request == request), None)

    def find(self, who: Principal, job_id: str) -> tuple[StoredJob, FineTuning] | None:
        """A fine-tuning job of the requester."""
        job = self._store.job(who, job_id)
        if job is None:
            return None
        with self._store.transaction() as session:
            made = session.get(FineTuning, job.id)
        return None if made is None else (job, made)

    def page(
        self, who: Principal, after: str | None, limit: int, metadata: Mapping[str, str] | None
    ) -> tuple[list[tuple[StoredJob, FineTuning]], bool]:
        """Fine-tuning jobs with these values in their `metadata`, newest first, after the job with an id.

        There are fewer than `limit` if they are large; also returns whether others follow.
        """
        query = select(StoredJob, FineTuning, size_of(StoredJob.spec, FineTuning.request))
        query = query.join(FineTuning, FineTuning.job_id == StoredJob.id)
        query = query.order_by(StoredJob.number.desc())
        if not who.admin:
            query = query.where(StoredJob.tenant_id == who.tenant_id)
        last = None if after is None else self._store.job(who, after)
        if after is not None and last is None:
            raise bad_field("after", f"there is no job {after!r}")
        query = query if last is None else query.where(StoredJob.number < last.number)
        wanted = (metadata or {}).items()
        with self._store.transaction() as session, session.execute(query, execution_options=IN_PARTS) as every:
            rows, more = first_of(
                (row for row in every if wanted <= (row[1].request.get("metadata") or {}).items()), limit
            )
        return [(job, made) for job, made in rows], more

    def steps(self, job_id: str, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl of these steps of a job."""
        query = select(Event.data).where(Event.job_id == job_id, Event.kind == "step", Event.key.in_(map(str, numbers)))
        return self._store.scalars(query)

    def events(self, job_id: str, before: int | None, limit: int) -> list[Event]:
        """Events of a job before a given one, newest first."""
        query = select(Event).where(Event.job_id == job_id).order_by(Event.id.desc()).limit(limit)
        return self._store.scalars(query if before is None else query.where(Event.id < before))


def _has_columns(grader: Grader) -> RowCheck:
    read = columns(grader)

    def check(problem: Problem, where: str) -> None:
        if missing := read - {*problem.metadata, "messages"}:
            there = ", ".join(problem.metadata) or "none besides messages"
            raise DataError(f"{where} has no column {min(missing)!r}, which the grader reads; its columns: {there}")

    return check


def _method(asked: FineTuningRequest) -> Reinforcement | Supervised | Dpo:
    if asked.hyperparameters is not None:
        raise bad_field(
            "hyperparameters",
            "give them in method, as method.supervised.hyperparameters, the form that has taken their place",
        )
    method = asked.method or Method(type="supervised")
    for other in {"reinforcement", "supervised", "dpo"} - {method.type}:
        if getattr(method, other) is not None:
            raise bad_field(f"method.{other}", f"the type is {method.type!r}; leave one of the two out")
    match method.type:
        case "supervised":
            return method.supervised or Supervised()
        case "dpo":
            return method.dpo or Dpo()
    if method.reinforcement is None:
        example = '{"type": "reinforcement", "reinforcement": {"grader": …}}'
        raise bad_field("method.reinforcement", f"it is missing; give {example}")
    return method.reinforcement


def _hyperparameters(method: Reinforcement | Supervised | Dpo, rows: int) -> dict[str, Any]:
    given = method.hyperparameters or Hyperparameters()
    algorithm: dict[str, Any] = {"type": _ALGORITHMS.get(type(method)), "rows_per_step": given.batch_size}
    fields: dict[str, Any] = {
        "steps": given.n_epochs and math.ceil(given.n_epochs * rows / (given.batch_size or _BATCH)),
        "optimizer": {"lr_multiplier": given.learning_rate_multiplier},
    }
    match given:
        case DpoHyperparameters():
            algorithm["beta"] = given.beta
        case ReinforcementHyperparameters():
            group_size = given.compute_multiplier and max(2, round(_GROUP * given.compute_multiplier))
            algorithm = {"groups_per_step": given.batch_size, "group_size": group_size}
            fields["eval"] = {"every": given.eval_interval, "n": given.eval_samples}
    return dict(_set({**fields, "algorithm": algorithm}))


def _set(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a tree that are not None, without empty sections."""
    for name, value in tree.items():
        kept = dict(_set(value)) if isinstance(value, Mapping) else value
        if kept is not None and kept != {}:
            yield name, kept


def _with_own(tree: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    for name in own:
        if name in _OWN and not (name == "data" and isinstance(own[name], Mapping) and "source" not in own[name]):
            raise bad_field(f"motet.{name}", "this comes from the other fields of the request")
    try:
        return merge(tree, own)
    except (ConfigError, TypeError, AttributeError) as error:
        raise bad_field("motet", error) from error
