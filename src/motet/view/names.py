"""Short names of jobs: the values that a sweep varies get separate columns. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from motet.view.text import Glyphs, shorten

_FIELD = re.compile(r"-(?=[A-Za-z_]\w*=)")  # as `jobfile.expand` joins them: add-lr=1e-4-rank=8
_TASK = ("source", "eval_source", "data", "reward", "rewards")
"""Fields whose variants are other tasks: their rewards do not compare."""
_MAX_VALUE = 10


@dataclass(frozen=True)
class Names:
    """The names of some jobs, taken apart."""

    stems: Mapping[str, str]
    """The name in the job file, of each job."""
    fields: tuple[str, ...]
    """What differs between variants."""
    values: Mapping[str, tuple[str, ...]]
    """Of these fields, of each job; empty where a job does not vary one."""

    def shown(self, width: int, glyphs: Glyphs) -> dict[str, str]:
        """Each stem in at most `width` cells; where ends alone do not tell them apart, what all begin with goes first."""
        stems = sorted(set(self.stems.values()))
        short = {stem: shorten(glyphs.plain(stem), width, glyphs) for stem in stems}
        if len(set(short.values())) < len(stems):
            common = len(commonprefix(stems))  # noqa: RUF071 - of characters, not of paths
            short = {stem: shorten(glyphs.ellipsis + glyphs.plain(stem[common:]), width, glyphs) for stem in stems}
        return {name: short[stem] for name, stem in self.stems.items()}


def take_apart(names: Sequence[str]) -> Names:
    """Find what a sweep wrote into names."""
    apart = {name: _apart(name) for name in names}
    stems = {name: stem for name, (stem, _) in apart.items()}
    swept = {name: values for name, (_, values) in apart.items()}

    def varies(field: str) -> bool:
        return any(
            len({swept[name].get(field) for name in names if stems[name] == stem}) > 1 for stem in set(stems.values())
        )

    fields = tuple(filter(varies, dict.fromkeys(field for values in swept.values() for field in values)))
    return Names(stems, fields, {name: tuple(swept[name].get(field, "") for field in fields) for name in names})


def short_value(value: str, glyphs: Glyphs) -> str:
    """A swept value in a narrow column."""
    return shorten(glyphs.plain(value), _MAX_VALUE, glyphs)


def task_of(name: str) -> str:
    """What a swept name says of the task: the name in the job file, and the task where a sweep varies it."""
    stem, values = _apart(name)
    return "-".join([stem, *(f"{field}={values[field]}" for field in _TASK if field in values)])


def variant_of(name: str) -> str:
    """What a swept name says besides task and seed; empty where no sweep varies more."""
    _, values = _apart(name)
    return ", ".join(f"{field}={value}" for field, value in values.items() if field not in (*_TASK, "seed"))


def seed_of(name: str) -> str:
    """The seed that a sweep wrote into a name; empty where it wrote none."""
    return _apart(name)[1].get("seed", "")


def ranks(jobs: Iterable[tuple[str, float | None]]) -> dict[str, int]:
    """Places, from 1 on, among the variants of one task; who has no figure, or no sibling, has no place.

    Args:
        jobs: the name and the figure of each, higher is better.
    """
    tasks: dict[str, dict[str, float]] = {}
    for name, value in jobs:
        if value is not None and math.isfinite(value):
            tasks.setdefault(task_of(name), {})[name] = value
    return {
        name: 1 + sum(other > value for other in siblings.values())
        for siblings in tasks.values()
        if len(siblings) > 1
        for name, value in siblings.items()
    }


def _apart(name: str) -> tuple[str, dict[str, str]]:
    stem, *parts = _FIELD.split(name)
    return stem, dict(part.partition("=")[::2] for part in parts)
