"""Makes problems of rows: finds prompt and answer columns, holds rows out, and assigns problems to steps.

A Problem's id is its row's index in the source, so logs and random numbers name the same row in every run.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from motet.config import DataConfig
from motet.config.data import HELD_OUT
from motet.core import seeds
from motet.core.errors import DataError
from motet.core.rules import TODAY, Rules
from motet.core.types import Message, Problem
from motet.tasks.messages import check_characters, messages_of, plain_preference, without_prompt
from motet.tasks.pools import Pools, order_of, passes
from motet.tasks.problems import Problems
from motet.tasks.reasoning import ScorerSpec
from motet.tasks.row_files import Row, RowLimits
from motet.tasks.sources import check_part, has_splits, read_rows

PROMPT_COLUMNS = ("prompt", "question", "messages", "problem", "input")
ANSWER_COLUMNS = ("answer", "solution", "target", "label", "output")
_MANY = 0.2
"""Share of rows that are left out for their prompts, from which on a person is told what to do."""


@dataclass(frozen=True)
class Dataset:
    """A job's data after the held-out split."""

    train: Problems
    holdout: tuple[Problem, ...]
    """For evaluation; no prompt of it is in `train`."""
    scorer: ScorerSpec | None
    """The data's own scorer, for the reward `scorer`."""
    notes: tuple[str, ...] = ()
    """Which rows were left out, and why."""
    shuffle: bool = True
    """Whether each pass is a new permutation of the rows."""
    pools: Pools | None = None

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
        facts = [
            [problem.id, problem.answer, *([message.role, message.content] for message in problem.messages)]
            for problem in self.holdout
        ]
        return int.from_bytes(hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).digest(), "little")


Longer = Callable[[Problem, int], bool]
"""Whether a problem's prompt has more than this many tokens."""


@dataclass(frozen=True)
class Source:
    """A job's problems before the held-out split."""

    problems: Problems
    evaluation: Problems | None
    """Problems of `data.eval_source`; None if problems are held out instead."""
    scorer: ScorerSpec | None


def load_dataset(
    config: DataConfig, bounds: RowLimits | None = None, longer: Longer | None = None, rules: Rules = TODAY
) -> Dataset:
    """Read, check and split a job's data; see `read_source` and `split`."""
    return split(config, read_source(config, bounds, rules), longer)


def read_source(config: DataConfig, bounds: RowLimits | None = None, rules: Rules = TODAY) -> Source:
    """Read all rows of a job's data as problems, within `bounds` if they are not the user's own; needs no tokenizer.

    Rows are read by the job's `rules`.

    Raises:
        DataError: the source cannot be read, or a row is invalid; the message says where and what to do.
    """
    check_part(config)
    rows, scorer = read_rows(config, bounds)
    problems = Problems.of(_problems(config, rows, bounds))
    if config.eval_source is None:
        return Source(problems, None, scorer)
    evaluation, eval_scorer = _evaluation(config, bounds)
    return Source(problems, evaluation, replace(scorer, evaluation=eval_scorer) if scorer else eval_scorer)


