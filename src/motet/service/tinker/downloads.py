"""Checkpoints to take home: links that open one file for a quarter of an hour, without a key."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import io
import secrets
import tarfile
import time
from pathlib import Path

import msgspec

from motet.service.errors import Refusal
from motet.service.tinker.checkpoints import Checkpoint
from motet.types import ADAPTER_FILES

SECONDS = 900.0
ARCHIVE = "archive.tar"
COMPLETE = "checkpoint_complete"
"""An empty member that older clients look for last."""


class Link(msgspec.Struct, frozen=True):
    """What a token opens."""

    job: str
    kind: str
    name: str
    file: str
    """One of the adapter's, or `ARCHIVE`: all of them."""
    expires: float


class Downloads:
    """Makes links and opens them. Signed with a secret of this process: one that starts anew knows none of them."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, checkpoint: Checkpoint, file: str, expires: float) -> str:
        """Opens one file until then."""
        said = msgspec.json.encode(Link(checkpoint.job.id, checkpoint.kind, checkpoint.name, file, expires))
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


def archive_of(directory: Path) -> bytes:
    """The adapter as clients of the package before 0.36 unpack it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ADAPTER_FILES:
            if (directory / name).is_file():
                archive.add(directory / name, name)
        archive.addfile(tarfile.TarInfo(COMPLETE))
    return packed.getvalue()
