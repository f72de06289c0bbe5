"""Opening a job's directory: is it this job's, and is all as it was saved?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from motet.checksums import Damage, compare, hash_of, version_damage
from motet.errors import RunError
from motet.runtime.checkpoint import Committed, JobDirectory, replace_file
from motet.tasks.reward_elsewhere import masked

_GO_ON = "put it back, or go on with what is there by --accept-changes"

COMPUTING = ("dtype", "device", "versions", "kernels", "numerics", "block_size", "micro_batch_tokens")
"""What of a job's identity says how it is computed."""
_BEFORE = "computed_before"


def open_job(
    directory: JobDirectory, identity: Mapping[str, Any], *, accept_changes: bool = False, accept_damage: bool = False
) -> tuple[str, ...]:
    """Make the directory, or make sure that it is this job's and whole.

    Args:
        directory: of the job.
        identity: everything the job's bytes depend on; kept in job.yaml.
        accept_changes: go on although it differs from what the directory was made with.
        accept_damage: go on although logs, rollouts or versions are not what was saved; weights and moments have to be.

    Returns:
        How steps that are done were computed otherwise than those to come: the job's bytes are those of neither.

    Raises:
        RunError: it belongs to a different job, and what differs; or it is damaged, and what to do.
    """
    check_identity(directory, identity, accept_changes=accept_changes)
    for name in ("state", "versions", "rollouts"):
        (directory.path / name).mkdir(parents=True, exist_ok=True)
    if accept_damage and (newest := directory.newest()) and any(record_damages(directory, newest)):
        accept(directory, newest)
    for damage in damages(directory, directory.steps()):
        raise RunError(str(damage))
    otherwise = _computed_otherwise(directory, identity)
    kept = {_BEFORE: otherwise} if otherwise else {}
    replace_file(directory.path / "job.yaml", _as_yaml({**identity, **kept}).encode())
    return tuple(otherwise)


def _computed_otherwise(directory: JobDirectory, identity: Mapping[str, Any]) -> list[str]:
    path, steps = directory.path / "job.yaml", directory.steps()
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    if not steps or not steps[-1]:
        return []
    if not isinstance(before, dict):
        return ["nobody knows how its first steps were computed: job.yaml was damaged"]
    then = {key: before[key] for key in COMPUTING if key in before}
    now = yaml.safe_load(_as_yaml(identity))
    changes = differences(then, {key: now.get(key) for key in then})
    known = [str(line) for line in before.get(_BEFORE, ())]
    new = (
        change for change in changes if not any(line.startswith(f"{change} (") for line in known)
    )  # hosts may take turns
    return [*known, *(f"{change} (from step {steps[-1]} on)" for change in new)]


def check_identity(directory: JobDirectory, identity: Mapping[str, Any], *, accept_changes: bool) -> None:
    """Compare a job, or the part of it that is given, with what its directory was made with.

    Raises:
        RunError: something differs.
    """
    path = directory.path / "job.yaml"
    if accept_changes or not path.exists() or not directory.steps():
        return
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict):
        raise RunError(f"{path} is damaged: put it back, or go on with the job as it is by --accept-changes")
    now, before = yaml.safe_load(_as_yaml(identity)), _masked(before)
    changes = list(differences({key: before.get(key) for key in now}, now))
    if _more_steps(before, now):
        changes = [change for change in changes if not change.startswith("job.steps:")]
    if changes:
        listed = "\n  ".join(changes)
        raise RunError(
            f"{directory.path} was made by a different job, and has done {directory.steps()[-1]} steps of it:\n  {listed}\n"
            "Use another run directory, change it back, or go on with the changed job by --accept-changes "
            "(accept_changes=True in Python)."
        )


def mask_headers(directory: JobDirectory) -> None:
    """Take the values of headers out of a job.yaml that an older release wrote."""
    path = directory.path / "job.yaml"
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return
    if isinstance(before, dict) and (after := _masked(before)) != before:
        replace_file(path, _as_yaml(after).encode())


def _masked(identity: Mapping[str, Any]) -> dict[str, Any]:
    job = identity.get("job")
    rewards = job.get("rewards") if isinstance(job, Mapping) else None
    if not isinstance(job, Mapping) or not isinstance(rewards, list):
        return dict(identity)
    shown = [masked(one) if isinstance(one, Mapping) else one for one in rewards]
    return {**identity, "job": {**job, "rewards": shown}}


