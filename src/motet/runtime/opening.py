"""Open a job's directory: check that it belongs to this job and is undamaged."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
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
from motet.runtime.statements import UNREACHED, sums_in

_MOST_LINES = 5
"""Most changes of a file that are told."""
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
    lines = list(_code_changes(before.get("code") or {}, now.get("code", {})))
    then = {key: before.get(key) for key in now if key not in ("code", NOT_FOLLOWED, *_BEGAN_WITH)}
    then |= {"job": known_settings(then["job"])} if "job" in then else {}
    lines += differences(then, {key: now[key] for key in then})
    return [line for line in lines if not (line.startswith("job.steps:") and _more_steps(before, now))]


def _code_changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The differences between two records of `CodeSums.entries`, by file and line."""
    for label in [*before, *(label for label in now if label not in before)]:
        old, new = before.get(label), now.get(label)
        if label in before and not isinstance(old, Mapping):  # edited by hand
            yield f"{label} was edited"
        elif old is None or new is None:
            entry = new or old or {}
            earlier = "sha256" in entry and "statements" in entry  # earlier records have files that nothing reaches
            if not (earlier or "all" in entry or (entry.get("statements") and not sums_in(entry, reached=True))):
                yield f"{label} is " + (
                    "new: the code did not use it before" if new else "gone: the code does not use it any more"
                )
        elif "value" in new and "value" in old:
            if old["value"] != new["value"]:
                yield f"{label}: was {old['value']}, is {new['value']}"
        elif "statements" in old and "statements" in new:
            yield from _line_changes(new.get("file", label), old, new)
        elif old.get("sha256") != new.get("sha256") or old.get("all") != new.get("all") or old.keys() != new.keys():
            yield f"{label} was edited" if label.endswith((".py", ".so")) else f"{label} has another value"


def _line_changes(file: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """The statements that differ between two entries, of those that the job's functions reach."""
    sums, lines = sums_in(before, reached=True), now["statements"].split()
    others = sums_in(now, reached=False)
    matched = {0}  # how many earlier statements may be met so far: of those that nothing reaches, any may be new
    for line, digest in zip(lines, others, strict=True):
        without = matched if line.startswith(UNREACHED) else ()
        matched = {n + 1 for n in matched if sums[n : n + 1] == [digest]}.union(without)
    if len(sums) in matched:
        return
    removed = [text.partition(":")[0] for text in before["statements"].split() if not text.startswith(UNREACHED)]
    reached = [not line.startswith(UNREACHED) for line in lines]
    changes = [
        change
        for change in difflib.SequenceMatcher(None, sums, others, autojunk=False).get_opcodes()
        if change[0] != "equal" and (change[0] != "insert" or any(reached[change[3] : change[4]]))
    ]
    for kind, first, _, at, _ in changes[:_MOST_LINES]:
        if kind == "delete":
            yield f"{file}:{removed[first]} was removed (a line of the earlier file)"
        else:
            line = lines[at].removeprefix(UNREACHED).partition(":")[0]
            yield f"{file}:{line} was {'added' if kind == 'insert' else 'edited'}"
    if len(changes) > _MOST_LINES:
        yield f"{file} was edited in {len(changes) - _MOST_LINES} more places"


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
