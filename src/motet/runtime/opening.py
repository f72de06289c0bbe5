"""Open a job's directory: check that it belongs to this job and is undamaged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from motet.core.checksums import replace_file
from motet.core.errors import RunError
from motet.runtime.checkpoint import FORKED, JobDirectory
from motet.runtime.damage import (
    accept,
    commit_damages,
    damages,
    identity_damage,
    identity_in,
    is_closed,
    lost_commits,
    record_damages,
    values_of,
)
from motet.runtime.identity import NOT_FOLLOWED
from motet.runtime.receipts import differences, known_settings, without_arguments
from motet.runtime.source_sums import code_changes

_BEFORE = "computed_before"
_BEGAN_WITH = ("rules", "clock")
"""Not compared as settings are: a job keeps its clock, and `beginning.check_rules` compares the rules."""


def open_job(
    directory: JobDirectory, identity: Mapping[str, Any], *, accept_changes: bool = False, accept_damage: bool = False
) -> tuple[str, ...]:
    """Create the directory, or check that it belongs to this job and is undamaged.

    A changed job that has done no step starts over, unless its changes are accepted.

    Args:
        directory: the job's directory.
        identity: everything the job's bytes depend on; stored in job.yaml.
        accept_changes: continue although the identity differs from the stored one.
        accept_damage: continue although logs, rollouts or versions are damaged; weights and moments must be intact.

    Returns:
        How finished steps were computed differently from the coming ones; the job's bytes then match neither setup.

    Raises:
        RunError: it belongs to a different job or is damaged; the message says what to do.
    """
    accept_changes = accept_changes or (directory.path / FORKED).exists()
    text, before, steps = _as_yaml(identity), identity_in(directory), directory.steps()
    now = values_of(text)
    if steps == [0] and not accept_changes and before is not None and _changes(before, now):
        directory.delete()
        steps = []
    if steps:
        _check_same(directory, before, now, steps[-1], accept_changes=accept_changes)
    for name in ("state", "versions", "rollouts"):
        (directory.path / name).mkdir(parents=True, exist_ok=True)
    otherwise = _computed_otherwise(before, now, steps[-1]) if any(steps) else []
    described = (_as_yaml({**identity, _BEFORE: otherwise}) if otherwise else text).encode()
    if accept_changes:
        _accept_changes(directory, described)
    if accept_damage and not any(commit_damages(directory)):
        newest = directory.newest()
        if newest is not None and any(record_damages(directory, newest)):
            accept(directory, newest)
    for damage in damages(directory):
        raise RunError(str(damage))
    directory.describe(described)
    return tuple(otherwise)


def changed_since(directory: JobDirectory, known: Mapping[str, Any]) -> bool:
    """Whether a job, or the given part of its identity, differs from the one in its directory."""
    before = identity_in(directory)
    return before is not None and bool(_changes(before, values_of(_as_yaml(known))))


def _accept_changes(directory: JobDirectory, described: bytes) -> None:
    """Update job.yaml; if later commits were lost, continue from the newest one."""
    lost = directory.steps() != [] and any(lost_commits(directory))
    changed = any(identity_damage(directory))
    if changed:
        replace_file(directory.path / "job.yaml", described)
    if changed or lost:
        directory.record(directory.steps(), directory.versions(), closed=not lost and is_closed(directory))


def _computed_otherwise(before: Mapping[str, Any] | None, now: Mapping[str, Any], step: int) -> list[str]:
    if before is None:
        return ["nobody knows how its first steps were computed: job.yaml was damaged"]
    now = {**shared_fields(before, now), **({"code": now["code"]} if "code" in now else {})}
    then, now = ({**one, "job": without_arguments(one.get("job") or {})} for one in (before, now))  # receipts list it
    changes = _changes(then, now)
    known = [str(line) for line in before.get(_BEFORE, ())]
    # unlike hosts may take turns with a run: each difference is listed once
    new = (change for change in changes if not any(line.startswith(f"{change} (") for line in known))
    return [*known, *(f"{change} (from step {step} on)" for change in new)]


def check_identity(directory: JobDirectory, identity: Mapping[str, Any], *, accept_changes: bool) -> list[str]:
    """Compare a job, or the given part of its identity, with the identity in its directory.

    Returns:
        The accepted differences, one line each.

    Raises:
        RunError: something differs and `accept_changes` is not set.
    """
    path, steps = directory.path / "job.yaml", directory.steps()
    if not path.exists() or not steps:
        return []
    accept_changes = accept_changes or (directory.path / FORKED).exists()
    now = values_of(_as_yaml(identity))
    return _check_same(directory, identity_in(directory), now, steps[-1], accept_changes=accept_changes)


def _check_same(
    directory: JobDirectory,
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    step: int,
    *,
    accept_changes: bool,
) -> list[str]:
    """`check_identity` of a job that has done `step` steps; `before` is None where its job.yaml cannot be read."""
    path = directory.path / "job.yaml"
    if (before is None and accept_changes) or not path.exists():
        return []
    if before is None:
        raise RunError(f"{path} is damaged: put it back, or use --accept-changes to continue with the job as it is")
    changes = _changes(before, now) if step else []
    if changes and not accept_changes:
        raise RunError(
            f"{of_another_job(directory, changes)}Use another run directory (--run; in Python and notebooks directory=…), undo "
            "the change, or continue with the changed job by --accept-changes (accept_changes=True in Python)."
        )
    return changes


def of_another_job(directory: JobDirectory, changes: Iterable[str]) -> str:
    """Say how the job of a directory differs, each difference on a line."""
    listed = "".join(f"  {change}\n" for change in changes)
    return f"{directory.path} was made by a different job, and has done {directory.steps()[-1]} steps of it:\n{listed}"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between a job and its directory, one line each; additional steps do not count."""
    lines = list(code_changes(before.get("code") or {}, now.get("code", {})))
    then = {key: before.get(key) for key in now if key not in ("code", NOT_FOLLOWED, *_BEGAN_WITH)}
    then |= {"job": known_settings(then["job"])} if "job" in then else {}
    lines += differences(then, {key: now[key] for key in then})
    return [line for line in lines if not (line.startswith("job.steps:") and _more_steps(before, now))]


def shared_fields(before: Any, now: Any) -> Any:
    """Drop fields that an earlier tree does not have: a field added by a newer Motet is not a change."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: shared_fields(before[key], value) for key, value in now.items() if key in before}
    return now


def _more_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether only the number of steps grew, under a schedule that does not depend on it."""
    old, new = (tree.get("job") or {} for tree in (before, now))
    constant = (new.get("optimizer") or {}).get("schedule") == "constant"
    return constant and isinstance(old.get("steps"), int) and old["steps"] < new.get("steps", 0)


def _as_yaml(identity: Mapping[str, Any]) -> str:
    return yaml.safe_dump(json.loads(json.dumps(identity)), sort_keys=False, allow_unicode=True)
