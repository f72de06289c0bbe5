"""Reads problems, holds some out, and assigns problems to steps.

A Problem's id is its row's index in the source, so logs and random numbers name the same row in every run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from motet.config import DataConfig
from motet.config.data import HELD_OUT
from motet.core import seeds
from motet.core.errors import DataError
from motet.core.nested import names_of, text_of, value_at
from motet.core.types import Problem
from motet.data.pools import Pools, order_of, passes
from motet.data.problems import Problems
from motet.data.reasoning import ScorerSpec, unfit
from motet.data.row_files import RowLimits
from motet.data.row_problems import Reading, parts_of
from motet.data.sources import check_part, has_splits, read_rows

_MANY = 0.2
"""Share of rows that are left out for their prompts, from which on a person is told what to do."""


@dataclass(frozen=True)
class Dataset:
    """A job's data after the held-out split."""

    train: Problems
    holdout: Problems
    """For evaluation; no prompt of it is in `train`. Decoded on access, as `train` is."""
    scorer: ScorerSpec | None
    """The data's own scorer, for the reward `scorer`."""
    notes: tuple[str, ...] = ()
    """Which rows were left out, and why."""
    shuffle: bool = True
    """Whether each pass is a new permutation of the rows."""
    pools: Pools | None = None
    columns: str = ""
    """Which columns were taken, for a person."""

    def window(self, first: int, n: int, seed: int, per_step: int) -> list[Problem]:
        """The problems at positions first … first + n − 1 in the endless sequence of passes, `per_step` of them in a step.

        A pure function: the problems of a step never depend on rollouts or timing.
        """
        size = len(self.train)
        if not size or n < 1 or first < 0:
            raise ValueError(f"no window of {n} positions at {first} over {size} problems")
        if self.pools is not None:
            places = self.pools.window(first, first + n, seed, per_step, self.shuffle)
        else:
            places = passes(size, first, first + n, order_of(size, seed, "shuffle", self.shuffle))
        return [self.train[int(place)] for place in places]

    @cached_property
    def evaluation_seed(self) -> int:
        """Derived from the held-out problems only, so jobs that share them use the same random numbers."""
        digest = hashlib.blake2b(b"[", digest_size=8)  # of the facts as one list of JSON
        for place, problem in enumerate(self.holdout):
            facts = [problem.id, problem.answer, *([message.role, message.content] for message in problem.messages)]
            digest.update(f"{', ' if place else ''}{json.dumps(facts)}".encode())
        digest.update(b"]")
        return int.from_bytes(digest.digest(), "little")


Longer = Callable[[Problem, int], bool]
"""Whether a problem's prompt has more than this many tokens."""


@dataclass(frozen=True)
class Source:
    """A job's problems before the held-out split."""

    problems: Problems
    evaluation: Problems | None
    """Problems of `data.eval_source`; None if problems are held out instead."""
    scorer: ScorerSpec | None
    columns: str = ""
    """Which columns were taken, for a person."""
    notes: tuple[str, ...] = ()
    """What a person should know of the columns."""


def load_dataset(config: DataConfig, bounds: RowLimits | None = None, longer: Longer | None = None) -> Dataset:
    """Read, check and split a job's data; see `read_source` and `split`."""
    return split(config, read_source(config, bounds), longer)


def read_source(config: DataConfig, bounds: RowLimits | None = None) -> Source:
    """Read all rows of a job's data as problems, within `bounds` if they are not the user's own; needs no tokenizer.

    Raises:
        DataError: the source cannot be read, or a row is invalid; the message says where and what to do.
    """
    check_part(config)
    source = _read(config, bounds)
    if config.eval_source is None:
        return source
    other, scorer = _evaluation(config, bounds), source.scorer
    apart = f"; {config.eval_source}: {other.columns}" if other.columns != source.columns else ""
    return Source(
        source.problems,
        other.problems,
        replace(scorer, evaluation=other.scorer) if scorer else other.scorer,
        source.columns + apart,
        (*source.notes, *(f"{config.eval_source}: {note}" for note in other.notes)),
    )


def _read(config: DataConfig, bounds: RowLimits | None, first: int | None = None) -> Source:
    """The problems of `config.source`; it is read again if only its last row shows that a column holds whole numbers."""
    rows, scorer, note = read_rows(config, bounds, first)
    reading = Reading(config)
    problems = Problems.of(reading.problems(rows, bounds))
    if whole := reading.whole:
        reading = Reading(config, whole)
        problems = Problems.of(reading.problems(read_rows(config, bounds, first)[0], bounds))
    columns = "" if reading.columns is None else reading.columns.text(config)
    return Source(problems, None, scorer, columns, tuple(filter(None, (note, *reading.notes(), *unfit(scorer)))))


