"""Jobs of one file that start from each other's adapters."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.config.adapters import ADAPTERS, SHAPE, AdapterConfig, adapter_type
from motet.config.job import JobConfig
from motet.core import plain_yaml
from motet.core.errors import AdapterError
from motet.core.safetensors_header import saved_targets
from motet.core.types import ADAPTER_CONFIG

_ALL_LINEAR = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""An adapter on all of these was trained with `all-linear`."""


@dataclass(frozen=True)
class ChainStart:
    """A version of another job's adapter that a job starts from."""

    job: str
    version: str
    """`best`, `latest`, or its number."""

    @classmethod
    def of(cls, init: str | None, jobs: Sequence[JobConfig]) -> ChainStart | None:
        """The version of one of these jobs that `adapter.init` names: `job`, `job@best`, `job@latest`, `job@12`."""
        if init is None:
            return None
        names = {job.name for job in jobs}
        if init in names:
            return cls(init, "best")
        name, _, version = init.rpartition("@")
        known = name in names and (version in ("best", "latest") or version.isdecimal())
        return cls(name, version) if known else None


def chains(jobs: Sequence[JobConfig]) -> Mapping[str, ChainStart]:
    """Jobs that start from an earlier one in the file, by name."""
    starts = {job.name: ChainStart.of(job.adapter.init, jobs[:place]) for place, job in enumerate(jobs)}
    return {name: start for name, start in starts.items() if start is not None}


def check_chains(jobs: Sequence[JobConfig]) -> None:
    """Raise ValueError for a job that starts from another's adapter but comes before it, or has another shape."""
    by_name, starts = {job.name: job for job in jobs}, chains(jobs)
    for job in jobs:
        start = starts.get(job.name)
        if start is None:
            if (below := ChainStart.of(job.adapter.init, jobs)) is not None:
                raise ValueError(
                    f"job {job.name}: adapter.init names {below.job!r}, which must come before it in the file"
                )
            continue
        if by_name[start.job].team:
            raise ValueError(
                f"job {job.name}: adapter.init names {start.job!r}, which is a team: give the directory of one role, "
                f"such as runs/RUN/{start.job}/versions/v5/{next(iter(by_name[start.job].team))}, in another run"
            )
        above = by_name[start.job].adapter
        if wrong := unlike(job.adapter, above.model_dump(include={*SHAPE})):
            raise ValueError(f"job {job.name}: adapter.init: {start.job!r} {wrong}")


def unlike(adapter: AdapterConfig, shape: Mapping[str, Any]) -> str:
    """All differences of a job's adapter from the shape of the one that it starts from; empty without any."""
    wrong = [field for field, value in shape.items() if getattr(adapter, field, None) != value]
    paths, named = shape.get("target_modules", ()), adapter.target_modules
    if isinstance(named, list) and paths:  # the base tells whether paths with these names are all of them
        ends = {name: {path for path in paths if f".{path}".endswith(f".{name}")} for name in named}
        same = all(ends.values()) and set().union(*ends.values()) == {*paths}
        wrong = [field for field in wrong if field != "target_modules" or not same]
    if not wrong:
        return ""
    has = ", ".join(f"{field} {shape[field]!s:.300}" for field in wrong)
    asks = ", ".join(str(getattr(adapter, field, None)) for field in wrong)
    fields = ", ".join(f"adapter.{field}" for field in wrong)
    return f"has {has}, the job asks for {asks}; leave out {fields}, which are taken from it"


def shape_of(directory: Path) -> dict[str, Any]:
    """Rank, alpha and target modules of a PEFT directory, as far as its configuration tells them."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, AdapterError):
        saved = json.loads((directory / ADAPTER_CONFIG).read_text("utf-8"))
        if saved.get("target_parameters"):  # the rank of what its tensors are joined to is another
            return {}
        shape: dict[str, Any] = {"rank": int(saved["r"]), "alpha": float(saved["lora_alpha"])}
        shape |= {} if (kind := adapter_type(saved)) == "lora" else {"type": kind}
        targets = saved_targets(saved, directory)
        narrow = isinstance(targets, list) and not {*targets} >= _ALL_LINEAR
        return {**shape, "target_modules": sorted(targets)} if narrow else shape
    return {}


def take_shape(job: JobConfig, shape: Mapping[str, Any]) -> JobConfig:
    """The job with the fields of its adapter that it does not give."""
    own = {field: value for field, value in shape.items() if field not in job.adapter.model_fields_set}
    kind = ADAPTERS.get(own.get("type", ""), type(job.adapter))
    adapter = kind.model_construct(job.adapter.model_fields_set | own.keys(), **{**dict(job.adapter), **own})
    return job.model_copy(update={"adapter": adapter}) if own else job


def rank_of(job: JobConfig) -> int:
    """The rank of a job's adapter; 0 while the one that it starts from has yet to decide it (`take_shape`)."""
    decided = job.adapter.init is None or "rank" in job.adapter.model_fields_set
    return job.adapter.rank if decided else 0


def take_shapes(jobs: Sequence[Any], run: str | None = None) -> list[Any]:
    """Jobs, as trees, with the shape of the adapter that they start from, where they do not give it.

    Without a `run`, no file is read.
    """
    above, filled = dict[str, Any](), []
    for job in jobs:
        adapter = job.get("adapter") if isinstance(job, dict) else None
        init = adapter.get("init") if isinstance(adapter, dict) else None
        if isinstance(adapter, dict) and isinstance(init, str):
            own = init if init in above else init.rpartition("@")[0]
            if own in above:
                shape = AdapterConfig().model_dump(include={*SHAPE}) | _shape_in(above[own])
            elif run is not None:  # a job that has begun keeps the words that it began with
                shape = _begun(Path(run) / str(job.get("name")) / "job.yaml") or shape_of(
                    Path(os.path.expanduser(init))
                )
            else:
                shape = {}
            job = {**job, "adapter": {**shape, **adapter}}
        if isinstance(job, dict):
            above[str(job.get("name"))] = job["adapter"] if isinstance(job.get("adapter"), dict) else {}
        filled.append(job)
    return filled


def _begun(identity: Path) -> dict[str, Any]:
    with contextlib.suppress(KeyError, TypeError):
        adapter = plain_yaml.mapping_in(identity)["job"]["adapter"]
        return _shape_in(adapter) if adapter["init"] else {}
    return {}


def _shape_in(adapter: Mapping[str, Any]) -> dict[str, Any]:
    return {field: adapter[field] for field in SHAPE if field in adapter}
