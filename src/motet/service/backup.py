"""Backs up a service's directory and database, also while it runs, and restores them.

The database is copied first. Jobs report later events again, so the two copies need not be simultaneous. Commits and
versions are copied completely or not at all, and a job's logs after its commits, so that the logs cover them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import make_url

from motet.core.checksums import hash_of, is_inside, sync
from motet.core.errors import RunError
from motet.process.child import run
from motet.process.ending import how_it_ended
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.rollout_logs import must_be_there, rollout_sums

MANIFEST = "backup.json"
_SQLITE, _POSTGRES = "motet.db", "motet.dump"
_LEFT_OUT = ("motet.db*", ".lock", "*.log", "*.log.*", "*.sock", "*.token", "*.key", ".tmp-*", ".part-*")
_TRIES = 50

Progress = Callable[[str], None]
"""Called with each place before it is copied."""


@dataclass
class Copied:
    """The contents of a backup."""

    jobs: int = 0
    files: dict[str, str] = field(default_factory=dict)
    """sha256 by path within the backup."""
    bytes: int = 0
    linked: dict[tuple[int, int, int, int], Path] = field(default_factory=dict)
    """Copies of hard-linked files, by device, inode, modification time and size."""


def back_up(directory: Path, target: Path, database: str, progress: Progress) -> Copied:
    """Write a backup to a new directory. `database` is a SQLAlchemy URL; empty for SQLite in the service's directory.

    Raises:
        RunError: there is nothing to copy, `target` exists, or a copy failed.
    """
    if not database and not (directory / _SQLITE).is_file():
        raise RunError(f"{directory} has no motet.db: name the directory of a service, or its --database")
    if target.exists() or target.resolve().is_relative_to(directory.resolve()):
        raise RunError(f"{target} exists or is inside {directory}; name a new directory elsewhere")
    copied = Copied()
    with _draft_of(target) as draft:
        progress("database")
        _dump(directory, database, draft)
        for name in (_SQLITE, _POSTGRES):
            if (file := draft / name).exists():
                _note(copied, name, file)
        for place in sorted(directory.iterdir()):
            if place.name == "run" and place.is_dir():
                for job in sorted(path for path in place.iterdir() if path.is_dir()):
                    progress(f"run/{job.name}")
                    _copy_job(job, draft, copied)
            elif not _left_out(place):
                progress(place.name)
                _copy(place, draft / place.name, draft, copied)
        manifest = {"motet": importlib.metadata.version("motet"), "time": time.time(), "files": copied.files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        sync(draft / MANIFEST)
        draft.rename(target)
        sync(target.parent)
    return copied


def restore(backup: Path, directory: Path, database: str, progress: Progress) -> Copied:
    """Restore a service's directory and database from a backup; every file is checked against its sum.

    Raises:
        RunError: the backup is incomplete or damaged, the directory exists, or the database rejects it.
    """
    sums = _listed(backup)
    if bool(database) != (_POSTGRES in sums):
        kind = "PostgreSQL: name a new one with --database" if _POSTGRES in sums else "SQLite: leave out --database"
        raise RunError(f"{backup} has a copy of {kind}")
    if directory.exists() and any(directory.iterdir()):
        raise RunError(f"{directory} is not empty; restore to a new directory")
    copied = Copied()
    with _draft_of(directory) as draft:
        for name, expected in sums.items():
            progress(name)
            source = backup / name
            try:
                if not source.is_file() or source.resolve() != backup.resolve() / name:  # a link, in any part of it
                    raise RunError(f"{source} is missing: the backup is damaged")
                if (draft / name).exists():  # on a file system that does not tell capital letters apart
                    raise RunError(f"{source} is there twice: restore to a file system that keeps both names apart")
                _copy(source, draft / name, draft, copied)
            except OSError as error:  # also a file and a directory of one name
                raise RunError(f"{source} cannot be restored: {error.strerror or error}") from error
            if copied.files[name] != expected:
                raise RunError(f"{source} differs from what was saved: the backup is damaged")
        copied.jobs = sum(1 for path in draft.glob("run/*") if path.is_dir())
        if database:
            progress("database")
            options = ["--no-owner", "--exit-on-error", "--single-transaction", str(draft / _POSTGRES)]
            _postgres(["pg_restore", *options], database)
            (draft / _POSTGRES).unlink()
        if directory.exists():
            directory.rmdir()
        draft.rename(directory)
    return copied


def _listed(backup: Path) -> dict[str, str]:
    """The sums of a backup's files, by their paths in it."""
    try:
        sums = msgspec.json.decode((backup / MANIFEST).read_bytes(), type=dict[str, Any])["files"]
        listed: dict[str, str] = msgspec.convert(sums, dict[str, str])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{backup} is not a complete backup: its {MANIFEST} cannot be read") from error
    for name in listed:
        if not is_inside(name):
            raise RunError(
                f"{backup / MANIFEST} names {name!r:.200}, which is outside of the backup: do not restore it"
            )
    return listed


