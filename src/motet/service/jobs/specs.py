"""From what a tenant asks for to a job that the engine may run: nothing of the server's disk or code is theirs to name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.config import DataConfig, JobConfig, RewardConfig
from motet.errors import ConfigError
from motet.jobfile import normal_job, validate
from motet.tasks.dataset import parts_of
from motet.tasks.graders.shapes import parse
from motet.tasks.reward_elsewhere import ELSEWHERE, MASK, check
from motet.tasks.reward_http import Addresses
from motet.tasks.reward_installed import Installed
from motet.tasks.reward_loading import SCORER
from motet.tasks.reward_walls import Walls
from motet.tasks.rewards import BUILTIN

GENERATED = ("toy:", "reasoning-gym:")
HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
FILE_ENDINGS = re.compile(r"\.(jsonl?|parquet|csv)$", re.IGNORECASE)
MOST: Mapping[str, int] = {
    "steps": 1_000_000,
    "data.size": 1_000_000,
    "data.holdout": 100_000,
    "sampling.max_tokens": 1_000_000,
    "algorithm.group_size": 1024,
    "algorithm.groups_per_step": 16_384,
    "algorithm.max_off_policy_steps": 1000,
    "algorithm.updates_per_batch": 1000,
    "eval.n": 1024,
    "checkpoint.keep": 10_000,
}
"""The largest values of a job's fields here: without bounds, one job could take the memory of all."""
MOST_ROLLOUTS = 131_072
"""Of one step, with those that are sampled to be left out."""
MOST_EVALUATED = 1_048_576
"""Completions of one evaluation."""
MOST_TEXT = 100_000
"""Characters of data.template and of data.system."""
MOST_LISTED = 64
"""Rewards of a job, and stop strings."""
TEMPLATE_PARAMETERS = frozenset(
    (
        "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "messages", "self",
    )
)  # fmt: skip
"""What `transformers`' apply_chat_template takes itself; `chat_template` would be a program of the tenant's."""
_LONGEST_ARGUMENT = 200
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


def validated(tree: Mapping[str, Any], allowed: Allowed) -> JobConfig:
    """Check a job that a tenant submits, as it stands in a job file.

    Raises:
        ConfigError, DataError, RewardError: what is wrong, or not allowed here.
    """
    try:
        json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(f"the job holds what cannot be kept as JSON in UTF-8: {error}") from error
    config = validate({"base": "small", "run": "x", "jobs": [normal_job(dict(tree))]}, "the job").jobs[0]
    _check_sizes(config)
    _check_texts(config.data)
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


def _check_sizes(config: JobConfig) -> None:
    for name, most in MOST.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None and value > most:
            raise ConfigError(f"{name}: {value} is more than {most}, the most here")
    algorithm = config.algorithm
    width = algorithm.groups_per_step * max(algorithm.oversampling, 1.0) * max(algorithm.over_provision, 1.0)
    for what, count, most in (
        ("algorithm: groups_per_step · group_size rollouts of a step", width * algorithm.group_size, MOST_ROLLOUTS),
        ("data.holdout · eval.n completions of an evaluation", config.data.holdout * config.eval.n, MOST_EVALUATED),
        ("rewards", len(config.rewards), MOST_LISTED),
        ("sampling.stop", len(config.sampling.stop), MOST_LISTED),
    ):
        if count > most:
            raise ConfigError(f"{what}: {count:.0f} are more than {most}, the most here")


def _check_texts(data: DataConfig) -> None:
    for name, text in (("template", data.template), ("system", data.system)):
        if text is not None and len(text) > MOST_TEXT:
            raise ConfigError(f"data.{name}: {len(text)} characters are more than {MOST_TEXT}, the most here")
    if data.template is not None:
        parts_of(data.template)
    for name, value in data.chat_template_kwargs.items():
        if name in TEMPLATE_PARAMETERS:
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: this is not a variable of the chat template; give those that it has, such "
                "as enable_thinking"
            )
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > _LONGEST_ARGUMENT:
            raise ConfigError(
                f"data.chat_template_kwargs.{name:.80}: give true, false, a number or a text of at most {_LONGEST_ARGUMENT} "
                "characters"
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