def _more_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether more steps are wanted of a job whose past does not depend on how many there are."""
    old, new = (tree.get("job") or {} for tree in (before, now))
    constant = (new.get("optimizer") or {}).get("schedule") == "constant"
    return constant and isinstance(old.get("steps"), int) and old["steps"] < new.get("steps", 0)


def _as_yaml(identity: Mapping[str, Any]) -> str:
    return yaml.safe_dump(json.loads(json.dumps(identity)), sort_keys=False, allow_unicode=True)


def differences(before: Any, after: Any, path: str = "") -> Iterable[str]:
    """Where two trees of plain values differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield f"{path}: was {before!r}, is {after!r}"


def damages(directory: JobDirectory, steps: Sequence[int]) -> Iterator[Damage]:
    """What is wrong with these commits, and with what the newest of them names besides its own files."""
    newest, logs = None, {path.name for path in directory.logs}
    for step in steps:
        path = directory.path / "state" / str(step)
        try:
            newest = directory.committed(step)
        except RunError as error:
            yield Damage(path / "state.json", f"is damaged ({error.__cause__})", directory.remedy(step))
        else:
            own = {name: value for name, value in newest.sums.items() if name not in logs}
            yield from compare(path, own, directory.remedy(step))
    if newest is not None and newest.step == steps[-1]:
        yield from record_damages(directory, newest)


def record_damages(directory: JobDirectory, committed: Committed) -> Iterator[Damage]:
    """What is wrong with logs, rollouts and versions: training could go on without them."""
    intact = True
    for path in directory.logs:
        length = committed.length(path)
        if not path.is_file():
            yield Damage(path, "is missing", _GO_ON)
        elif path.stat().st_size < length:
            yield Damage(path, f"has {path.stat().st_size} of the {length} bytes that were saved", _GO_ON)
        elif hash_of(path, length).hexdigest() != committed.sums[path.name]:
            yield Damage(path, f"is not what was saved in its first {length} bytes", _GO_ON)
        else:
            continue
        intact = intact and path != directory.checksums
    if intact:
        yield from _rollout_damage(directory, committed)
    best = [] if committed.best_version is None else [committed.best_version]
    for version in sorted({*directory.steps(), *best} - {committed.step}):  # the newest is made again from its commit
        if not (path := directory.version(version)).is_dir():
            yield Damage(path, "is missing", _GO_ON)
        yield from version_damage(path)


def _rollout_damage(directory: JobDirectory, committed: Committed) -> Iterator[Damage]:
    """The oldest go when there are too many, all but the first evaluation; one that is missing after another is damage."""
    lines = directory.checksums.read_bytes()[: committed.checksums_bytes].splitlines()
    sums = {entry["file"]: entry["sha256"] for entry in map(json.loads, lines)}
    folder: Path = directory.path / "rollouts"
    there = [name for name in sums if (folder / name).is_file()]
    oldest = next((name for name in there if name != "eval-0.jsonl"), None)
    names = list(sums)
    kept = names[names.index(oldest) :] if oldest else names[-1:]
    kept += ["eval-0.jsonl"] if "eval-0.jsonl" in sums else []
    yield from compare(folder, {name: sums[name] for name in dict.fromkeys(kept)}, _GO_ON)


def accept(directory: JobDirectory, committed: Committed) -> None:
    """Take logs, rollouts and versions as they are: whole lines stay, and their sums are made anew."""
    for path in directory.logs:
        lines = path.read_bytes()[: committed.length(path)].splitlines(keepends=True) if path.is_file() else []
        path.write_bytes(b"".join(line for line in lines if _is_whole(line)))
    folder = directory.path / "rollouts"
    by_age = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    records = ({"file": path.name, "sha256": hash_of(path).hexdigest()} for path in by_age)
    directory.checksums.unlink(missing_ok=True)
    directory.forget()
    for record in records:
        directory.append(directory.checksums, record)
    directory.commit(committed, lambda _: None)
    for step in directory.steps():
        directory.link_version(step)


def _is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False
