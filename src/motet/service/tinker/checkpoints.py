"""Checkpoints saved by clients: `tinker://<model>/<kind>/<name>`, a directory below the job's `checkpoints`."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from motet.core.checksums import sync
from motet.core.types import ADAPTER_FILES
from motet.runtime.client_loop import ABOUT
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.storage import Storage
from motet.service.tinker.models import Models
from motet.service.tinker.requests import NAME

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_TYPES = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
_SNAPSHOT = re.compile(r"snapshot-\d+")
MOST_CHECKPOINTS = 1000
"""Named checkpoints of a model: a client's list has all of them."""
COMPLETE = "checkpoint_complete"
"""An empty file that older clients download last."""


@dataclass(frozen=True)
class Checkpoint:
    """An existing checkpoint."""

    job: StoredJob
    kind: str
    name: str
    directory: Path

    @property
    def path(self) -> str:
        """Its path for clients."""
        return f"tinker://{self.job.idempotency_key}/{self.kind}/{self.name}"

    def about(self) -> dict[str, Any]:
        """Its stored metadata."""
        facts: dict[str, Any] = msgspec.json.decode((self.directory / ABOUT).read_bytes())
        return facts

    def shown(self) -> dict[str, Any]:
        """Its description for clients."""
        about, files = self.about(), [path for path in self.directory.iterdir() if path.name != ABOUT]
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _TYPES[self.kind],
            "time": iso((self.directory / ABOUT).stat().st_mtime),
            "tinker_path": self.path,
            "size_bytes": sum(path.stat().st_size for path in files),
            "public": bool(about.get("public")),
            "user_metadata": about.get("user_metadata"),
            "expires_at": None if about.get("expires") is None else iso(about["expires"]),
        }


_Saved = tuple[float, str, str]
"""When a checkpoint was saved, its kind and its name."""
_Place = tuple[str, str | None, _Saved]
"""A job, the id of its model, and a checkpoint of it."""


@dataclass(frozen=True)
class _Known:
    """The checkpoints of a model, oldest first."""

    stamp: tuple[float, ...]
    """When it ended, or when its directories changed."""
    saved: list[_Saved]


def _saved(job: Path, kinds: Iterable[str]) -> list[_Saved]:
    """Named checkpoints of a job, oldest first, expired ones too."""
    saved = []
    for kind in kinds:
        for place in (job / "checkpoints" / kind).glob("[!.]*"):
            if not _SNAPSHOT.fullmatch(place.name):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    saved.append(((place / ABOUT).stat().st_mtime, kind, place.name))
    return sorted(saved)


def _times(job: Path) -> tuple[float, ...]:
    """When a checkpoint of each kind came or went last; of the last second, a time that is never told again."""
    times, now = list[int](), time.time_ns()
    for kind in _TYPES:
        with contextlib.suppress(FileNotFoundError):
            times.append((job / "checkpoints" / kind).stat().st_mtime_ns)
    return (now,) if any(now - one < 1e9 for one in times) else tuple(times)  # file systems count in milliseconds


def iso(seconds: float) -> str:
    """A time in the clients' format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def about_of(number: int, ttl: int | None, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Metadata of a checkpoint that command `number` saves."""
    return {"number": number, "ttl": ttl, "user_metadata": metadata}


