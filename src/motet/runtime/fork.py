"""Start a new job from a commit of another, with its weights, moments, counters and data position."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from motet.core.checksums import link, replace_file, sealed, sync, unsealed
from motet.core.errors import RunError
from motet.rewards.judge_answers import FILE, JudgeAnswers
from motet.runtime.checkpoint import FORKED, Committed, JobDirectory

_TRIES = 10
"""How often a fork begins again because the job deletes files meanwhile."""


def fork(job: JobDirectory, step: int, new: Path, lag: int, settings: Mapping[str, Any] | None = None) -> JobDirectory:
    """Copy a commit, and those that next steps with this lag sample from, to a new directory.

    The new job opens like one whose changes were accepted. `settings` are fields of its job that differ, and that do not change
    the steps so far.

    Raises:
        RunError: a commit does not exist, or the directory is not empty.
    """
    if new.exists() and any(new.iterdir()):
        raise RunError(f"{new} is not empty: choose another directory")
    steps = range(max(0, step - lag), step + 1)
    for left in reversed(range(_TRIES)):
        if missing := [number for number in reversed(steps) if number not in job.steps()]:
            kept = ", ".join(map(str, job.steps())) or "none"
            what = f", which algorithm.max_off_policy_steps: {lag} needs" if missing[0] < step else ""
            version = job.version(step)
            start = f", or start a new job from the weights of v{step} without the optimizer's state (adapter.init: {version})"
            raise RunError(
                f"{job.path} keeps no commit of step {missing[0]}{what} (it has {kept}); raise checkpoint.keep to keep "
                f"more commits{start * version.is_dir()}"
            )
        try:
            draft = _drafted(job, steps, new, settings)
            break
        except (FileNotFoundError, RunError):  # the job runs, and deleted an old file meanwhile
            if not left:
                raise
    if new.exists():
        new.rmdir()
    draft.rename(new)
    sync(new.parent)
    return JobDirectory(new)


def _drafted(job: JobDirectory, steps: range, new: Path, settings: Mapping[str, Any] | None) -> Path:
    """The new directory under another name, with these commits."""
    draft = new.with_name(f".tmp-{new.name}")
    shutil.rmtree(draft, ignore_errors=True)
    for name in ("state", "versions", "rollouts", "receipts"):
        (draft / name).mkdir(parents=True)
    step, copied = steps[-1], JobDirectory(draft)
    for kept_step in steps:  # first: they are what the job deletes first
        job.committed(kept_step)  # names its own file if that is damaged
        _link_all(job.path / "state" / str(kept_step), draft / "state" / str(kept_step))
    done = copied.committed(step)
    for number in (version for version in job.versions() if version <= step):
        _link_all(job.version(number), copied.version(number))
    for number in {*steps, step if done.best_version is None else done.best_version} - {step, *copied.versions()}:
        raise RunError(f"{job.version(number)} is missing: put it back, or fork from another step")
    for number in range(step + 1):
        if (path := job.receipts / f"v{number}.json").is_file():
            link(path, draft / "receipts" / path.name)
    for path in (job.path / "rollouts").glob("*.jsonl"):
        match = re.fullmatch(r"(eval-)?(\d+)", path.stem)
        if match and (int(match[2]) <= done.evaluated if match[1] else int(match[2]) < step):
            link(path, draft / "rollouts" / path.name)
    for kept_step in steps:
        changed = _copy_logs(job, copied.committed(kept_step), draft)
        state = draft / "state" / str(kept_step) / "state.json"
        replace_file(state, sealed({**unsealed(state.read_bytes()), **changed, "after": ""}))  # it has no manifest yet
    identity = (job.path / "job.yaml").read_bytes()
    if settings is not None:
        tree = yaml.safe_load(identity)
        tree["job"] |= settings
        identity = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()
    replace_file(draft / "job.yaml", identity)
    JudgeAnswers(job.path / FILE).copy(draft / FILE)
    replace_file(draft / FORKED, json.dumps({"from": str(job.path.resolve()), "step": step}).encode())
    return draft


def _copy_logs(job: JobDirectory, done: Committed, draft: Path) -> dict[str, Any]:
    """Copy the committed part of the logs. Returns the new commit's lengths and sums, without deleted rollouts."""
    lengths, sums = dict[str, int](), dict(done.sums)
    for path in job.logs:
        with path.open("rb") as file:
            lines = file.read(done.length(path)).splitlines(keepends=True)
        if path == job.checksums:
            lines = [line for line in lines if (draft / "rollouts" / json.loads(line)["file"]).is_file()]
        data = b"".join(lines)
        replace_file(draft / path.name, data)
        lengths[f"{path.stem}_bytes"], sums[path.name] = len(data), hashlib.sha256(data).hexdigest()
    return {**lengths, "sums": sums}


def _link_all(there: Path, here: Path) -> None:
    here.mkdir(parents=True)
    for path in there.iterdir():
        if path.is_dir():  # of a critic, or of a role
            _link_all(path, here / path.name)
        else:
            link(path, here / path.name)
