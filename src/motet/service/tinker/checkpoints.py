"""What clients saved of their models: `tinker://<model>/<kind>/<name>`, a directory below the job's `checkpoints`.

To take one home there are links that open one file for a quarter of an hour, without a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from motet.runtime.client_loop import ABOUT
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.tinker.models import Models
from motet.service.tinker.requests import NAME
from motet.types import ADAPTER_FILES

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_TYPES = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
_SNAPSHOT = re.compile(r"snapshot-\d+")
SECONDS = 900.0
ARCHIVE = "archive.tar"
COMPLETE = "checkpoint_complete"
"""An empty member that older clients look for last."""


@dataclass(frozen=True)
class Checkpoint:
    """One that is there."""

    job: StoredJob
    kind: str
    name: str
    directory: Path

    @property
    def path(self) -> str:
        """As clients name it."""
        return f"tinker://{self.job.idempotency_key}/{self.kind}/{self.name}"

    def about(self) -> dict[str, Any]:
        """What was said of it when it was saved, or later."""
        facts: dict[str, Any] = msgspec.json.decode((self.directory / ABOUT).read_bytes())
        return facts

    def shown(self) -> dict[str, Any]:
        """As clients are told of it."""
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


def iso(seconds: float) -> str:
    """A time as clients read it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def about_of(number: int, ttl: int | None, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """What is kept beside a checkpoint that command `number` saves."""
    return {"number": number, "ttl": ttl, "user_metadata": metadata}


class Checkpoints:
    """Finds them among what a tenant's models saved."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def of(self, job: StoredJob) -> Iterator[Checkpoint]:
        """Those of a model that have a name, oldest first; what has expired goes away."""
        kept = []
        for kind in _TYPES:
            for place in (self._models.directory(job) / "checkpoints" / kind).glob("[!.]*"):
                if not _SNAPSHOT.fullmatch(place.name) and (one := self._there(job, kind, place.name)):
                    kept.append(one)
        yield from sorted(kept, key=lambda one: (one.directory / ABOUT).stat().st_mtime)

    def find(self, who: Principal, path: str) -> Checkpoint:
        """The checkpoint of a path.

        Raises:
            Refusal: there is none.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in _TYPES:
            raise Refusal(400, f"{path!r} is no path of weights; write tinker://<model>/weights/<name>")
        try:
            return self.named(self._models.find(who, parts[0]), parts[1], parts[2])
        except Refusal:
            for job in self._models.everybodys(parts[0]):  # what somebody published is there for all
                if (published := self._there(job, parts[1], parts[2])) and published.about().get("public"):
                    return published
            raise

    def named(self, job: StoredJob, kind: str, name: str) -> Checkpoint:
        """The checkpoint of a kind and name.

        Raises:
            Refusal: there is none.
        """
        checkpoint = self._there(job, kind, name) if kind in _TYPES and re.fullmatch(NAME, name) else None
        if checkpoint is None:
            raise Refusal(
                404, f"there is no checkpoint {kind}/{name} of this model; it was never saved, deleted, or has expired"
            )
        return checkpoint

    def check_free(self, job: StoredJob, kind: str, name: str, number: int, *, overwrite: bool = False) -> None:
        """Let a command save under a name.

        Raises:
            Refusal: it is taken, or no name to give.
        """
        if _SNAPSHOT.fullmatch(name):
            raise Refusal(400, f"path: {name!r} is a name of the service's own; give another")
        there = self._there(job, kind, name)
        if there is not None and not overwrite and there.about().get("number") != number:
            raise Refusal(400, f"path: there is a checkpoint {name!r} already; give another name")

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete one."""
        shutil.rmtree(checkpoint.directory, ignore_errors=True)
        self._models.stored.changed(checkpoint.job.id)

    def copy(self, source: Checkpoint, job: StoredJob, ttl: int | None) -> Checkpoint:
        """The same files, of another model."""
        copied = Checkpoint(
            job, source.kind, source.name, self._models.directory(job) / "checkpoints" / source.kind / source.name
        )
        draft = copied.directory.with_name(f".part-{source.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        about = {**source.about(), "public": False, "expires": None if ttl is None else time.time() + ttl}
        try:
            for file in source.directory.iterdir():  # an error of `copytree` does not say that the disk is full
                shutil.copy2(file, draft)
            (draft / ABOUT).write_bytes(msgspec.json.encode(about))
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(copied.directory, ignore_errors=True)
        draft.rename(copied.directory)
        self._models.stored.changed(job.id)
        return copied

    def expire(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Let it go so many seconds from now; None keeps it."""
        self._say(checkpoint, expires=None if seconds is None else time.time() + seconds)

    def publish(self, checkpoint: Checkpoint, public: bool) -> None:
        """Let every tenant read one, or its own alone again."""
        self._say(checkpoint, public=public)

    def _say(self, checkpoint: Checkpoint, **more: Any) -> None:
        about = {**checkpoint.about(), **more}
        draft = checkpoint.directory / f".part-{ABOUT}"
        draft.write_bytes(msgspec.json.encode(about))
        draft.rename(checkpoint.directory / ABOUT)

    def _there(self, job: StoredJob, kind: str, name: str) -> Checkpoint | None:
        checkpoint = Checkpoint(job, kind, name, self._models.directory(job) / "checkpoints" / kind / name)
        try:
            expires = checkpoint.about().get("expires")
        except FileNotFoundError:
            return None
        if expires is not None and expires < time.time():
            self.remove(checkpoint)
            return None
        return checkpoint


class Link(msgspec.Struct, frozen=True):
    """What a token opens."""

    job: str
    kind: str
    name: str
    file: str
    """One of the adapter's, or `ARCHIVE`: all of them."""
    key: str
    """The API key under which the link was asked for, by its id: the link ends with it."""
    expires: float


class Downloads:
    """Makes links and opens them. Signed with a secret of this process: one that starts anew knows none of them."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, checkpoint: Checkpoint, file: str, key: str, expires: float) -> str:
        """Opens one file until then."""
        said = msgspec.json.encode(Link(checkpoint.job.id, checkpoint.kind, checkpoint.name, file, key, expires))
        return base64.urlsafe_b64encode(self._signature(said) + said).decode()

    def open(self, token: str) -> Link:
        """What a token opens.

        Raises:
            Refusal: nothing, or nothing any more.
        """
        gone = Refusal(403, "this link is not good any more; ask for another")
        try:
            data = base64.urlsafe_b64decode(token)
        except (binascii.Error, ValueError):
            raise gone from None
        if not hmac.compare_digest(self._signature(data[32:]), data[:32]):
            raise gone
        link = msgspec.json.decode(data[32:], type=Link)
        if link.expires < time.time():
            raise gone
        return link

    def _signature(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, hashlib.sha256)


def files_of(checkpoint: Checkpoint) -> list[str]:
    """The files of its adapter."""
    return [name for name in ADAPTER_FILES if (checkpoint.directory / name).is_file()]


def archive_into(target: IO[bytes], directory: Path) -> None:
    """Write the adapter as clients of the package before 0.36 unpack it."""
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name in ADAPTER_FILES:
            if (directory / name).is_file():
                archive.add(directory / name, name)
        archive.addfile(tarfile.TarInfo(COMPLETE))
