"""From what a tenant asks for to a job that the engine may run: nothing of the server's disk or code is theirs to name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.algorithms.registry import ALGORITHMS
from motet.config import JobConfig, RewardConfig
from motet.config.service import ANY_SIZE, Largest
from motet.errors import ConfigError
from motet.jobfile import normal_job, validate
from motet.service.jobs.bounds import check_sizes, check_texts
from motet.tasks.episode import ENVIRONMENTS
from motet.tasks.graders.shapes import parse
from motet.tasks.plain_json import check_plain
from motet.tasks.reward_elsewhere import ELSEWHERE, MASK, check
from motet.tasks.reward_http import Addresses
from motet.tasks.reward_installed import Installed
from motet.tasks.reward_loading import SCORER
from motet.tasks.reward_walls import Walls
from motet.tasks.rewards import BUILTIN

GENERATED = ("toy:", "reasoning-gym:")
HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
FILE_ENDINGS = re.compile(r"\.(jsonl?|parquet|csv)$", re.IGNORECASE)
Find = Callable[[str], Path | None]
"""A path for the name of an uploaded file; None where the tenant has none."""


@dataclass(frozen=True)
class Allowed:
    """What the operator of a service lets jobs use."""

    hub: bool
    """Whether data may come from the hub."""
    rewards: Mapping[str, Installed]
    """By the names under which they are installed."""
    addresses: Addresses
    """Where rewards may be asked."""
    walls: Walls
    """Which rewards have to run behind a wall."""
    largest: Largest = ANY_SIZE
    """What the servers have room for."""


def validated(tree: Mapping[str, Any], allowed: Allowed) -> JobConfig:
    """Check a job that a tenant submits, as it stands in a job file.

    Raises:
        ConfigError, DataError, RewardError: what is wrong, or not allowed here.
    """
    try:
        json.dumps(check_plain(tree), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(f"the job cannot be kept as JSON in UTF-8: {error}") from error
    job = normal_job(dict(tree))
    for section, field, known in (("algorithm", "type", ALGORITHMS), ("environment", "name", ENVIRONMENTS)):
        _check_no_code(job.get(section), f"{section}.{field}", known)
    config = validate({"base": "small", "run": "x", "jobs": [job]}, "the job").jobs[0]
    check_sizes(config)
    check_texts(config.data)
    _check_room(config, allowed.largest)
    for source in filter(None, (config.data.source, config.data.eval_source)):
        uploaded = source.startswith("file-")
        on_hub = (
            allowed.hub and HUB_NAME.fullmatch(source) and not FILE_ENDINGS.search(source) and not Path(source).exists()
        )
        if not uploaded and not source.startswith(GENERATED) and not on_hub:
            raise ConfigError(
                f"data.source {source!r} cannot be used here: upload the file and give its id (file-…), or use toy:NAME or "
                "reasoning-gym:NAME"
            )
    for reward in config.rewards:
        _check_reward(reward, allowed)
    return config


def _check_no_code(section: Any, path: str, known: Collection[str]) -> None:
    """Refuse a class of the tenant's before anything looks for its file."""
    name = section.get(path.rpartition(".")[2]) if isinstance(section, dict) else None
    if isinstance(name, str) and ":" in name:
        raise ConfigError(
            f"{path} {name!r} cannot be used here: code does not run on the server. There are {', '.join(known)}"
        )


def _check_room(config: JobConfig, largest: Largest) -> None:
    for name, wanted, most, setting in (
        ("adapter.rank", config.adapter.rank, largest.rank, "max_rank"),
        ("algorithm.max_off_policy_steps", config.algorithm.lag, largest.lag, "max_cpu_loras"),
    ):
        if most is not None and wanted > most:
            raise ConfigError(
                f"{name}: {wanted} is more than {most}, the most that the servers of this service were started for; whoever "
                f"runs it sets rollout.launch.{setting}"
            )


def _check_reward(reward: RewardConfig, allowed: Allowed) -> None:
    installed = allowed.rewards
    known = [*BUILTIN, SCORER, *ELSEWHERE, *installed]
    if reward.name not in known:
        raise ConfigError(
            f"reward {reward.name!r} cannot be used here: code does not run on the server. There are "
            f"{', '.join(sorted(known))}; a function of your own is scored on your machine (motet submit --reward FILE)"
        )
    check(reward)
    if reward.wall is False:
        raise ConfigError(f"reward {reward.name!r}: wall: false is for whoever runs the service to say; leave it out")
    if reward.name not in ELSEWHERE:
        allowed.walls.around(reward, installed.get(reward.name))
    if reward.name in ("grader", "judge"):
        parse(reward.args, f"reward {reward.name}: args")
    if reward.name == "http":
        allowed.addresses.check(str(reward.args["url"]))
    if reward.name in installed:
        given = installed[reward.name]
        odd = sorted(set(reward.args) - set(given.parameters))
        missing = sorted(name for name, default in given.parameters.items() if not default and name not in reward.args)
        if odd or missing:
            what = "has no argument" if odd else "needs the argument"
            takes = ", ".join(given.parameters) or "none"
            raise ConfigError(f"reward {reward.name!r} {what} {(odd or missing)[0]!r}; it takes {takes}")


def masked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A job as it may be shown: values of headers are secrets."""
    rewards = [
        {**reward, "args": {**reward["args"], "headers": dict.fromkeys(reward["args"]["headers"], MASK)}}
        if reward.get("name") == "http" and isinstance(reward.get("args", {}).get("headers"), Mapping)
        else reward
        for reward in spec.get("rewards", ())
    ]
    return {**spec, "rewards": rewards}


def for_engine(config: JobConfig, job_id: str, find_file: Find, start: Path) -> dict[str, Any]:
    """The job under its engine-side name, with paths for what it names; `start` is where its adapter's start is kept.

    Raises:
        ConfigError: a file is not there.
    """
    found = config.model_dump(mode="json")
    found["seed"] = config.effective_seed  # of the name that its owner gave it
    found["name"] = job_id
    for field in ("source", "eval_source"):
        name = found["data"][field]
        if name is not None and name.startswith("file-"):
            if (path := find_file(name)) is None:
                raise ConfigError(f"data.{field}: there is no file {name}")
            found["data"][field] = str(path)
    if found["adapter"]["init"] is not None:
        found["adapter"]["init"] = str(start)
    return found
