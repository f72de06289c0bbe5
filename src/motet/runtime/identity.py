"""Everything that a job's bytes depend on. Files count by name and content, not by location."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.config import GIVEN_ROWS, JobConfig
from motet.core import plain_yaml
from motet.core.checksums import hash_of, sums_of
from motet.core.plain_json import as_json
from motet.core.types import ADAPTER_WEIGHTS
from motet.data.tables import as_written
from motet.rewards.reward_elsewhere import masked, without_spending
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.code_sums import CodeSums
from motet.runtime.statements import SHOWN, short_sum

RECORD = "job.yaml"
"""The file of a job's directory that has its identity."""
NOT_FOLLOWED = "not_followed"
"""Key in a job's identity that lists code that could not be checked."""
_OWN_CODE = re.compile(r"[^\s:]+\.py:[\w.]+")


def of_config(config: JobConfig, installed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The part that is known before anything is loaded.

    `installed` maps the rewards of a service's operator to their functions; None if the job runs for its owner.
    """
    job = config.model_dump(mode="json", exclude={"checkpoint", "priority", "budget", "stop_when"})
    if not config.team:
        del job["team"]  # directories and receipts of other jobs stay as they are
    del job["eval"]["confirm"]  # as `checkpoint`: it decides what is kept
    if not config.optimizer.lr_factors:
        del job["optimizer"]["lr_factors"]
    if config.data.pools is None:
        del job["data"]["pools"]
    if not config.data.special_tokens:
        del job["data"]["special_tokens"]
    for field in ("source", "eval_source"):
        job["data"][field] = _placeless(job["data"][field])
    job["adapter"]["init"] = _placeless(job["adapter"]["init"])
    kl = job["algorithm"].get("kl") or {}
    for section in (job["algorithm"], kl):
        for field in {"reference", "teacher"} & section.keys():
            section[field] = _placeless(section[field])
    if kl.get("reference") == "base":  # identities of before stay as they are
        del kl["reference"]
    code = [(job["algorithm"], "type"), (job["environment"], "name"), *((reward, "name") for reward in job["rewards"])]
    for section, field in code:
        file, colon, function = section[field].rpartition(":")
        section[field] = f"{_placeless(file)}:{function}" if colon else section[field]
    job["rewards"] = [without_spending(masked(reward)) for reward in job["rewards"]]  # another password is no other job
    for reward in job["rewards"]:
        reward.pop("code", None)  # its statements are below
    own = _own_code(config, installed)
    entries = own.entries()
    unknown = {NOT_FOLLOWED: own.not_followed} if own.not_followed else {}
    return {
        "contents": dict(_contents(config)),
        "code": entries,
        **unknown,
        "job": job,
    }


def computed_by(directories: Iterable[JobDirectory]) -> list[str]:
    """`ModelInfo.processor` of each job that has steps; jobs whose job.yaml does not name one are skipped."""
    found = []
    for directory in directories:
        if directory.steps():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                named = re.search(r"^kernels: (.*)$", (directory.path / "job.yaml").read_text("utf-8"), re.MULTILINE)
                found.append("" if named is None else named[1].strip("'\" "))
    return found


def learned_before(job: Path, start: Path) -> str:
    """Say that rows which a job holds out may be those that its first adapter has learned; empty if they are not.

    Both jobs' records decide: the data, by the checksums of its files, and what draws rows of it. Nothing is read again.

    Args:
        job: the job's directory.
        start: the PEFT directory that it begins with: a version of a job, or a copy with that job's record.
    """
    places = [start, *start.parents[1:3]]
    record = next((place / RECORD for place in places if (place / RECORD).is_file()), None)
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        if record is not None:
            own, before = (plain_yaml.mapping_in(file) for file in (job / RECORD, record))
            return _learned(own["job"]["data"], own["contents"], before["job"]["data"], before["contents"])
    return ""


def _learned(
    own: Mapping[str, Any], sums: Mapping[str, str], its: Mapping[str, Any], its_sums: Mapping[str, str]
) -> str:
    apart = own["eval_source"]
    source, split = apart or own["source"], (apart and own["eval_split"]) or own["split"]
    same = (sums.get(source, source), split) == (its_sums.get(its["source"], its["source"]), its["split"])
    same = same and all(own[field] == its[field] for field in ("subset", "config"))
    drawn = [field for field in ("seed", "size", "holdout", "max_prompt_tokens") if own[field] != its[field]]
    drawn += ["eval_source"] if apart or its["eval_source"] else []
    if source.startswith("reasoning-gym:") and ("seed" in drawn or apart):  # whose rows are far apart
        return ""
    if not same or not drawn or own["holdout"] == 0:
        return ""
    fields = " and ".join(f"data.{field}" for field in drawn)
    return (
        f"held-out rows may be rows that the adapter has learned: the job that made it was trained on the same data, with "
        f"another {fields}; give both the same, or hold out rows of other data by data.eval_source"
    )


def _own_code(config: JobConfig, installed: Mapping[str, str] | None) -> CodeSums:
    """The project's own code for rewards, environment and algorithm."""
    own = CodeSums()
    for reward in config.rewards:
        if reward.function is not None:
            own.add_object(reward.name, reward.function)
        elif reward.code is not None:
            own.add_text(reward.name, reward.code)
        else:
            own.add((installed or {}).get(reward.name, reward.name))
    own.add(config.environment.name)
    own.add(config.algorithm.type)
    given = () if installed is not None else (config.environment.args, *(reward.args for reward in config.rewards))
    for args in given:  # a tenant's would read the server's files
        for value in args.values():
            if isinstance(value, str) and _OWN_CODE.fullmatch(value):
                own.add(value)
    return own


def _contents(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Each data file of a job, and rows given inline, with the first digits of its checksum."""
    adapters = [
        name and str(Path(name) / ADAPTER_WEIGHTS) for name in (config.adapter.init, config.algorithm.compared_with)
    ]
    if config.data.rows is not None:
        rows = json.dumps(as_json(list(as_written(config.data.rows, config.data.size))), sort_keys=True)
        yield GIVEN_ROWS, short_sum(rows)
    for name in (config.data.source, config.data.eval_source, *adapters):
        if not name:
            continue
        path = Path(os.path.expanduser(name))
        if path.is_file():
            yield path.name, hash_of(path).hexdigest()[:SHOWN]
        elif path.is_dir():  # a saved dataset
            yield path.name, short_sum(json.dumps(sums_of(path), sort_keys=True))


def _placeless(name: str | None) -> str | None:
    return Path(name).name if name and Path(os.path.expanduser(name)).exists() else name