def split(config: DataConfig, source: Source, longer: Longer | None = None) -> Dataset:
    """Remove long prompts and hold problems out. The split depends on `config.seed` only, so jobs of a sweep share it.

    Without `longer`, no prompt is too long. Raises DataError if too few rows remain.
    """
    problems, left_out_notes = _short(config, config.source, source.problems, longer)
    notes = [*source.notes, *left_out_notes]
    if source.evaluation is not None:
        holdout = _short(config, str(config.eval_source), source.evaluation, longer)[0]
    else:
        order = seeds.permutation(seeds.key(config.seed, "holdout"), len(problems))
        holdout = problems.only(sorted(order[: config.held_out_of(len(problems))]))
    # a prompt that occurs twice must not be both trained on and evaluated
    train = problems.without(holdout)
    if not train:
        raise DataError(_nothing_left(config, problems))
    left_out = len(problems) - len(train) - (0 if config.eval_source else len(holdout))
    if left_out:
        notes.append(_shared(config, problems, holdout, left_out))
    if config.order is not None:
        train = train.only(_ordered(config.order, train, config.source))
    pools = None
    if config.pools is not None:
        pools, used, note = Pools.of(config.pools, train, config.source)
        train = train.only(used)
        notes.append(note)
    return Dataset(train, holdout, source.scorer, tuple(notes), config.shuffle, pools, source.columns)


def _shared(config: DataConfig, problems: Problems, holdout: Sequence[Problem], left_out: int) -> str:
    """The note about rows that are not trained on because their prompts are held out, with the cure where they are many."""
    note = f"{left_out} of {len(problems)} rows are left out of training, because their prompts are held out"
    if config.eval_source or left_out < _MANY * len(problems):
        return note
    fewer = max(int(_MANY * len(problems) * len(holdout) / (left_out + len(holdout))), 1)
    return (
        f"{note}. Many rows share a prompt, and {len(holdout)} rows are held out: set data.holdout to {fewer} to train on "
        f"about {1 - _MANY:.0%} of the rows, or name rows with other prompts in data.eval_source"
    )


def _ordered(column: str, problems: Sequence[Problem], source: str) -> list[int]:
    """The places of problems by a column, smallest first; equal ones stay as they are in the source."""
    values: list[Any] = [value_at(problem.metadata, column) for problem in problems]
    kind = str if isinstance(values[0], str) else int | float
    fits = [isinstance(value, kind) and (isinstance(value, str) or math.isfinite(value)) for value in values]
    if all(fits):
        return sorted(range(len(values)), key=lambda place: values[place])
    bad = fits.index(False)
    said = repr(text_of(values[bad])[:80]) if text_of(values[bad]) else "nothing"
    raise DataError(
        f"data.order {column!r}: {source} row {problems[bad].id + 1} has {said} there; every row "
        f"needs a number, or every row a text. Its columns: {', '.join(names_of(problems[bad].metadata)) or 'none'}"
    )


def _short(config: DataConfig, source: str, problems: Problems, longer: Longer | None) -> tuple[Problems, list[str]]:
    """The problems with short enough prompts, and a note about the others."""
    most = config.max_prompt_tokens
    if most is None or longer is None:
        return problems, []
    tokens = f"more than {most} token{'' if most == 1 else 's'}"
    short = problems.only(row for row, problem in enumerate(problems) if not longer(problem, most))
    if not short:
        raise DataError(
            f"data.source {source!r}: each of its {len(problems)} rows has a prompt of {tokens}; raise "
            "data.max_prompt_tokens"
        )
    left_out = len(problems) - len(short)
    note = (
        f"{left_out} of {len(problems)} rows are left out, because their prompts have {tokens} (data.max_prompt_tokens)"
    )
    return short, [note] if left_out else []


def _nothing_left(config: DataConfig, problems: Sequence[Problem]) -> str:
    """Why no problems are left to train on, and what to do."""
    n, different = len(problems), len({problem.messages for problem in problems})
    rows = f"data.source {config.source!r} has {n} row{'' if n == 1 else 's'}"
    held_out = config.held_out_of(n)
    if config.eval_source is not None:
        return f"{rows}, and data.eval_source has all of their prompts: name another, or leave it out"
    if different == n:
        advice = f"add rows, or set data.holdout to {min(HELD_OUT, n // 4)}"
        return f"{rows}, and data.holdout {held_out} leaves none to train on: {advice}"
    if different == 1:
        same = f"{rows} with the same prompt, which is held out: "
        if config.template is not None and not any(column for _, column in parts_of(config.template)):
            return f"{same}data.template names no column; write {{column}} where the text of a column goes"
        return f"{same}set data.holdout to 0, or name an eval_source"
    return (
        f"{rows} with {different} different prompts, and data.holdout {held_out} holds all of them out: set data.holdout "
        f"to {max(1, different // 10)} or so"
    )


def _evaluation(config: DataConfig, bounds: RowLimits | None) -> Source:
    if config.holdout == 0:
        raise DataError("data.eval_source is set but data.holdout is 0: set it to how many of its rows to use")
    if config.eval_split is not None and not has_splits(str(config.eval_source)):
        raise DataError(
            f"data.eval_split: {config.eval_source} has no splits; leave it out, or give another eval_source"
        )
    # reasoning-gym seeds row i with seed + i: a far-away seed keeps evaluation rows from being training rows.
    far = seeds.key(config.seed, "eval_source") % (1 << 31)
    size, named = config.held_out_of(None), config.eval_split or config.split
    changes = {"source": config.eval_source, "split": named, "size": size, "seed": far, "rows": None}
    other = config.model_copy(update=changes)
    try:
        return _read(other, bounds, far)
    except DataError as error:
        raise DataError(str(error).replace("data.source", "data.eval_source", 1)) from error