def split(config: DataConfig, source: Source, longer: Longer | None = None) -> Dataset:
    """Remove long prompts and hold problems out. The split depends on `config.seed` only, so jobs of a sweep share it.

    Without `longer`, no prompt is too long. Raises DataError if too few rows remain.
    """
    problems, notes = _short(config, config.source, source.problems, longer)
    if source.evaluation is not None:
        holdout = tuple(_short(config, str(config.eval_source), source.evaluation, longer)[0])
    else:
        order = seeds.permutation(seeds.key(config.seed, "holdout"), len(problems))
        holdout = tuple(problems[i] for i in sorted(order[: config.held_out_of(len(problems))]))
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
    return Dataset(train, holdout, source.scorer, tuple(notes), config.shuffle, pools)


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
    values: list[Any] = [problem.metadata.get(column) for problem in problems]
    kind = str if isinstance(values[0], str) else int | float
    fits = [isinstance(value, kind) and (isinstance(value, str) or math.isfinite(value)) for value in values]
    if all(fits):
        return sorted(range(len(values)), key=lambda place: values[place])
    bad = fits.index(False)
    raise DataError(
        f"data.order {column!r}: {source} row {problems[bad].id + 1} has {str(values[bad])[:80]!r} there; every row needs a "
        f"number, or every row a text. {_columns(problems[bad].metadata)}"
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


def _evaluation(config: DataConfig, bounds: RowLimits | None) -> tuple[Problems, ScorerSpec | None]:
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
        rows, scorer = read_rows(other, bounds)
        return Problems.of(_problems(other, rows, bounds)), scorer
    except DataError as error:
        raise DataError(str(error).replace("data.source", "data.eval_source", 1)) from error


def _problems(config: DataConfig, rows: Iterable[Row], bounds: RowLimits | None) -> Iterator[Problem]:
    size = 0
    for index, row in enumerate(rows):
        problem = _problem(config, row, index)
        if bounds is not None and config.template is not None:
            size += sum(len(message.content) for message in problem.messages)
            if size > bounds.bytes:
                raise DataError(
                    f"data.template makes prompts of more than {bounds.bytes / 2**20:g} MB together out of {config.source}; "
                    "shorten it, or set data.size"
                )
        yield problem


def _problem(config: DataConfig, row: Row, index: int) -> Problem:
    where = f"{config.source} row {index + 1}"
    answer_column = _column(row, config.answer, ANSWER_COLUMNS, "answer", where)
    prompt_column = None
    value: Any
    if config.template is not None:
        value = _filled(config.template, row, where)
    else:
        row = plain_preference(row)
        prompt_column = _column(row, config.prompt, PROMPT_COLUMNS, "prompt", where)
        value, row = without_prompt(row) if prompt_column is None else (row[prompt_column], row)
        if not value and prompt_column is None:
            raise DataError(
                f"{where} has no column named {', '.join(PROMPT_COLUMNS)}. {_columns(row)}. "
                "Set data.prompt to one of them, or data.template to a text with {column} fields"
            )
    answer = "" if answer_column is None else _text(row[answer_column])
    conversational = isinstance(value, list)
    messages = messages_of(value, where, prompt_column or "template")
    continuation: tuple[Message, ...] = ()
    if messages[-1].role == "assistant":  # a row for supervised training: its last turn is the reference answer
        messages, continuation = messages[:-1], messages[-1:]
        answer = answer or continuation[0].content
    if not messages or messages[-1].role not in ("user", "tool"):
        raise DataError(f"{where}: messages must end with a user turn, or with the assistant's answer to one")
    if config.system is not None:
        messages = (Message("system", config.system), *(message for message in messages if message.role != "system"))
    check_characters((*messages, *continuation), where)
    if not config.source.startswith("reasoning-gym:"):  # whose scorer finds a row by its question
        row = {name: value for name, value in row.items() if name != prompt_column}
    return Problem(index, messages, answer, row, conversational, continuation)


def _column(row: Mapping[str, Any], wanted: str | None, usual: tuple[str, ...], field: str, where: str) -> str | None:
    if wanted is not None and wanted not in row:
        raise DataError(f"{where} has no column {wanted!r} (data.{field}). {_columns(row)}")
    return wanted if wanted is not None else next((name for name in usual if name in row), None)


def _columns(row: Mapping[str, Any]) -> str:
    return f"Its columns: {', '.join(row) or 'none'}"


def _filled(template: str, row: Row, where: str) -> str:
    pieces = []
    for text, column in parts_of(template):
        pieces.append(text)
        if column is not None:
            if column not in row:
                raise DataError(f"{where} has no column {column!r} that data.template asks for. {_columns(row)}")
            pieces.append(str(row[column]))
    return "".join(pieces)


def parts_of(template: str) -> list[tuple[str, str | None]]:
    """Split a template into plain texts, each with the column that follows it.

    Raises:
        DataError: a field is more than a column name; format expressions could use any amount of memory.
    """
    hint = "Write {column} for a column, {{ and }} for braces"
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"data.template cannot be filled: {error}. {hint}") from error
    for _, column, form, conversion in pieces:
        if column is not None and (form or conversion or not column or set(column) & set(".[")):
            asked = f"{{{column}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
            raise DataError(
                f"data.template cannot be filled: {asked:.80} is not the name of a column alone. {hint}; for anything else "
                "add a column"
            )
    return [(text, column) for text, column, _, _ in pieces]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