@contextlib.contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """A new directory beside another, removed if the block fails."""
    draft = target.with_name(f".part-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _left_out(path: Path) -> bool:
    return any(path.match(pattern) for pattern in _LEFT_OUT) or path.is_symlink() or path.is_socket()


def _copy_job(job: Path, draft: Path, copied: Copied) -> None:
    """Copy a job; start again if a commit was deleted meanwhile, because a newer one exists."""
    place = draft / "run" / job.name
    for _ in range(_TRIES):
        place.mkdir(parents=True, exist_ok=True)
        for part in ("state", "versions"):
            for unit in sorted((job / part).glob("*")):
                if not _left_out(unit) and not _copy(unit, place / part / unit.name, draft, copied):
                    _drop(place / part / unit.name, draft, copied)
        for other in sorted(job.iterdir()) if job.exists() else ():
            if other.name not in ("state", "versions") and not _left_out(other):
                _copy(other, place / other.name, draft, copied)
        with contextlib.suppress(RunError):
            if not JobDirectory(job).steps() or _settle(JobDirectory(place), draft, copied):
                copied.jobs += 1
                return
        _drop(place, draft, copied)
    raise RunError(f"{job} changes faster than it can be copied, or is damaged: run motet verify")


def _settle(copy: JobDirectory, draft: Path, copied: Copied) -> bool:
    """Remove what the job has deleted since it was copied; returns whether the copy is complete."""
    committed = copy.newest()
    try:
        listed = copy.manifest.read()[-1:]
    except ValueError:
        return False
    if committed is None:
        return False
    states = {int(number) for one in listed for number in one.state}
    versions = {int(number) for one in listed for number in one.versions}
    states.add(committed.step)
    versions |= {committed.step, *([] if committed.best_version is None else [committed.best_version])}
    for number in set(copy.steps()) - states if listed else ():
        _drop(copy.path / "state" / str(number), draft, copied)
    for number in set(copy.versions()) - versions - set(copy.steps()) if listed else ():
        _drop(copy.version(number), draft, copied)
    logs = {path.name for path in (copy.path / "rollouts").glob("*.jsonl")}
    sums = rollout_sums(copy.checksums, committed.checksums_bytes) if copy.checksums.exists() else {}
    needed = {*must_be_there(sums, logs)}  # a later commit may have deleted them
    return states <= set(copy.steps()) and versions <= set(copy.versions()) and needed <= logs


def _drop(place: Path, draft: Path, copied: Copied) -> None:
    shutil.rmtree(place, ignore_errors=True)
    below = f"{place.relative_to(draft).as_posix()}/"
    copied.files = {name: value for name, value in copied.files.items() if not name.startswith(below)}


def _copy(source: Path, target: Path, draft: Path, copied: Copied) -> bool:
    """Copy a file or directory tree; False if a part disappeared meanwhile."""
    whole = True
    for path in _files_of(source):
        there = target / path.relative_to(source) if path != source else target
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            status = path.stat()
            # the inode alone is not enough: it may have been reused after a deletion
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            twin = copied.linked.get(identity) if status.st_nlink > 1 else None
            if twin is not None and twin.exists():
                os.link(twin, there)
            else:
                shutil.copyfile(path, there)
                there.chmod(0o600)
        except FileNotFoundError:
            whole = False
            continue
        if status.st_nlink > 1:
            copied.linked[identity] = there
        _note(copied, there.relative_to(draft).as_posix(), there)
    return whole and source.exists()


def _files_of(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
    elif source.is_dir():
        for root, directories, names in os.walk(source):
            directories[:] = [name for name in directories if not _left_out(Path(root, name))]
            yield from (path for name in sorted(names) if not _left_out(path := Path(root, name)))


def _note(copied: Copied, name: str, file: Path) -> None:
    copied.files[name] = hash_of(file).hexdigest()
    copied.bytes += file.stat().st_size


def _dump(directory: Path, database: str, draft: Path) -> None:
    if not database:
        with contextlib.closing(sqlite3.connect(f"file:{directory / _SQLITE}?mode=ro", uri=True)) as opened:
            opened.execute("VACUUM INTO ?", (str(draft / _SQLITE),))
        (draft / _SQLITE).chmod(0o600)
        return
    _postgres(["pg_dump", "--format=custom", f"--file={draft / _POSTGRES}"], database)


def _postgres(command: list[str], database: str) -> None:
    url = make_url(database)
    if url.get_backend_name() != "postgresql":
        raise RunError(f"--database is for PostgreSQL, not for {url.get_backend_name()}")
    where = url.set(drivername="postgresql", password=None).render_as_string()
    environment = {**os.environ, **({} if url.password is None else {"PGPASSWORD": str(url.password)})}
    try:
        done = run([*command, f"--dbname={where}"], env=environment)
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not installed: it comes with PostgreSQL's client programs") from None
    if done.returncode != 0:
        raise RunError(f"{command[0]} {how_it_ended(done.returncode)}: {done.stderr.strip()[-500:]}")
