"""A job's directory and its commits. After `kill -9` at any moment, the job resumes from its newest complete commit.

    <run>/<job>/
      job.yaml               everything the job's bytes depend on; a changed job is refused, with the differences
      metrics.jsonl          one line per step, deterministic; truncated to the committed length on resume
      timings.jsonl          seconds and rates of the same steps
      rollouts/<step>.jsonl  sampled and scored completions; eval-<version>.jsonl for evaluations
      state/<step>/          one commit: adapter, optimizer, state.json; synced, then renamed into place
      versions/v<n>/         the same adapters as plain PEFT directories (of a team one a role): newest, best and last
      receipts/v<n>.json     the provenance of each version, also of deleted ones
      checksums.jsonl        sha256 of each rollout file; other sums are in state.json and beside each version
      manifest.jsonl         the list of commits and versions that must exist, to detect missing ones

Step s turns version s into s + 1, so state/<n> and versions/v<n> hold the same weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from motet.core.checksums import hash_of, link, replace_file, sealed, sums_of, sync, unsealed, write_sums
from motet.core.errors import RunError
from motet.core.plain_json import as_json
from motet.core.types import adapter_files
from motet.runtime.manifest import Manifest
from motet.runtime.metrics import BESIDE
from motet.runtime.ownership import Ownership
from motet.runtime.receipts import RECEIPT, Materials
from motet.runtime.rollout_logs import prefix, prune_logs

FORKED = "forked.json"
"""Marks a forked job that has not been opened yet."""


@dataclass(frozen=True)
class Committed:
    """The counters of a job at a commit; weights and moments are in other files."""

    step: int = 0
    """Steps done; also the number of the committed version."""
    skipped_in_row: int = 0
    """Steps in a row whose gradient was not finite."""
    best_version: int | None = None
    """The best trained version by evaluation; None before one was evaluated."""
    best_reward: float | None = None
    best_tie: float = 0.0
    """The figure that decides, of that version, and what decides between equal ones; higher is better."""
    best_by: str = ""
    """The figure that decides it, since the first step. Empty in older jobs: the loss for `dpo` and `kto`, version 0 too."""
    evaluated: int = -1
    """Newest version whose evaluation is in the metrics."""
    tokens_sampled: int = 0
    """Including evaluations."""
    tokens_trained: int = 0
    position: int = 0
    """Index of the first problem that was never begun. Used where steps do not take fixed windows."""
    pending: tuple[int, ...] = ()
    """Indices below `position` of problems that were begun but not trained."""
    metrics_bytes: int = 0
    timings_bytes: int = 0
    checksums_bytes: int = 0
    sums: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the commit's own files and of the committed part of each log, by name."""
    threads: int = 0
    """Torch threads of the process that committed. The sum of a whole gradient depends on their number."""
    inexact: tuple[str, ...] = ()
    """Why the job's bytes may depend on time or on other jobs; empty for an exact job."""
    rules: int = 0
    """Number of the rules of its steps (`beginning.RULES`); 0 in jobs by releases that stored none."""
    clock: str = ""
    """The time that its chat template sees; empty where it reads none, and in such jobs."""
    steps: int = 0
    """Its number of steps when it began; 0 in jobs by releases that stored none."""
    after: str = ""
    """Sum of the manifest's newest record before this commit; empty in commits by older releases of Motet."""

    def length(self, log: Path) -> int:
        """Committed bytes of a log."""
        return int(getattr(self, f"{log.stem}_bytes"))

    @property
    def tokens(self) -> int:
        """Tokens sampled and trained; a budget limits this number."""
        return self.tokens_sampled + self.tokens_trained


