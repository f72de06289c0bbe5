"""How many bytes tenants may still store: as the service said last, less what their jobs have written since."""

from __future__ import annotations

import math
import threading
from pathlib import Path

from motet.errors import StorageFull


class StorageRoom:
    """Bytes by tenant; a tenant that is not named has no limit. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: dict[str, int] = {}

    def set(self, tenant: str, room: int | None) -> None:
        """Let a tenant store so many bytes more; None is no limit."""
        with self._lock:
            self._room.pop(tenant, None)
            if room is not None:
                self._room[tenant] = room

    def of(self, tenant: str) -> float:
        """What a tenant may store now."""
        return self._room.get(tenant, math.inf)

    def take(self, tenant: str, draft: Path) -> None:
        """Count the files of a directory that is about to be kept.

        Raises:
            StorageFull: they do not fit.
        """
        size = sum(path.stat().st_size for path in draft.iterdir())
        with self._lock:
            room = self._room.get(tenant, size)
            if size > room:
                raise StorageFull(
                    f"waits: storage_mb: to save takes {size / 2**20:.1f} MB, and this tenant may store {room / 2**20:.1f} "
                    "more; delete files, adapters, checkpoints or jobs that have ended, and it goes on by itself, or when "
                    "an admin raises it with motet tenants limit --storage-mb. Nothing committed is lost",
                    size,
                )
            if tenant in self._room:
                self._room[tenant] = room - size
