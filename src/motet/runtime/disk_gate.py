"""Jobs that wait because the disk is full or their tenant's storage is used up."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable

from motet.core.checksums import disk_error
from motet.core.errors import DiskFull, RunError, StorageFull
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.job import Job
from motet.runtime.storage_room import StorageRoom, size_of

_MORE = 2**20
"""Bytes that must become free when the size of the next commit is unknown."""


def is_full(error: BaseException) -> bool:
    """Whether a job ended because the disk is full."""
    error = innermost(error)
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and isinstance(disk_error(error, None), DiskFull))


def innermost(error: BaseException) -> BaseException:
    """The first error of a group, and of the groups in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class DiskSpaceGate:
    """Holds a job until there is room for its next commit."""

    def __init__(self) -> None:
        self._needs: dict[str, tuple[Callable[[], float], int]] = {}

    def block(self, job: Job, error: BaseException, room: StorageRoom) -> str:
        """Hold a job that ran out of space and delete its unfinished files. Returns the message for its state."""
        error, directory, tenant = innermost(error), job.directory, job.tenant
        committed = None
        with contextlib.suppress(OSError, RunError):
            committed = directory.newest()
            directory.restore()
        if isinstance(error, StorageFull):
            self._needs[job.name] = (lambda: room.of(tenant)), error.needs
            return str(error)
        free = _free(directory)
        needs = free + _MORE
        if committed is not None:
            state = directory.path / "state" / str(committed.step)
            needs = max(free + 1, 2 * size_of(state))
        self._needs[job.name] = (lambda: _free(directory)), needs
        return (
            f"waits: the disk of the service is full; it continues when {needs / 1e6:,.1f} MB are free (deleting jobs "
            "that have ended frees space). Nothing committed is lost"
        )

    def blocks(self, job: str) -> bool:
        """Whether a held job still has too little space."""
        free, needs = self._needs.get(job, (None, 0))
        return free is not None and free() < needs

    def may_open(self) -> bool:
        """Whether any held job now has enough space."""
        return any(free() >= needs for free, needs in self._needs.values())

    def forget(self, job: str) -> None:
        """Release a job."""
        self._needs.pop(job, None)


def _free(directory: JobDirectory) -> int:
    return shutil.disk_usage(directory.path.parent).free
