"""What a diagnosis says, done word by word: the settings of a job after each of its remedies."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from motet.config.jobfile import set_path

_FIELD = r"((?:[a-z_]+\.)+[a-z_]+|steps)"
_FROM = re.compile(rf"(lower|raise) {_FIELD} \(it is ([^)]+)\)")
_TO = re.compile(rf"set {_FIELD} to (start|[\d.e-]*\d)")
_OUT = re.compile(rf"leave out {_FIELD}")
_WEIGHTS = re.compile(r"(\S+) outweighs it; set its weight to (\S+), or that of (\S+) to ([^\s,;]+)")
Tree = dict[str, Any]


def followed(job: Tree, says: str) -> dict[str, Tree]:
    """The settings of a job after each remedy of a diagnosis, by what it changes; alternatives are jobs of their own."""
    return dict(_followed(job, says))


def _followed(job: Tree, says: str) -> Iterator[tuple[str, Tree]]:
    for way, field, value in _FROM.findall(says):
        now = at(job, field)
        assert f"{now:g}" == value, f"{field} is {now}, not {value}: {says}"
        yield field, changed(job, field, now / 3 if way == "lower" else 2 * now)
    for field, value in _TO.findall(says):
        yield field, changed(job, field, value if value == "start" else float(value) if "." in field else int(value))
    for field in _OUT.findall(says):
        without = copy.deepcopy(job)
        section, _, name = field.rpartition(".")
        del at(without, section)[name]
        yield field, without
    for top, lower, lost, higher in _WEIGHTS.findall(says):
        for name, weight in ((top, lower), (lost, higher)):
            rewards = [
                {**one, "weight": float(weight)} if one["name"] == name else one
                for one in copy.deepcopy(job["rewards"])
            ]
            yield f"weight of {name}", {**job, "rewards": rewards}


def at(tree: Tree, path: str) -> Any:
    """The value of a field."""
    for name in path.split("."):
        tree = tree[name]
    return tree


def changed(job: Tree, field: str, value: Any) -> Tree:
    """The job with another value of a field."""
    other = copy.deepcopy(job)
    set_path(other, field, value)
    return other
