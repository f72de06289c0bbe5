"""Validation of submitted jobs: fields, sizes, references to the server's files and code, and texts with several jobs.

Texts are untrusted: a few lines of YAML can expand to gigabytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.registry import ALGORITHMS
from motet.chat.template_variables import check_variables
from motet.config import OF_CLIENT, DataConfig, EnvironmentConfig, JobConfig, RewardConfig
from motet.config.chain import rank_of
from motet.config.jobfile import check_fields, jobs_of, normal_job
from motet.config.service import ANY_SIZE, Largest
from motet.core import plain_yaml
from motet.core.errors import ConfigError, RewardError
from motet.core.json_text import storable
from motet.core.plain_json import check_plain
from motet.core.suggestions import close_matches
from motet.data.row_files import OF_A_JOB
from motet.data.row_problems import parts_of
from motet.data.sources import check_toy
from motet.environments.episode import ENVIRONMENTS
from motet.process.isolated_calls import IsolatedPool, TooMuchError
from motet.rewards import sent_rewards
from motet.rewards.graders.shapes import parse
from motet.rewards.reward_elsewhere import ELSEWHERE, SEALED, check
from motet.rewards.reward_forms import adapted
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_installed import Installed
from motet.rewards.reward_loading import NO_SCORER, SCORER
from motet.rewards.reward_walls import Walls
from motet.rewards.rewards import BUILTIN
from motet.service.bases import Bases
from motet.service.schemas.workers import MOST_COMPLETIONS
from motet.service.settings import Settings

_ENVIRONMENTS = (*ENVIRONMENTS, EnvironmentConfig.AGENT)
GENERATED = ("toy:", "reasoning-gym:")
HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95})?")
FILE_ENDINGS = re.compile(r"\.(jsonl?|parquet|csv)$", re.IGNORECASE)
MOST: Mapping[str, int] = {
    "steps": 1_000_000,
    "data.size": OF_A_JOB.rows,
    "sampling.max_tokens": 1_000_000,
    "algorithm.group_size": MOST_COMPLETIONS,
    "algorithm.groups_per_step": 16_384,
    "algorithm.max_off_policy_steps": 1000,
    "algorithm.updates_per_batch": 1000,
    "algorithm.rows_per_step": 131_072,
    "eval.n": 1024,
    "checkpoint.keep": 10_000,
}
"""Largest values of job fields, so that one job cannot use all memory."""
MOST_ROLLOUTS = 32_768
"""Rollouts of one step, including those sampled for selection."""
MOST_BEGUN = 256
"""Groups of a step that takes those that are done first: all begin at once, and the rest ends at once."""
MOST_EVALUATED = MOST_ROLLOUTS
"""Completions of one evaluation."""
MOST_TEXT = 100_000
"""Characters of data.template and of data.system."""
MOST_LISTED = 64
"""Rewards of a job, and stop strings."""
LONGEST_STOP = 200
"""Characters of a stop string; each is searched for at every token."""
LONGEST_TEXT = 64_000
"""Characters of a text."""
MOST_JOBS = 200
"""Jobs in a text, including sweeps."""
MOST_MEANT = 1_000_000
"""Characters of all those jobs together, each with its part of `defaults`."""


@dataclass(frozen=True)
class Allowed:
    """Resources that the operator lets jobs use."""

    hub: bool
    """Whether data may come from the hub."""
    rewards: Mapping[str, Installed]
    """By installed name."""
    addresses: Addresses
    """Addresses that HTTP rewards may use."""
    walls: Walls
    """Which rewards must run behind a wall."""
    largest: Mapping[str, Largest] = dataclasses.field(default_factory=dict)
    """Capacity of the servers of each base; no limit for bases whose servers the service does not start."""
    sent: bool = False
    """Whether tenants may send rewards of their own."""

    @classmethod
    def by(cls, settings: Settings) -> Allowed:
        """From the settings; without named hosts, HTTP rewards may use all but private ones."""
        config = settings.config
        hosts = None if config.reward_hosts is None else tuple(config.reward_hosts)
        walls = Walls(required=True, exempt=frozenset(config.unwalled))
        largest = {name: config.largest(host) for name, host in settings.hosts.items()}
        return cls(settings.hub, settings.rewards, Addresses(hosts), walls, largest, config.sent_rewards)


def validated(tree: Mapping[str, Any], allowed: Allowed, base: str = "") -> JobConfig:
    """Check a job that a tenant submits for a base, as in a job file. Raises as `check_allowed` does."""
    try:
        json.dumps(check_plain(tree), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(f"the job cannot be kept as JSON in UTF-8: {error}") from error
    job = normal_job(dict(tree))
    if job.get("team"):
        raise ConfigError("team: a service trains no teams; run this job with `motet run`")
    for section, field, known in (("algorithm", "type", ALGORITHMS), ("environment", "name", _ENVIRONMENTS)):
        _check_no_code(job.get(section), f"{section}.{field}", known)
    config = check_fields(JobConfig, job, "the job")
    check_allowed(config, allowed, base)
    return config


def check_allowed(config: JobConfig, allowed: Allowed, base: str = "") -> None:
    """Check the sizes of a job, and what it names.

    Raises:
        ConfigError, DataError, RewardError: something is not allowed here.
    """
    if config.environment.own and not config.environment.elsewhere:
        raise ConfigError(
            f"environment.name {config.environment.name!r} cannot be used here: it runs programs on the server. There are "
            f"{', '.join(_ENVIRONMENTS)}"
        )
    if config.environment.elsewhere and getattr(config.algorithm, "over_provision", 1.0) > 1:
        raise ConfigError("algorithm.over_provision puts rollouts aside, which an agent cannot be: leave it out")
    _check_sizes(config)
    _check_texts(config.data)
    check_room(config, allowed, base)
    given = (None if config.data.source == OF_CLIENT else config.data.source, config.data.eval_source)
    for source in filter(None, given):
        uploaded = source.startswith("file-")
        on_hub = (
            allowed.hub and HUB_NAME.fullmatch(source) and not FILE_ENDINGS.search(source) and not Path(source).exists()
        )
        if not uploaded and not source.startswith(GENERATED) and not on_hub:
            raise ConfigError(
                f"data.source {source!r} cannot be used here: upload the file and give its id (file-…), or use toy:NAME or "
                "reasoning-gym:NAME"
            )
        if source.startswith("toy:"):
            check_toy(source.removeprefix("toy:"))
    if (name := config.algorithm.compared_with) not in ("base", "start"):
        raise ConfigError(
            f"algorithm: {name!r} cannot be compared with here; a service knows the base and the start (adapter.init) alone"
        )
    for reward in config.rewards:
        _check_reward(reward, allowed)
    sources = (config.data.source, config.data.eval_source or "")
    graded = any(source.startswith("reasoning-gym:") for source in sources)
    if not graded and any(reward.name == SCORER for reward in config.rewards):
        raise RewardError(NO_SCORER)


def _check_no_code(section: Any, path: str, known: Collection[str]) -> None:
    """Reject a tenant's class before its file is looked up."""
    name = section.get(path.rpartition(".")[2]) if isinstance(section, dict) else None
    if isinstance(name, str) and ":" in name:
        raise ConfigError(
            f"{path} {name!r} cannot be used here: code does not run on the server. There are {', '.join(known)}"
            + ("; an agent of your own runs on your machine (motet agent)" if path == "environment.name" else "")
        )