class Checkpoints:
    """Finds checkpoints of a tenant's models."""

    def __init__(self, models: Models, storage: Storage) -> None:
        self._models, self._storage = models, storage
        self._saying = threading.Lock()
        self._known: dict[str, dict[str, _Known]] = {}
        """Checkpoints by tenant and model: those of ended ones are not looked for again."""
        self._changes = 0

    def remove_expired(self) -> None:
        """Delete the expired checkpoints of all models: nobody may ask for them again."""
        for about in self._storage.run.glob(f"*/checkpoints/*/[!.]*/{ABOUT}"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if _expired(about):
                    self._remove(about.parent, about.parents[3].name)

    def of(self, job: StoredJob) -> Iterator[Checkpoint]:
        """Named checkpoints of a model, oldest first; deletes expired ones."""
        yield from self._those(job, _saved(self._models.directory(job), _TYPES))

    def newest(self, job: StoredJob, kind: str) -> Iterator[Checkpoint]:
        """The newest named checkpoint of a kind, if there is one."""
        yield from itertools.islice(self._those(job, reversed(_saved(self._models.directory(job), [kind]))), 1)

    def page(self, who: Principal, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """Some checkpoints of a tenant's models, those of the newest model first, and the number of all."""
        changes, before = self._changes, self._known.get(who.tenant_id, {})
        known, shown, total = dict[str, _Known](), list[_Place](), 0
        for job, key, ended in self._models.ends(who):
            directory = self._storage.job(job).path
            stamp = _times(directory) if ended is None else (ended,)
            if (found := before.get(job)) is None or found.stamp != stamp:
                found = _Known(stamp, _saved(directory, _TYPES))
            known[job] = found
            first = max(0, offset - total)
            shown += [(job, key, one) for one in found.saved[first : max(0, offset + limit - total)]]
            total += len(found.saved)
        self._known[who.tenant_id] = known if changes == self._changes else {}
        jobs = ((StoredJob(id=job, idempotency_key=key), one) for job, key, one in shown)
        return [there for job, one in jobs for there in self._those(job, [one])], total

    def _those(self, job: StoredJob, saved: Iterable[_Saved]) -> Iterator[Checkpoint]:
        """Those that are still there; deletes expired ones."""
        for _, kind, name in saved:
            if (one := self._there(job, kind, name)) is not None:
                yield one

    @staticmethod
    def shown(checkpoints: Iterable[Checkpoint]) -> list[dict[str, Any]]:
        """Descriptions of those that are still there."""
        shown = []
        for one in checkpoints:
            with contextlib.suppress(FileNotFoundError):  # deleted or replaced meanwhile
                shown.append(one.shown())
        return shown

    def find(self, who: Principal, path: str) -> Checkpoint:
        """The checkpoint of a path. Raises `Refusal` if it does not exist."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in _TYPES:
            raise Refusal(400, f"{path!r} is not a path of weights; write tinker://<model>/weights/<name>")
        try:
            return self.named(self._models.find(who, parts[0]), parts[1], parts[2])
        except Refusal:
            for job in self._models.everybodys(parts[0]):  # published checkpoints are visible to all
                if (published := self._there(job, parts[1], parts[2])) and published.about().get("public"):
                    return published
            raise

    def named(self, job: StoredJob, kind: str, name: str) -> Checkpoint:
        """The checkpoint of a kind and name. Raises `Refusal` if it does not exist."""
        checkpoint = self._there(job, kind, name)
        if checkpoint is None:
            raise Refusal(
                404, f"there is no checkpoint {kind}/{name} of this model; it was never saved, deleted, or has expired"
            )
        return checkpoint

    def check_free(self, job: StoredJob, kind: str, name: str, number: int, *, overwrite: bool = False) -> None:
        """Raise `Refusal` if a command may not save under a name, or if it is taken."""
        if _SNAPSHOT.fullmatch(name):
            raise Refusal(400, f"path: {name!r} is reserved by the service; choose another")
        there = self._there(job, kind, name)
        if there is not None and not overwrite and there.about().get("number") != number:
            raise Refusal(400, f"path: there is a checkpoint {name!r} already; give another name")
        if there is None and len(_saved(self._models.directory(job), _TYPES)) >= MOST_CHECKPOINTS:
            most = f"this model has {MOST_CHECKPOINTS} checkpoints, the most that a list shows"
            raise Refusal(400, f"path: {most}; delete some, or save with ttl_seconds")

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete one."""
        self._remove(checkpoint.directory, checkpoint.job.id)

    def _remove(self, directory: Path, job: str) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._changed(job)

    def _changed(self, job: str) -> None:
        """Checkpoints of a model came or went."""
        self._models.stored.changed(job)
        self._changes += 1
        for known in list(self._known.values()):
            known.pop(job, None)

    def copy(self, source: Checkpoint, job: StoredJob, ttl: int | None) -> Checkpoint:
        """Copy a checkpoint to another model."""
        copied = Checkpoint(
            job, source.kind, source.name, self._models.directory(job) / "checkpoints" / source.kind / source.name
        )
        draft = copied.directory.with_name(f".part-{source.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        about = {**source.about(), "public": False, "expires": None if ttl is None else time.time() + ttl}
        try:
            for file in source.directory.iterdir():  # an error of `copytree` would hide that the disk is full
                shutil.copy2(file, draft)
            (draft / ABOUT).write_bytes(msgspec.json.encode(about))
            for path in (*draft.iterdir(), draft):
                sync(path)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(copied.directory, ignore_errors=True)
        draft.rename(copied.directory)
        sync(copied.directory.parent)
        self._changed(job.id)
        return copied

    def expire(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Set the expiry in seconds from now; None keeps it."""
        self._say(checkpoint, expires=None if seconds is None else time.time() + seconds)

    def publish(self, checkpoint: Checkpoint, public: bool) -> None:
        """Make a checkpoint public to all tenants, or private again."""
        self._say(checkpoint, public=public)

    def _say(self, checkpoint: Checkpoint, **more: Any) -> None:
        there = checkpoint.directory / ABOUT
        draft = there.with_name(f".part-{ABOUT}")
        with self._saying:
            draft.write_bytes(msgspec.json.encode({**checkpoint.about(), **more}))
            sync(draft)
            os.utime(
                draft, ns=(there.stat().st_atime_ns, there.stat().st_mtime_ns)
            )  # its time is that of the checkpoint
            draft.rename(there)

    def _there(self, job: StoredJob, kind: str, name: str) -> Checkpoint | None:
        if kind not in _TYPES or not re.fullmatch(NAME, name):  # a client may ask for any text
            return None
        checkpoint = Checkpoint(job, kind, name, self._models.directory(job) / "checkpoints" / kind / name)
        try:
            if not _expired(checkpoint.directory / ABOUT):
                return checkpoint
        except FileNotFoundError:
            return None
        self.remove(checkpoint)
        return None


def _expired(about: Path) -> bool:
    expires = msgspec.json.decode(about.read_bytes()).get("expires")
    return expires is not None and bool(expires < time.time())


def files_of(directory: Path) -> list[str]:
    """The files of a checkpoint's adapter."""
    return [name for name in ADAPTER_FILES if (directory / name).is_file()]


def archive_into(target: IO[bytes], directory: Path) -> None:
    """Write the adapter in the format of package versions before 0.36."""
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name in files_of(directory):
            archive.add(directory / name, name)
        archive.addfile(tarfile.TarInfo(COMPLETE))
