"""Short names of jobs: the values that a sweep varies get separate columns. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from motet.observe.text import Glyphs, shorten

_FIELD = re.compile(r"-(?=[A-Za-z_]\w*=)")  # in the form of `jobfile.expand`: add-lr=1e-4-rank=8
_TASK = ("source", "eval_source", "data", "reward", "rewards")
"""Fields whose variants are different tasks, with rewards that cannot be compared."""
_MAX_VALUE = 10


@dataclass(frozen=True)
class Names:
    """The names of some jobs, split into parts."""

    stems: Mapping[str, str]
    """The name in the job file, of each job."""
    fields: tuple[str, ...]
    """The fields that differ between variants."""
    values: Mapping[str, tuple[str, ...]]
    """The values of these fields, by job; empty if a job does not vary one."""

    def shown(self, width: int, glyphs: Glyphs) -> dict[str, str]:
        """Each stem in at most `width` cells; if ends alone do not tell them apart, the common beginning is cut first."""
        stems = sorted(set(self.stems.values()))
        short = {stem: shorten(glyphs.plain(stem), width, glyphs) for stem in stems}
        if len(set(short.values())) < len(stems):
            common = len(commonprefix(stems))  # noqa: RUF071 - of characters, not of paths
            short = {stem: shorten(glyphs.ellipsis + glyphs.plain(stem[common:]), width, glyphs) for stem in stems}
        return {name: short[stem] for name, stem in self.stems.items()}


def take_apart(names: Sequence[str]) -> Names:
    """Find the values that a sweep wrote into names."""
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
    """The task of a swept name: the name in the job file and, if the sweep varies it, the task."""
    stem, values = _apart(name)
    return "-".join([stem, *(f"{field}={values[field]}" for field in _TASK if field in values)])


def variant_of(name: str) -> str:
    """The setting of a swept name, without task and seed; empty if the sweep varies nothing else."""
    _, values = _apart(name)
    return ", ".join(f"{field}={value}" for field, value in values.items() if field not in (*_TASK, "seed"))


def seed_of(name: str) -> str:
    """The seed in a swept name; empty if the sweep does not vary it."""
    return _apart(name)[1].get("seed", "")


def ranks(jobs: Iterable[tuple[str, float | None]]) -> dict[str, int]:
    """Ranks of (name, figure) among the variants of one task, 1 for the highest; none without a figure or a sibling."""
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
