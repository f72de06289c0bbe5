"""`motet init`: three questions, and a job file that runs."""

from __future__ import annotations

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
from motet.core.near import close_matches
from motet.hosting.before_loading import check_before_loading
from motet.model.find import find_base
from motet.tasks.dataset import load_dataset

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


def write_job_file(file: Path, task: str | None, data: str | None, base: str | None, *, ask: bool) -> None:
    """Write a job file; ask for missing values, or use their defaults if nothing may be asked.

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
    data, rows = _answer(
        data,
        "Which data (a file, toy:NAME or a hub name)?",
        _LEARNABLE.get(task, "toy:sort_letters"),
        lambda source: load_dataset(DataConfig(source=_from_file(source, file))),
        ask=ask,
    )
    base, _ = _answer(base, "Which base?", "small", find_base, ask=ask)
    tree = _job(task, data, max((len(problem.answer) for problem in rows.train), default=0))
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
        check_before_loading(load_jobs(file))
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


def _from_file(data: str, file: Path) -> str:
    """The data's path as a job file finds it: beside the file, then in the working directory."""
    beside = file.parent / data
    return str(beside) if beside.exists() else data


def _job(task: str, data: str, longest: int) -> dict[str, Any]:
    """`longest` is in characters. A token has at least one, so an answer with that many tokens is not cut."""
    name = re.sub("[^A-Za-z0-9]", "-", Path(data.partition(":")[2] or data).stem)
    tree = {"name": name.strip("-")[:40] or "job", "data": data, **TASKS[task][1]}
    if task == "imitate":
        return tree
    room = max(_FEWEST, 1 << longest.bit_length()) if task in _SHORT else _USUAL
    return {**tree, "sampling": {"max_tokens": min(room, 4 * _USUAL)}}
