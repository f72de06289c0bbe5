"""Jobs out of a text that a stranger gives: YAML or JSON, a job file or a single job. A few lines of it can mean gigabytes."""

from __future__ import annotations

import json
import math
from typing import Any

from motet import plain_yaml
from motet.errors import ConfigError
from motet.jobfile import jobs_of
from motet.tasks.plain_json import check_plain

LONGEST = 64_000
"""Characters of a text."""
MOST_JOBS = 200
"""That a text means, with its sweeps."""
MOST_MEANT = 1_000_000
"""Characters of all those jobs together, each with its share of `defaults`."""


def read_jobs(text: str, base: str) -> list[dict[str, Any]]:
    """The jobs that a text holds, with defaults and sweeps applied.

    Raises:
        ConfigError: it is no YAML, holds no job, more than anybody means, or jobs for another base.
    """
    try:
        tree = check_plain(plain_yaml.read(text, aliases=False))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"this cannot be read as YAML or JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError("write a job (name, data, reward, …), or a job file with `jobs:`")
    if "jobs" not in tree:
        return [tree]
    if (wanted := tree.get("base", base)) != base:
        raise ConfigError(f"base is {wanted!r}, but this service trains {base!r}; leave `base` out")
    _check_meant(tree)
    config = jobs_of({**tree, "base": base}, "the text")
    return [job.model_dump(mode="json", exclude_unset=True) for job in config.jobs]


def _check_meant(tree: dict[str, Any]) -> None:
    """Sweeps multiply, and each job has the defaults; refuse those that would be more than anybody means."""
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
