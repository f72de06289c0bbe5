"""The interface of observers of steps.

The class or function is called with the `ObservedJob` when a job begins or resumes, and with `args` as keywords.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from motet.core.plain_yaml import mapping_in

_URL = re.compile(r"^(\w[\w+.-]*://)(?:[^/?#]*@)?([^?#]*).*$", re.DOTALL)


@dataclass(frozen=True)
class ObservedJob:
    """A job that an observer follows."""

    id: str
    """Unique, and the same when the job resumes."""
    name: str
    run: str
    """Name of the run directory; empty on a service."""
    tenant: str
    """The job's tenant; empty without a service."""
    path: Path
    """The job's directory."""
    home: Path
    """The directory for observers' files: the run directory, or a directory of the service."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The job's settings.

        Values of reward and environment arguments, and URL queries, are left out: they can hold keys.
        """
        known: Mapping[str, Any] = _without_keys(mapping_in(self.path / "job.yaml"))
        return known

    @property
    def label(self) -> str:
        """The name; on a service with the id, because several jobs can have one name."""
        return f"{self.name}-{self.id}" if self.tenant else self.name

    def project(self, name: str) -> str:
        """The name of a project; on a service, each tenant has its own."""
        return f"{name}-{self.tenant}" if self.tenant else name

    def directory(self, name: str) -> Path:
        """A directory for files of the job, created if it is missing. Where other runs may write too, it has the id as name."""
        shared = self.shared(name)
        own = bool(self.tenant) or shared.resolve().is_relative_to(self.home.resolve())
        place = shared / (self.label if own else self.id)
        place.mkdir(parents=True, exist_ok=True)
        return place

    def shared(self, name: str) -> Path:
        """A directory for files of all jobs of the run, or of the tenant; it may be missing."""
        return self.home / name / self.tenant


@dataclass(frozen=True)
class ObservedStep:
    """A line of metrics.jsonl."""

    number: int
    time: float
    """When the step ended, in seconds since 1970."""
    line: Mapping[str, Any]
    """All fields, as in metrics.jsonl."""
    path: Path
    """The job's directory."""

    @property
    def metrics(self) -> dict[str, float]:
        """The finite numbers of the line; nested fields are joined by a slash, as in `eval/reward`."""
        return dict(numbers(self.line))

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """The rollouts of the step and of its evaluation, unless they are deleted already."""
        for name in (f"{self.number}.jsonl", f"eval-{self.number}.jsonl"):
            try:
                with (self.path / "rollouts" / name).open("rb") as lines:
                    yield from map(json.loads, lines)
            except FileNotFoundError:
                continue


class StepObserver(Protocol):
    """Follows one job. Calls come from one thread, which waits for them; training does not."""

    def step(self, step: ObservedStep) -> None:
        """Receive a step."""
        ...

    def end(self, state: str) -> None:
        """The job has ended in this state, or is paused; if it resumes, another observer of the same id begins."""
        ...


ObserverFactory = Callable[[ObservedJob], StepObserver]


def numbers(line: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a line except its step, by path."""
    for field, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{field}/")
        elif isinstance(value, int | float) and math.isfinite(value) and f"{before}{field}" != "step":
            yield f"{before}{field}", float(value)


def _without_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _names(item) if key == "args" else _without_keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_keys(item) for item in value]
    return _URL.sub(r"\1\2", value) if isinstance(value, str) else value


def _names(args: Any) -> Any:
    return dict.fromkeys(args) if isinstance(args, dict) else None