def dump_line(record: Mapping[str, Any]) -> bytes:
    """Encode one line of JSON. Numbers that are not finite become null, lone surrogates question marks."""
    return (json.dumps(as_json(record), ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


class JobDirectory:
    """The directory of one job: its logs, its commits, its versions and its status."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"
        self.checksums = path / "checksums.jsonl"
        self.manifest = Manifest(path)
        self.receipts = path / "receipts"
        self.materials: Materials | None = None
        self._identity: bytes | None = None
        self._hashes: dict[Path, hashlib._Hash] = {}
        self.owner = Ownership(path)

    @property
    def logs(self) -> tuple[Path, ...]:
        """Files that only grow; a commit records the committed length of each."""
        return self.metrics, self.timings, self.checksums

    # --- opening -----------------------------------------------------------------------------------------------------

    def describe(self, identity: bytes) -> None:
        """Set the content of job.yaml; it is written when the job begins or resumes."""
        self._identity = identity
        if not self.steps():
            replace_file(self.path / "job.yaml", identity)

    def restore(self) -> Committed | None:
        """Return the directory to its newest commit: later files and lines are removed."""
        self.owner.take()
        for leftover in [*self.path.glob("*/.tmp-*"), *self.path.glob(".tmp-*")]:
            with contextlib.suppress(OSError):  # a host that is cut off may still write it
                _remove(leftover) if leftover.is_dir() else leftover.unlink()
        committed = self.newest()
        cut_back(self, committed)
        if committed is not None:
            self.link_version(committed.step)  # the crash may have come between the commit and its link
        self.record(self.steps(), self.versions(), identity=self._identity)
        if self._identity is not None:
            replace_file(self.path / "job.yaml", self._identity)  # the record before allows the old one too
            self._identity = None
            (self.path / FORKED).unlink(missing_ok=True)
        return committed

    def newest(self) -> Committed | None:
        """The newest commit; None before the first.

        Raises:
            RunError: it is damaged.
        """
        return self.committed(steps[-1]) if (steps := self.steps()) else None

    def committed(self, step: int) -> Committed:
        """Read a commit's counters.

        Raises:
            RunError: it is damaged.
        """
        path = self.path / "state" / str(step) / "state.json"
        try:
            values = unsealed(path.read_bytes())
            commit = Committed(**values | {name: tuple(values[name]) for name in ("inexact", "pending")})
            if commit.step != step:
                raise ValueError(f"it is that of step {commit.step}")
            return commit
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunError(f"{path} is damaged ({reason}): {self.remedy(step)}") from error

    def remedy(self, step: int) -> str:
        """Instructions for resuming without a commit."""
        others = [other for other in self.steps() if other != step]
        if not others:
            return "there is no other commit; begin anew in another run directory"
        return f"remove {self.path / 'state' / str(step)} and use --accept-changes to continue from step {others[-1]}"

    def read_metrics(self, committed: Committed) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that a commit covers."""
        return _lines(self.metrics, committed.metrics_bytes)

    def read_tokens(self, committed: Committed) -> dict[int, dict[str, Any]]:
        """`tokens_sampled`, `tokens_trained` and any of `BESIDE` of the steps that a commit covers."""
        names, lines = ("tokens_sampled", "tokens_trained", *BESIDE), _lines(self.timings, committed.timings_bytes)
        return {int(line["step"]): {name: line[name] for name in names if name in line} for line in lines}

    def steps(self) -> list[int]:
        """Numbers of the committed steps, sorted; other names in the directory are ignored."""
        return sorted(int(item.name) for item in (self.path / "state").glob("*") if item.name.isdecimal())

    def version(self, number: int) -> Path:
        """The PEFT directory of a version, whether or not it exists."""
        return self.path / "versions" / f"v{number}"

    def version_named(self, name: str) -> Path:
        """The directory of `best` (the best trained one by evaluation; the last without one), `latest`, or a version number."""
        committed = self.newest()
        last = committed.step if committed else 0
        best = committed.best_version if committed and committed.best_version is not None else last
        return self.version(int({"best": best, "latest": last}.get(name, name)))

    def versions(self) -> list[int]:
        """Numbers of the versions on disk, sorted."""
        directories = (self.path / "versions").glob("v*")
        return sorted(int(path.name[1:]) for path in directories if path.name[1:].isdecimal())

    def sampled(self, *, evals: bool = False) -> list[int]:
        """Steps that have rollout logs, sorted; with `evals`, versions that have evaluation logs."""
        before = prefix(evals)
        names = [path.stem.removeprefix(before) for path in (self.path / "rollouts").glob(f"{before}*.jsonl")]
        return sorted(int(name) for name in names if name.isdecimal())

    def rollout_log(self, number: int, *, evals: bool = False) -> Path:
        """The log of a step, or with `evals` of an evaluation."""
        return self.path / "rollouts" / f"{prefix(evals)}{number}.jsonl"

    def each_rollout(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the rollouts of a step; together they may not fit into memory."""
        with self.rollout_log(number).open("rb") as lines:  # text splits at U+2028
            for line in lines:
                yield json.loads(line)

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Append a line to a log; the next commit includes it."""
        self.owner.check()
        line, known = dump_line(record), self._hash(path)
        with path.open("ab") as file:
            file.write(line)
        known.update(line)

    def write_rollouts(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the rollout log of one step or evaluation."""
        self.owner.check()
        path, text = self.path / "rollouts" / f"{name}.jsonl", b"".join(dump_line(record) for record in records)
        replace_file(path, text)
        self.append(self.checksums, {"file": path.name, "sha256": hashlib.sha256(text).hexdigest()})

    def commit(self, committed: Committed, save: Callable[[Path], None]) -> Committed:
        """Make a step permanent: sync all files, rename once, and link the adapter as a version.

        Args:
            committed: the counters to save; log lengths and sums are filled in here.
            save: writes and syncs adapter and optimizer into a directory.
        """
        with self.owner.writing():
            lengths: dict[str, Any] = {}
            sums: dict[str, str] = {}
            for path in self.logs:
                sums[path.name] = self._hash(path).hexdigest()
                with path.open("ab") as file:
                    os.fsync(file.fileno())
                    lengths[f"{path.stem}_bytes"] = file.tell()
            final = self.path / "state" / str(committed.step)
            draft = self.owner.draft(final)
            if final.exists():  # this step was committed before the job was paused: replace that commit
                own = {name: value for name, value in self.committed(committed.step).sums.items() if name not in sums}
                committed = dataclasses.replace(committed, **lengths, sums={**own, **sums}, after=self.manifest.head)
                replace_file(final / "state.json", sealed(asdict(committed)))
                return committed
            draft.mkdir()
            save(draft)
            self.owner.check()  # saving may take long
            own = sums_of(draft)
            if self.materials is not None:
                own[RECEIPT] = _write_receipt(self, draft, committed, own)
            committed = dataclasses.replace(committed, **lengths, sums={**own, **sums}, after=self.manifest.head)
            replace_file(draft / "state.json", sealed(asdict(committed)))
            sync(draft)
            self.owner.check()
            draft.rename(final)
            sync(final.parent)
            self.link_version(committed.step)
            return committed

    def forget(self) -> None:
        """Drop cached hashes after another writer changed the logs."""
        self._hashes.clear()

    def _hash(self, path: Path) -> hashlib._Hash:
        if path not in self._hashes:
            path.touch()
            self._hashes[path] = hash_of(path)
        return self._hashes[path]

    def link_version(self, step: int) -> None:
        """Create versions/v<step> from the committed files: hard links, or copies where the file system has none."""
        final, sums = self.version(step), self.committed(step).sums
        if RECEIPT in sums and not (receipt := self.receipts / f"v{step}.json").exists():
            self.receipts.mkdir(exist_ok=True)
            link(self.path / "state" / str(step) / RECEIPT, receipt)
            sync(self.receipts)
        if final.exists():
            return
        draft = self.owner.draft(final)
        draft.mkdir()
        write_sums(draft, named := {name: sums[name] for name in (*adapter_files(sums), RECEIPT) if name in sums})
        for name in named:
            link(self.path / "state" / str(step) / name, draft / name)
        sync(draft)
        self.owner.check()
        draft.rename(final)
        sync(final.parent)

    def record(
        self, steps: Iterable[int], versions: Iterable[int], *, closed: bool = False, identity: bytes | None = None
    ) -> None:
        """Record in the manifest which commits and versions must be here (`Manifest.record`)."""
        self.owner.check()
        done = self.newest() or Committed()
        logs = {path.name: (done.length(path), done.sums.get(path.name, "")) for path in self.logs}
        self.manifest.record(steps, versions, logs, closed=closed, identity=identity)

    def prune(self, keep: int, rollouts_bytes: float, lag: int = 0, *, closed: bool = False) -> None:
        """Delete commits, versions that no kept commit needs, and old rollout logs; `keep` and `lag` as in `kept_of`.

        The manifest is written first, so a deleted file is never one that it lists. `closed` as in `record`.
        """
        steps = self.steps()
        kept = kept_of(steps, (self.newest() or Committed()).best_version, keep, lag)
        versions = {f"v{number}" for step in kept for number in (step, self.committed(step).best_version)}
        self.record(sorted(kept), (number for number in self.versions() if f"v{number}" in versions), closed=closed)
        for step in steps:
            if step not in kept:
                _remove(self.path / "state" / str(step))
        for item in (self.path / "versions").iterdir():
            if item.name not in versions and not item.name.startswith("."):
                _remove(item)
        prune_logs(self.path / "rollouts", rollouts_bytes)

    def delete(self) -> None:
        """Remove the whole directory."""
        self.owner.forget()
        with contextlib.suppress(OSError):  # its last writer may still be active
            _remove(self.path)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Record the job's state and reason for people and reports."""
        self.owner.check()
        replace_file(self.path / "status.json", dump_line(status))

    def read_status(self) -> dict[str, Any]:
        """The last written status; empty before the first."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.path / "status.json").read_text("utf-8")))
        return {}


def kept_of(steps: Sequence[int], best: int | None, keep: int, lag: int = 0) -> set[int]:
    """The commits to keep: the newest `keep`, and the best version's, with the `lag` commits before it that a fork needs."""
    return {*steps[-keep:], *(step for step in steps if best is not None and best - lag <= step <= best)}


def _write_receipt(job: JobDirectory, draft: Path, done: Committed, sums: Mapping[str, str]) -> str:
    """Write the receipt of an unfinished commit and return its sum."""
    before = job.newest() or Committed()
    lines = _lines(job.checksums, job.checksums.stat().st_size, before.checksums_bytes)
    rollouts = [line for line in lines if not line["file"].startswith(prefix(evals=True))]
    known = (before.step, before.sums[RECEIPT]) if RECEIPT in before.sums else None
    assert job.materials is not None
    receipt = job.materials.receipt(done.step, sums, known, rollouts, done.inexact)
    replace_file(draft / RECEIPT, receipt)
    return hashlib.sha256(receipt).hexdigest()


def cut_back(job: JobDirectory, committed: Committed | None) -> None:
    """Remove everything written after the commit."""
    done = committed or Committed()
    job.forget()
    for path in job.logs:
        with path.open("ab") as file:
            file.truncate(min(done.length(path), path.stat().st_size))
    for item in (job.path / "rollouts").iterdir():
        match = re.fullmatch(r"(eval-)?(\d+)\.jsonl", item.name)
        if match and (int(match[2]) > done.evaluated if match[1] else int(match[2]) >= done.step):
            item.unlink()
    for item in [*(job.path / "versions").iterdir(), *job.receipts.glob("v*.json")]:
        match = re.fullmatch(r"v(\d+)(\.json)?", item.name)
        if match and int(match[1]) > done.step:
            item.unlink() if match[2] else _remove(item)


def _lines(path: Path, length: int, first: int = 0) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(first)
            return [json.loads(line) for line in file.read(length - first).splitlines()]
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); `motet verify {path.parent}` says what to do") from error


def _remove(path: Path) -> None:
    """Rename first, then delete: a partly deleted directory would look damaged."""
    gone = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)
