"""Everything that a job's bytes depend on. Files count by name and content, not by location."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.config import GIVEN_ROWS, JobConfig
from motet.core.checksums import hash_of, sums_of
from motet.core.types import ADAPTER_WEIGHTS
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.function_sums import FunctionSums
from motet.runtime.source_sums import SHOWN, CodeSums
from motet.tasks.plain_json import as_json
from motet.tasks.reward_elsewhere import masked, without_spending
from motet.tasks.tables import as_written

NOT_FOLLOWED = "not_followed"
"""Key in a job's identity that lists code that could not be checked."""
_OWN_CODE = re.compile(r"[^\s:]+\.py:[\w.]+")


def of_config(config: JobConfig, installed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The part that is known before anything is loaded; `installed` maps an operator's rewards to their functions."""
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
    sources = _sources(config, installed or {})
    unknown = {NOT_FOLLOWED: sources.not_followed} if sources.not_followed else {}
    return {
        "contents": dict(_contents(config)),
        "code": dict(sorted(sources.code.items())),
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


def _sources(config: JobConfig, installed: Mapping[str, str]) -> CodeSums:
    """Checksums of the project's own code for rewards, environment and algorithm."""
    sources = CodeSums()
    functions = FunctionSums(sources)
    for reward in config.rewards:
        if reward.function is not None:
            functions.add(reward.name, reward.function)
        else:
            sources.add(installed.get(reward.name, reward.name))
    sources.add(config.environment.name)
    sources.add(config.algorithm.type)
    for args in (config.environment.args, *(reward.args for reward in config.rewards)):
        for value in args.values():
            if isinstance(value, str) and _OWN_CODE.fullmatch(value):
                sources.add(value)
    return sources


def _contents(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Each data file of a job, and rows given inline, with the first digits of its checksum."""
    adapters = [
        name and str(Path(name) / ADAPTER_WEIGHTS) for name in (config.adapter.init, config.algorithm.compared_with)
    ]
    if config.data.rows is not None:
        rows = json.dumps(as_json(list(as_written(config.data.rows, config.data.size))), sort_keys=True)
        yield GIVEN_ROWS, hashlib.sha256(rows.encode("utf-8", "surrogatepass")).hexdigest()[:SHOWN]
    for name in (config.data.source, config.data.eval_source, *adapters):
        if not name:
            continue
        path = Path(os.path.expanduser(name))
        if path.is_file():
            yield path.name, hash_of(path).hexdigest()[:SHOWN]
        elif path.is_dir():  # a saved dataset
            files = json.dumps(sums_of(path), sort_keys=True)
            yield path.name, hashlib.sha256(files.encode("utf-8", "surrogatepass")).hexdigest()[:SHOWN]


def _placeless(name: str | None) -> str | None:
    return Path(name).name if name and Path(os.path.expanduser(name)).exists() else name
