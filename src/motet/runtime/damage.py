"""What of a job's directory is not what was saved, and how a job goes on with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace

from motet.core.checksums import SUMS, Damage, compare, hash_of, version_damage
from motet.core.errors import RunError
from motet.core.plain_yaml import mapping_in
from motet.runtime.checkpoint import Committed, JobDirectory, cut_back
from motet.runtime.manifest import Record, sum_of
from motet.runtime.receipts import (
    RECEIPT,
    first_receipt,
    mend_receipts,
    read_receipt,
    receipt_damages,
    receipt_numbers,
    version_before,
)
from motet.runtime.rollout_logs import in_order, must_be_there, rollout_sums

_GO_ON = "put it back, or use --accept-changes to continue with the present files"
_REMOVE = "remove it, or use --accept-changes to keep it"
_LOOKS = 50


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
    yield from lost_commits(directory)
    yield from _added_commits(directory)


def _records(directory: JobDirectory) -> list[Record]:
    """The manifest; empty if damaged, which `record_damages` reports."""
    try:
        return directory.manifest.read()
    except ValueError:
        return []


def is_closed(directory: JobDirectory) -> bool:
    """Whether its last record was written when the job stopped."""
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
        if not mapping_in(path):
            yield Damage(path, "is damaged", remedy)
        elif allowed:
            yield Damage(path, "is not what was saved", remedy)


def lost_commits(directory: JobDirectory) -> Iterator[Damage]:
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
    if not is_closed(directory):
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
    yield from _chain_damages(directory, committed)
    steps = directory.steps()
    for version in directory.versions():
        path = directory.version(version)
        remedy = _GO_ON if version in steps else f"put it back, or remove {path} and use --accept-changes"
        yield from (replace(damage, remedy=remedy) for damage in version_damage(path))


def _chain_damages(directory: JobDirectory, committed: Committed) -> Iterator[Damage]:
    """Damage to the receipts up to the newest commit's; that one is linked after its commit."""
    newest, wanted = committed.step, committed.sums.get(RECEIPT)
    if wanted is not None and not (is_closed(directory) or (directory.receipts / f"v{newest}.json").exists()):
        try:
            copy = read_receipt(directory.path / "state" / str(newest) / RECEIPT)
        except RunError:  # a file of the commit, which is told with what to do
            return
        newest, wanted = version_before(copy) or (0, None)
    if wanted is None:
        return
    goes_on = not is_closed(directory) or any(lost_commits(directory))  # which removes receipts of later steps
    numbers = receipt_numbers(directory.receipts) if goes_on else ()
    later = {directory.receipts / f"v{number}.json" for number in numbers if number > committed.step}
    for damage in receipt_damages(directory.receipts, newest, wanted, first_receipt(directory.receipts)):
        if damage.path not in later:
            yield replace(damage, remedy=_GO_ON)


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
    closed, steps = is_closed(directory), directory.steps()
    if RECEIPT in committed.sums:
        mend_receipts(
            directory.receipts,
            committed.step,
            committed.sums[RECEIPT],
            lambda n: (directory.version(n) / RECEIPT, directory.path / "state" / str(n) / RECEIPT),
        )
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
