"""A job's directory, and commits in it: after `kill -9` at any moment the newest whole commit is what counts.

    <run>/<job>/
      job.yaml               what the job is; a changed job is refused with the difference
      metrics.jsonl          one line a step, deterministic; cut back to the committed length on resume
      timings.jsonl          seconds and rates of the same steps
      rollouts/<step>.jsonl  what was sampled and scored; eval-<version>.jsonl of evaluations
      state/<step>/          one commit: adapter, optimizer, state.json; renamed into place when whole and synced
      versions/v<n>/         the same adapters as plain PEFT directories: the newest, the best and the last

Step s turns version s into s + 1, so state/<n> and versions/v<n> belong together.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from motet.errors import DiskFull, RunError
from motet.tasks.plain_json import as_json
from motet.types import ADAPTER_FILES


@dataclass(frozen=True)
class Committed:
    """What a job knows about itself at a commit, besides weights and moments."""

    step: int = 0
    """Steps done; also the version that the weights are."""
    skipped_in_row: int = 0
    """Steps in a row whose gradient was not finite."""
    best_version: int | None = None
    best_reward: float | None = None
    """By evaluation."""
    evaluated: int = -1
    """Newest version whose evaluation is in the metrics."""
    tokens_sampled: int = 0
    """Those of evaluations included."""
    tokens_trained: int = 0
    position: int = 0
    """The next problem that was never begun, where steps do not take a window each."""
    pending: tuple[int, ...] = ()
    """Problems before it that were begun and not trained."""
    metrics_bytes: int = 0
    timings_bytes: int = 0
    threads: int = 0
    """Torch threads of the process that committed; sums of a whole gradient depend on it."""
    inexact: tuple[str, ...] = ()
    """Why the job's bytes may depend on the clock or on its company; empty when they do not."""

    @property
    def tokens(self) -> int:
        """Sampled and trained: what a budget is about."""
        return self.tokens_sampled + self.tokens_trained