def check_room(config: JobConfig, allowed: Allowed, base: str) -> None:
    """Check that the servers of a base take the job's adapter. Raises ConfigError if they do not."""
    largest = allowed.largest.get(base, ANY_SIZE)
    for name, wanted, most, cure in (
        ("adapter.rank", rank_of(config), largest.rank, "sets rollout.launch.max_rank"),
        ("algorithm.max_off_policy_steps", config.algorithm.lag, largest.lag, "names other servers in rollout.urls"),
    ):
        if most is not None and wanted > most:
            raise ConfigError(
                f"{name}: {wanted} is more than {most}, the most that the servers of its base were started for; whoever runs "
                f"the service {cure}"
            )


def _check_reward(reward: RewardConfig, allowed: Allowed) -> None:
    installed = allowed.rewards
    known = [*BUILTIN, SCORER, *ELSEWHERE, *installed]
    if reward.code is not None:
        sent_rewards.check(reward, allowed=allowed.sent)
    elif reward.name not in known:
        near = close_matches(reward.name, known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        refused = meant or "."
        if ":" in reward.name:
            refused = (
                f": its file was not sent (`code`).{meant}" if allowed.sent else f": {sent_rewards.REFUSED}.{meant}"
            )
        raise ConfigError(
            f"reward {reward.name!r} cannot be used here{refused} There are {', '.join(sorted(known))}; a "
            "function of your own is scored on your machine (motet submit --reward FILE)"
        )
    check(reward)
    if reward.name in BUILTIN and reward.name not in installed:
        adapted(BUILTIN[reward.name], reward.args, reward.name)
    if reward.wall is False:
        raise ConfigError(f"reward {reward.name!r}: only the service's operator can set wall: false; leave it out")
    if reward.name not in ELSEWHERE:
        allowed.walls.around(reward, installed.get(reward.name))
    if reward.name == "code" and "seconds" in reward.args:
        _check_seconds(reward)
    if reward.name in ("grader", "judge"):
        parse(reward.args, f"reward {reward.name}: args")
    if reward.name == "http":
        allowed.addresses.check(str(reward.args["url"]))
        if any(str(value).startswith(SEALED) for value in reward.args.get("headers", {}).values()):
            raise ConfigError(f"reward http: args.headers: a value may not begin with {SEALED!r}")
    if reward.name in installed:
        given = installed[reward.name]
        odd = sorted(set(reward.args) - set(given.parameters))
        missing = sorted(name for name, default in given.parameters.items() if not default and name not in reward.args)
        if odd or missing:
            what = "has no argument" if odd else "needs the argument"
            takes = ", ".join(given.parameters) or "none"
            raise ConfigError(f"reward {reward.name!r} {what} {(odd or missing)[0]!r}; it takes {takes}")


def _check_seconds(reward: RewardConfig) -> None:
    """The programs of `code` must end within the reward's own time limit."""
    seconds = reward.args["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.1 <= seconds <= reward.wall_seconds:
        raise ConfigError(
            f"reward code: args.seconds: {str(seconds)[:40]} must be a number from 0.1 to wall_seconds, which is "
            f"{reward.wall_seconds:g} for this reward"
        )


def _check_sizes(config: JobConfig) -> None:
    """Raise `ConfigError` if a number or a list is too large."""
    for name, most in MOST.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part, None)  # not every algorithm has every field
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{name}: {value} is more than {most}, the most here")
    algorithm, rollouts, begun = config.algorithm, 0.0, 0.0
    if isinstance(algorithm, PolicyGradient):
        groups = algorithm.groups_per_step * algorithm.oversampling * algorithm.over_provision
        rollouts, begun = groups * algorithm.group_size, groups * (algorithm.over_provision > 1)
    for what, count, most in (
        ("algorithm: groups_per_step · group_size rollouts of a step", rollouts, MOST_ROLLOUTS),
        ("algorithm: groups_per_step · over_provision groups of a step", begun, MOST_BEGUN),
        (
            "data.holdout · eval.n completions of an evaluation",
            config.data.held_out_of(None) * config.eval.n,
            MOST_EVALUATED,
        ),
        ("rewards", len(config.rewards), MOST_LISTED),
        ("sampling.stop", len(config.sampling.stop), MOST_LISTED),
        ("characters of a text of sampling.stop", max(map(len, config.sampling.stop), default=0), LONGEST_STOP),
    ):
        if count > most:
            raise ConfigError(f"{what}: {count:.0f} are more than {most}, the most here")


def _check_texts(data: DataConfig) -> None:
    """Raise `ConfigError` or `DataError` if a text of prompts is too long, or an argument is not allowed."""
    for name, text in (("template", data.template), ("system", data.system)):
        if text is not None and len(text) > MOST_TEXT:
            raise ConfigError(f"data.{name}: {len(text)} characters are more than {MOST_TEXT}, the most here")
    if data.template is not None:
        parts_of(data.template)
    check_variables(data.chat_template_kwargs, "data.chat_template_kwargs")


async def jobs_in(text: str, bases: Bases, pool: IsolatedPool, key: str) -> list[dict[str, Any]]:
    """`read_jobs` in a separate process, in the turn of `key`; also raises `LimitError` if too many requests wait."""
    given = json.dumps({"text": text, "places": bases.places}).encode()
    try:
        answer: dict[str, Any] = json.loads(await pool.call(key, _read_isolated, given))
    except TooMuchError as error:
        raise ConfigError(f"this cannot be read: {error}; give the jobs in parts") from error
    if "reason" in answer:
        raise ConfigError(answer["reason"])
    jobs: list[dict[str, Any]] = answer["jobs"]
    return jobs


def _read_isolated(given: bytes) -> bytes:
    """Runs in a separate process."""
    asked = json.loads(given)
    try:
        return json.dumps({"jobs": read_jobs(asked["text"], Bases(asked["places"]))}).encode()
    except ConfigError as error:
        return json.dumps({"reason": str(error)}).encode()


def read_jobs(text: str, bases: Bases) -> list[dict[str, Any]]:
    """The jobs in a text, with defaults and sweeps applied; each with its base if there are several.

    Raises:
        ConfigError: invalid YAML, a text that no database keeps, no job, too many jobs, or jobs for another base.
    """
    try:
        tree = check_plain(plain_yaml.read(text, aliases=False))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"this cannot be read as YAML or JSON: {error}") from error
    if storable(tree) != tree:  # by an escape of YAML; those of JSON are refused as the body arrives
        raise ConfigError("a text has a NUL character, or half of a surrogate pair; take it out")
    if not isinstance(tree, dict):
        raise ConfigError("write a job (name, data, reward, …), or a job file with `jobs:`")
    if "jobs" not in tree:
        return [tree]
    base = bases.named(tree.get("base"))
    _check_meant(tree)
    config = jobs_of({**tree, "base": base}, "the text")
    of_base = {"base": base} if bases.several else {}
    return [{**job.model_dump(mode="json", exclude_unset=True), **of_base} for job in config.jobs]


def _check_meant(tree: dict[str, Any]) -> None:
    """Reject sweeps and defaults that expand to too many jobs or characters."""
    total = size = 0
    shared = len(json.dumps(tree.get("defaults")))
    for job in map(_table, tree["jobs"] if isinstance(tree["jobs"], list) else []):
        whole = {**job, "sweep": {**_table(tree.get("sweep")), **_table(job.get("sweep"))}}
        count = math.prod(len(values) for values in whole["sweep"].values() if isinstance(values, list))
        total, size = total + count, size + count * (shared + len(json.dumps(whole)))
    if total > MOST_JOBS:
        raise ConfigError(f"the text means {total} jobs; at most {MOST_JOBS} at once")
    if size > MOST_MEANT:
        raise ConfigError(
            f"the text means {total} jobs of {size} characters together; at most {MOST_MEANT} at once, so give it in parts"
        )


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
