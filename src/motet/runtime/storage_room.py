"""Bytes that tenants may still store: the service's last value, less what their jobs have written since."""

from __future__ import annotations

import math
import threading
from pathlib import Path

from motet.core.errors import StorageFull


class StorageRoom:
    """Bytes by tenant; a tenant without an entry has no limit. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: dict[str, int] = {}

    def set(self, tenant: str, room: int | None) -> None:
        """Set the bytes that a tenant may still store; None is no limit."""
        with self._lock:
            self._room.pop(tenant, None)
            if room is not None:
                self._room[tenant] = room

    def of(self, tenant: str) -> float:
        """Bytes that a tenant may store now; inf without a limit."""
        return self._room.get(tenant, math.inf)

    def take(self, tenant: str, draft: Path) -> None:
        """Count the files of a directory before it is committed.

        Raises:
            StorageFull: they do not fit.
        """
        size = size_of(draft)
        with self._lock:
            room = self._room.get(tenant, size)
            if size > room:
                raise StorageFull(
                    f"waits: storage_mb: saving takes {size / 2**20:.1f} MB, and this tenant may store {room / 2**20:.1f} "
                    "more; it continues once files, adapters, checkpoints or ended jobs are deleted, or when "
                    "an admin raises it with motet tenants limit --storage-mb. Nothing committed is lost",
                    size,
                )
            if tenant in self._room:
                self._room[tenant] = room - size


def size_of(directory: Path) -> int:
    """Bytes of all files; a critic and the roles of a team have directories of their own."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
