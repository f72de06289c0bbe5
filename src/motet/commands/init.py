"""`motet init`: three questions, and a job file that runs."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer
import yaml

from motet.commands.answers import say
from motet.config import DataConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError, MotetError
from motet.core.nested import names_of
from motet.core.suggestions import close_matches
from motet.data.columns import FIRST_ROWS, Columns
from motet.data.dataset import load_dataset
from motet.data.sources import read_rows
from motet.hosts.checks import check_run
from motet.model.find import find_base

_T = TypeVar("_T")

TASKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "exact": ("the answer equals the reference answer", {"reward": "exact"}),
    "contains": ("the answer contains the reference answer", {"reward": "contains"}),
    "number": ("the last number is that of the reference answer", {"reward": "numeric"}),
    "math": ("the last formula equals the reference answer", {"reward": "math"}),
    "own": ("a function of yours in rewards.py gives the score", {"reward": "rewards.py:reward"}),
    "imitate": ("the model learns to give the reference answers (no reward)", {"algorithm": "sft"}),
}
"""The kinds of task: their meaning and the fields of their jobs."""
_LEARNABLE = {"number": "toy:count_letters", "math": "toy:count_letters"}
"""Data that the small base learns in a minute, where `toy:sort_letters` does not fit."""
_SHORT = ("exact", "contains")
_FEWEST, _USUAL = 16, 256
_OWN_REWARD = '''"""The reward of the job: a number for each answer, larger is better."""


def reward(problem, completion):
    return float(problem.answer in completion)
'''


def write_job_file(
    file: Path,
    task: str | None,
    data: str | None,
    base: str | None,
    prompt: str | None = None,
    answer: str | None = None,
    *,
    ask: bool,
) -> None:
    """Write a job file; ask for missing values, or use their defaults if nothing may be asked.

    `prompt` and `answer` are columns of the data; they are asked for where no column has a known name.

    Raises:
        ConfigError: the file exists already, or an answer is missing or wrong.
        MotetError: the data or the base cannot be used.
    """
    if file.exists():
        raise ConfigError(f"{file} is there already: give another name, or remove it")
    if ask and None in (task, data, base) and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on: give --task, --data and --base, or --yes for the defaults")
    if ask and task is None:
        say("\n".join(f"  {name:<9} {meaning}" for name, (meaning, _) in TASKS.items()))
    task, _ = _answer(task, "What is a good answer?", "exact", _known_task, ask=ask)
    data, named = _answer(
        data,
        "Which data (a file, toy:NAME or a hub name)?",
        _LEARNABLE.get(task, "toy:sort_letters"),
        lambda source: _readable(DataConfig(source=_from_file(source, file), prompt=prompt, answer=answer)),
        ask=ask,
    )
    for part in ("prompt",) if task == "own" else ("prompt", "answer"):
        named = _asked_column(named, part, ask=ask and sys.stdin.isatty())
    rows = load_dataset(named)
    base, _ = _answer(base, "Which base?", "small", find_base, ask=ask)
    section = {"source": data, **named.model_dump(include={"prompt", "answer"}, exclude_none=True)}
    tree = _job(task, section, max((len(problem.answer) for problem in rows.train), default=0))
    made = [file]
    file.parent.mkdir(parents=True, exist_ok=True)
    if task == "own" and not (rewards := file.parent / "rewards.py").exists():
        rewards.write_text(_OWN_REWARD, "utf-8")
        made.append(rewards)
    heading = "# Written by motet init. Fields: docs/configuration.md. Try it: motet check, then motet run.\n"
    file.write_text(
        heading + yaml.safe_dump({"base": base, "jobs": [tree]}, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    try:
        check_run(load_jobs(file))
    except MotetError:
        for path in made:
            path.unlink()
        raise
    say(f"wrote {' and '.join(map(str, made))} ({len(rows.train)} rows to train on, {len(rows.holdout)} held out)")
    say(f"try it: motet check {file}\ntrain:  motet run {file}")


def _answer(given: str | None, question: str, default: str, read: Callable[[str], _T], *, ask: bool) -> tuple[str, _T]:
    """An answer and what `read` makes of it. A person is asked again if `read` raises a MotetError."""

    def accepted(text: str) -> tuple[str, _T]:
        try:
            return text, read(text)
        except MotetError as error:
            raise typer.BadParameter(str(error)) from error

    if given is not None or not ask:
        return (text := given or default), read(text)
    answer: tuple[str, _T] = typer.prompt(question, default=default, value_proc=accepted)
    return answer


def _known_task(task: str) -> None:
    if task not in TASKS:
        near = close_matches(task, list(TASKS), 1)
        raise ConfigError(
            f"no task {task!r}: {f'did you mean {near[0]}? ' if near else ''}There are {', '.join(TASKS)}"
        )


def _readable(config: DataConfig) -> DataConfig:
    """The same. Raises MotetError for data that cannot be read; columns of unknown names are no mistake yet."""
    if (columns := _columns(config)[0]).prompt or columns.learned:
        load_dataset(config)
    return config


def _columns(config: DataConfig) -> tuple[Columns, list[str]]:
    """The columns that would be read, and the names of all."""
    first = [row for _, row in itertools.islice(read_rows(config)[0], FIRST_ROWS)]
    return Columns.of(config, first), list(dict.fromkeys(itertools.chain(*map(names_of, first))))


def _asked_column(config: DataConfig, part: str, *, ask: bool) -> DataConfig:
    """The same with the column of a part, `prompt` or `answer`, which a person names where none has a known name."""
    columns, names = _columns(config)
    others = [name for name in names if name != columns.prompt]
    if getattr(columns, part) or columns.learned or not others:
        return config
    shown = f"no column of {config.source} is known to hold the {part}s; it has {', '.join(others)}"
    if not ask:
        raise ConfigError(f"{shown}: name it with --{part} COLUMN")
    say(shown)
    question, read = f"Which column has the {part}s?", lambda name: _readable(config.model_copy(update={part: name}))
    return _answer(None, question, others[0], read, ask=True)[1]


def _from_file(data: str, file: Path) -> str:
    """The data's path as a job file finds it: beside the file, then in the working directory."""
    beside = file.parent / data
    return str(beside) if beside.exists() else data


def _job(task: str, section: dict[str, str], longest: int) -> dict[str, Any]:
    """`longest` is in characters. A token has at least one, so an answer with that many tokens is not cut."""
    data = section["source"]
    name = re.sub("[^A-Za-z0-9]", "-", Path(data.partition(":")[2] or data).stem)
    tree = {"name": name.strip("-")[:40] or "job", "data": section if len(section) > 1 else data, **TASKS[task][1]}
    if task == "imitate":
        return tree
    room = max(_FEWEST, 1 << longest.bit_length()) if task in _SHORT else _USUAL
    return {**tree, "sampling": {"max_tokens": min(room, 4 * _USUAL)}}
