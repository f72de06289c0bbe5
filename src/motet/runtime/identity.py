"""What the bytes of a job depend on, wherever its files lie: their contents count, and their names, not their places."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.checksums import hash_of
from motet.config import GIVEN_ROWS, JobConfig
from motet.tasks.plain_json import as_json
from motet.tasks.reward_elsewhere import masked
from motet.types import ADAPTER_WEIGHTS

_SHOWN = 16
"""Digits of a sum that tell two contents apart."""


def of_config(config: JobConfig) -> dict[str, Any]:
    """The part that can be known before anything is loaded."""
    job = config.model_dump(mode="json", exclude={"checkpoint", "priority", "budget"})
    for field in ("source", "eval_source"):
        job["data"][field] = _placeless(job["data"][field])
    job["adapter"]["init"] = _placeless(job["adapter"]["init"])
    for field in ("reference", "teacher"):
        if field in job["algorithm"]:
            job["algorithm"][field] = _placeless(job["algorithm"][field])
    code = [(job["algorithm"], "type"), (job["environment"], "name"), *((reward, "name") for reward in job["rewards"])]
    for section, field in code:
        file, colon, function = section[field].rpartition(":")
        section[field] = f"{_placeless(file)}:{function}" if colon else section[field]
    job["rewards"] = [masked(reward) for reward in job["rewards"]]  # another password is no other job
    functions = [_source(reward.function) for reward in config.rewards if reward.function is not None]
    return {"functions": functions, "contents": dict(_contents(config)), "job": job}


def _contents(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Each file that a job names, and rows that it was given, with the beginning of its sum."""
    rewards = (reward.name for reward in config.rewards if reward.function is None)
    named = [config.algorithm.type, config.environment.name, *rewards]
    adapters = [
        name and str(Path(name) / ADAPTER_WEIGHTS) for name in (config.adapter.init, config.algorithm.compared_with)
    ]
    if config.data.rows is not None:
        rows = json.dumps(as_json(list(config.data.rows)), sort_keys=True)
        yield GIVEN_ROWS, hashlib.sha256(rows.encode("utf-8", "surrogatepass")).hexdigest()[:_SHOWN]
    for name in (config.data.source, config.data.eval_source, *adapters, *(name.rpartition(":")[0] for name in named)):
        if name and (path := Path(os.path.expanduser(name))).is_file():
            yield path.name, hash_of(path).hexdigest()[:_SHOWN]


def _placeless(name: str | None) -> str | None:
    return Path(name).name if name and Path(os.path.expanduser(name)).exists() else name


def _source(function: Any) -> str:
    """Of a function's source, so that an edited one is not taken for the old; empty where it has none."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:_SHOWN]
    except (OSError, TypeError):
        return ""
