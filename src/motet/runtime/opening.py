"""Open a job's directory: check that it belongs to this job and is undamaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from motet.core.checksums import SUMS, Damage, compare, hash_of, replace_file, version_damage
from motet.core.errors import RunError
from motet.runtime.checkpoint import FORKED, Committed, JobDirectory, cut_back
from motet.runtime.identity import NOT_FOLLOWED
from motet.runtime.manifest import Record, sum_of
from motet.runtime.receipts import differences, known_settings, without_arguments
from motet.runtime.rollout_logs import in_order, must_be_there, rollout_sums
from motet.runtime.source_sums import code_changes

_GO_ON = "put it back, or use --accept-changes to continue with the present files"
_REMOVE = "remove it, or use --accept-changes to keep it"
_BEFORE = "computed_before"
_BEGAN_WITH = ("rules", "clock")
"""Not compared as settings are: a job keeps its clock, and `beginning.check_rules` compares the rules."""
_LOOKS = 50
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast; a host opens all its jobs when it resumes."""


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
    now = _values(text)
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
    return before is not None and bool(_changes(before, _values(_as_yaml(known))))


def identity_in(directory: JobDirectory) -> dict[str, Any] | None:
    """The content of job.yaml; None if it cannot be read."""
    try:
        values = _values((directory.path / "job.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return values if isinstance(values, dict) else None


def _accept_changes(directory: JobDirectory, described: bytes) -> None:
    """Update job.yaml; if later commits were lost, continue from the newest one."""
    lost = directory.steps() != [] and any(_lost_commits(directory))
    changed = any(identity_damage(directory))
    if changed:
        replace_file(directory.path / "job.yaml", described)
    if changed or lost:
        directory.record(directory.steps(), directory.versions(), closed=not lost and _closed(directory))


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
    now = _values(_as_yaml(identity))
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


def _values(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _as_yaml(identity: Mapping[str, Any]) -> str:
    return yaml.safe_dump(json.loads(json.dumps(identity)), sort_keys=False, allow_unicode=True)


def damages(directory: JobDirectory) -> list[Damage]:
    """Missing, added and altered files. Checked again if another process commits or deletes meanwhile."""
    wrong: list[Damage] = []
    for left in reversed(range(_LOOKS)):
        before = sum_of(directory.manifest.path)
        try:
            wrong = list(_damages(directory))
        except FileNotFoundError:
            if not left:
                raise
            continue
        if not wrong or sum_of(directory.manifest.path) == before:
            break
    return wrong


def _damages(directory: JobDirectory) -> Iterator[Damage]:
    yield from commit_damages(directory)
    yield from identity_damage(directory)
    try:
        newest = directory.newest()
    except RunError:  # already reported
        return
    if newest is not None:
        yield from record_damages(directory, newest)


def commit_damages(directory: JobDirectory) -> Iterator[Damage]:
    """Damage to weights and moments, which prevents training."""
    logs = {path.name for path in directory.logs}
    for step in directory.steps():
        path = directory.path / "state" / str(step)
        try:
            committed = directory.committed(step)
        except RunError as error:
            yield Damage(path / "state.json", f"is damaged ({error.__cause__})", directory.remedy(step))
        else:
            own = {name: value for name, value in committed.sums.items() if name not in logs}
            yield from compare(path, own, directory.remedy(step))
    yield from _lost_commits(directory)
    yield from _added_commits(directory)


def _records(directory: JobDirectory) -> list[Record]:
    """The manifest; empty if damaged, which `record_damages` reports."""
    try:
        return directory.manifest.read()
    except ValueError:
        return []


def _closed(directory: JobDirectory) -> bool:
    return any(record.closed for record in _records(directory)[-1:])


def identity_damage(directory: JobDirectory) -> Iterator[Damage]:
    """Whether job.yaml is unchanged since the job was last opened."""
    path, remedy = directory.path / "job.yaml", "put it back, or use --accept-changes to continue with the job as it is"
    allowed = {record.job for record in _records(directory)} - {""}  # it is written after the record that lists it
    if not directory.steps():
        return
    if not path.exists() and allowed:
        yield Damage(path, "is missing", remedy)
    elif path.exists() and sum_of(path) not in allowed:
        if identity_in(directory) is None:
            yield Damage(path, "is damaged", remedy)
        elif allowed:
            yield Damage(path, "is not what was saved", remedy)


def _lost_commits(directory: JobDirectory) -> Iterator[Damage]:
    """Commits newer than the newest one found. Without them, the job would train over its own versions."""
    steps, records, state = directory.steps(), _records(directory), directory.path / "state"
    anew = f"put it back, or remove {directory.path} to train the job from the start"
    if not records and not steps and directory.versions():
        yield Damage(state, "is missing", anew)
    remedy = f"put it back, or return to step {steps[-1]} with --accept-changes" if steps else anew
    for step in sorted(map(int, records[-1].state)) if records else []:
        if step > max(steps, default=-1):
            yield Damage(state / str(step), "is missing", remedy)


def _added_commits(directory: JobDirectory) -> Iterator[Damage]:
    """Commits that the manifest does not list and that do not follow it; older ones may wait for deletion."""
    records = _records(directory)
    known = {pair for record in records for pair in record.state.items()}
    for step in directory.steps() if records else []:
        path = directory.path / "state" / str(step)
        try:
            follows = directory.committed(step).after == records[-1].sum
        except RunError:  # already reported
            continue
        if not follows and (str(step), sum_of(path / "state.json")) not in known:
            yield Damage(path, "was not saved here", "put the saved one back, or remove it")


def _manifest_damage(directory: JobDirectory, committed: Committed) -> Iterator[Damage]:
    """Damage to the manifest, and missing or unlisted versions and older commits."""
    try:
        records = directory.manifest.read()
    except ValueError as error:
        yield Damage(directory.manifest.path, f"is damaged ({error})", _GO_ON)
        return
    if not records:
        if committed.after:
            yield Damage(directory.manifest.path, "is missing", _GO_ON)
        return
    steps, versions = directory.steps(), directory.versions()
    for step in sorted(set(map(int, records[-1].state)) - set(steps)):
        if step < committed.step:
            yield Damage(directory.path / "state" / str(step), "is missing", _GO_ON)
    for number, wanted in records[-1].versions.items():
        path = directory.version(int(number))
        if not path.is_dir():
            yield Damage(path, "is missing", _GO_ON)
        elif wanted and sum_of(path / SUMS) not in (
            wanted,
            "",
        ):  # without a list of sums, the owner changed the version
            yield Damage(path, "is not what was saved", _GO_ON)
    known = {number for record in records for number in record.versions} | set(map(str, steps))
    for number in map(str, versions):
        if number not in known:
            yield Damage(directory.version(int(number)), "was added", _REMOVE)


def _late_damage(directory: JobDirectory, committed: Committed) -> Iterator[Damage]:
    """Additions to logs and rollouts after the job stopped cleanly."""
    if not _closed(directory):
        return
    for path in directory.logs:
        length = committed.length(path)
        if path.is_file() and (more := path.stat().st_size - length) > 0:
            cut = f"truncate it to {length} bytes, or use --accept-changes, which does that"
            yield Damage(path, f"has {more} bytes after those that were saved", cut)
    known = rollout_sums(directory.checksums, committed.checksums_bytes)
    for path in sorted((directory.path / "rollouts").glob("*.jsonl")):
        if path.name not in known and path.stem.removeprefix("eval-").isdecimal():
            yield Damage(path, "was added", _REMOVE)


def record_damages(directory: JobDirectory, committed: Committed) -> Iterator[Damage]:
    """Damage to logs, rollouts and versions; training could continue without them."""
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
        folder, sums = directory.path / "rollouts", rollout_sums(directory.checksums, committed.checksums_bytes)
        kept = must_be_there(sums, {path.name for path in folder.glob("*.jsonl")})  # others may have been pruned
        yield from compare(folder, {name: sums[name] for name in kept}, _GO_ON)
        yield from _late_damage(directory, committed)
    yield from _manifest_damage(directory, committed)
    best = [] if committed.best_version is None else [committed.best_version]
    listed = {int(number) for record in _records(directory)[-1:] for number in record.versions}
    # the newest is left out: it is linked after its commit
    for version in sorted({*directory.steps(), *best} - {committed.step} - listed):
        if not directory.version(version).is_dir():
            yield Damage(directory.version(version), "is missing", _GO_ON)
    steps = directory.steps()
    for version in directory.versions():
        path = directory.version(version)
        remedy = _GO_ON if version in steps else f"put it back, or remove {path} and use --accept-changes"
        yield from (replace(damage, remedy=remedy) for damage in version_damage(path))


def accept(directory: JobDirectory, committed: Committed) -> None:
    """Accept damaged logs, rollouts and versions: keep complete lines, make versions again, and compute new sums.

    What was written after the commit is removed, as `JobDirectory.restore` will: it must not count as saved.
    """
    cut_back(directory, committed)
    for path in directory.logs:
        lines = path.read_bytes()[: committed.length(path)].splitlines(keepends=True) if path.is_file() else []
        path.write_bytes(b"".join(line for line in lines if _is_whole(line)))
    folder = directory.path / "rollouts"
    logs = in_order(path.name for path in folder.glob("*.jsonl"))
    records = ({"file": name, "sha256": hash_of(folder / name).hexdigest()} for name in logs)
    closed, steps = _closed(directory), directory.steps()
    if (best := committed.best_version) is not None and best not in {*steps, *directory.versions()}:
        committed = replace(committed, best_version=None, best_reward=None, best_tie=0.0)
    directory.checksums.unlink(missing_ok=True)
    directory.forget()
    directory.manifest.begin()
    for record in records:
        directory.append(directory.checksums, record)
    directory.commit(committed, lambda _: None)
    for step in steps:
        if any(version_damage(directory.version(step))):  # its state is intact: it is made again
            shutil.rmtree(directory.version(step))
        directory.link_version(step)
    directory.record(directory.steps(), directory.versions(), closed=closed)


def _is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False