def dump_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON; what is not finite becomes null, and half a character a question mark."""
    return (json.dumps(as_json(record), ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


class JobDirectory:
    """Files of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"

    # --- opening -----------------------------------------------------------------------------------------------------

    def open(self, identity: Mapping[str, Any], *, accept_changes: bool = False) -> None:
        """Make the directory, or make sure that it is this job's.

        Args:
            identity: everything the job's bytes depend on; kept in job.yaml.
            accept_changes: go on although it differs from what the directory was made with.

        Raises:
            RunError: it belongs to a different job; says what differs.
        """
        for name in ("state", "versions", "rollouts"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._check_identity(identity, accept_changes)

    def restore(self) -> Committed | None:
        """Take the directory up where its newest commit left it: whatever was written later is cut off."""
        for leftover in [*self.path.glob("*/.tmp-*"), *self.path.glob(".tmp-*")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        committed = self.newest()
        self._cut_back(committed)
        if committed is not None:
            self.link_version(committed.step)  # the crash may have come between the commit and its link
        return committed

    def _check_identity(self, identity: Mapping[str, Any], accept_changes: bool) -> None:
        path = self.path / "job.yaml"
        text = yaml.safe_dump(json.loads(json.dumps(identity)), sort_keys=False, allow_unicode=True)
        if path.exists() and any((self.path / "state").iterdir()):
            before = yaml.safe_load(path.read_text())
            changes = list(differences(before, yaml.safe_load(text)))
            if changes and not accept_changes:
                listed = "\n  ".join(changes)
                raise RunError(
                    f"{self.path} was made by a different job:\n  {listed}\nUse another run directory, change it back, or go "
                    "on with the changed job by --accept-changes (accept_changes=True in Python)."
                )
        replace(path, text.encode())

    def newest(self) -> Committed | None:
        """The newest commit, if there is one.

        Raises:
            RunError: it is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        path = self.path / "state" / str(steps[-1]) / "state.json"
        try:
            values = json.loads(path.read_text())
            lists = {name: tuple(values[name]) for name in ("inexact", "pending")}
            return Committed(**{**values, **lists})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path} is damaged ({error}); remove that directory to go on from the commit before it"
            ) from error

    def read_metrics(self, committed: Committed) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that a commit covers."""
        return _lines(self.metrics, committed.metrics_bytes)

    def read_tokens(self, committed: Committed) -> dict[int, dict[str, int]]:
        """`tokens_sampled` and `tokens_trained` of the steps that a commit covers."""
        names = ("tokens_sampled", "tokens_trained")
        lines = _lines(self.timings, committed.timings_bytes)
        return {int(line["step"]): {name: int(line[name]) for name in names} for line in lines}

    def steps(self) -> list[int]:
        """Committed steps, in order. Anything in the directory that is not a number is left alone."""
        return sorted(int(item.name) for item in (self.path / "state").iterdir() if item.name.isdecimal())

    def version(self, number: int) -> Path:
        """Where a version's PEFT directory lies, if it is kept."""
        return self.path / "versions" / f"v{number}"

    def versions(self) -> list[int]:
        """Numbers of the versions that are kept, in order."""
        found = (self.path / "versions").glob("v*")
        return sorted(int(path.name[1:]) for path in found if path.name[1:].isdecimal())

    def sampled(self, *, evals: bool = False) -> list[int]:
        """Steps whose rollouts are kept, in order; with `evals` the versions whose evaluations are."""
        before = _before(evals)
        names = [path.stem.removeprefix(before) for path in (self.path / "rollouts").glob(f"{before}*.jsonl")]
        return sorted(int(name) for name in names if name.isdecimal())

    def read_rollouts(self, number: int, *, evals: bool = False) -> list[dict[str, Any]]:
        """What a step sampled, or with `evals` the evaluation of a version; one of `sampled`."""
        path = self.path / "rollouts" / f"{_before(evals)}{number}.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()]  # a text would be split at U+2028 too

    def _cut_back(self, committed: Committed | None) -> None:
        """Forget what was written after the commit."""
        done = committed or Committed()
        for path, length in ((self.metrics, done.metrics_bytes), (self.timings, done.timings_bytes)):
            with path.open("ab") as file:
                file.truncate(min(length, path.stat().st_size))
        for item in (self.path / "rollouts").iterdir():
            found = re.fullmatch(r"(eval-)?(\d+)\.jsonl", item.name)
            if found and (int(found[2]) > done.evaluated if found[1] else int(found[2]) >= done.step):
                item.unlink()
        for item in (self.path / "versions").iterdir():
            found = re.fullmatch(r"v(\d+)", item.name)
            if found and int(found[1]) > done.step:
                shutil.rmtree(item)

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Add a line to metrics or timings; it counts from the next commit on."""
        with path.open("ab") as file:
            file.write(dump_line(record))

    def write_rollouts(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the rollout log of one step or evaluation."""
        replace(self.path / "rollouts" / f"{name}.jsonl", b"".join(dump_line(record) for record in records))

    def commit(self, committed: Committed, save: Callable[[Path], None]) -> Committed:
        """Make a step permanent: files synced, then one rename; the adapter is also linked as a version.

        Args:
            committed: what to remember; the lengths of metrics and timings are filled in here.
            save: writes (and syncs) adapter and optimizer into a directory.
        """
        for path in (self.metrics, self.timings):
            with path.open("ab") as file:
                os.fsync(file.fileno())
        committed = Committed(
            **{
                **asdict(committed),
                "metrics_bytes": self.metrics.stat().st_size,
                "timings_bytes": self.timings.stat().st_size,
            }
        )
        final = self.path / "state" / str(committed.step)
        draft = final.with_name(f".tmp-{committed.step}")
        if final.exists():  # the same step was committed before the job was paused: the newer record wins
            replace(final / "state.json", dump_line(asdict(committed)))
            return committed
        draft.mkdir()
        save(draft)
        replace(draft / "state.json", dump_line(asdict(committed)))
        sync_directory(draft)
        draft.rename(final)
        sync_directory(final.parent)
        self.link_version(committed.step)
        return committed

    def link_version(self, step: int) -> None:
        """Make versions/v<step> from the committed files: links, or copies on a file system that has none."""
        final = self.version(step)
        if final.exists():
            return
        draft = final.with_name(f".tmp-v{step}")
        draft.mkdir()
        for name in ADAPTER_FILES:
            committed = self.path / "state" / str(step) / name
            try:
                os.link(committed, draft / name)
            except OSError:
                replace(draft / name, committed.read_bytes())
        sync_directory(draft)
        draft.rename(final)
        sync_directory(final.parent)

    def prune(self, keep: int, best: int | None, rollouts_bytes: float) -> None:
        """Delete commits beyond the newest `keep`, versions that are neither among them nor the best, and old rollout logs."""
        steps = self.steps()
        kept = set(steps[-keep:])
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.path / "state" / str(step))
        for item in (self.path / "versions").iterdir():
            if item.name not in {f"v{step}" for step in kept} | {f"v{best}"} and not item.name.startswith("."):
                shutil.rmtree(item)
        logs = [item for item in (self.path / "rollouts").iterdir() if item.name != "eval-0.jsonl"]
        logs.sort(key=lambda item: (item.stat().st_mtime_ns, item.name))
        total = sum(item.stat().st_size for item in logs)
        for item in logs[:-1]:
            if total <= rollouts_bytes:
                break
            total -= item.stat().st_size
            item.unlink()

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Record the job's state and reason for people and reports."""
        replace(self.path / "status.json", dump_line(status))

    def read_status(self) -> dict[str, Any]:
        """What `write_status` wrote last; empty before."""
        try:
            found: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found


def _before(evals: bool) -> str:
    """What the names of rollout logs begin with."""
    return "eval-" if evals else ""


def _lines(path: Path, length: int) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return [json.loads(line) for line in file.read(length).splitlines()]


def differences(before: Any, after: Any, path: str = "") -> Iterable[str]:
    """Where two trees of plain values differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield f"{path}: was {before!r}, is {after!r}"


def replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        DiskFull: the disk is full.
    """
    draft = path.with_name(f".tmp-{path.name}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path | None) -> Exception:
    """A full disk in words; any other error as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk is full: {path} could not be written. Nothing committed is lost; free some space and run the same "
            "command again"
        )
    return error


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
