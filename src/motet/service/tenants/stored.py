"""Bytes stored by each tenant: added where the service writes, measured again where the engine writes.

A request walks no directories, except jobs that changed since they were measured, if a write would not fit.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sqlalchemy import func, select

from motet.service.database.store import Store
from motet.service.database.tables import StoredFile, StoredJob, UploadedAdapter
from motet.service.storage import Storage

SAMPLES = "samples"
"""The part for a tenant's samples, besides the ids of its jobs."""
_BLOCK = 4096


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory, in whole blocks; hard links count once."""
    total, seen = 0, set[tuple[int, int]]()
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:  # the engine deletes old files meanwhile
                continue
            if status.st_nlink == 1 or (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += blocks(status.st_size)
    return total


def blocks(size: int) -> int:
    """Disk space of a file with `size` bytes."""
    return -(-size // _BLOCK) * _BLOCK


class StoredBytes:
    """Bytes of uploads, jobs and samples by tenant. Thread-safe."""

    def __init__(self, store: Store, storage: Storage) -> None:
        self._store, self._storage = store, storage
        self._lock = threading.Lock()
        self._bytes: dict[str, dict[str, int]] = {}
        """By tenant, and by job or `SAMPLES`; for tenants that were requested."""
        self._changed: set[tuple[str, str]] = set()
        """(tenant, part) that must be measured again; an empty tenant must be looked up."""
        self._round: list[tuple[str, str]] = []
        """Parts that are measured from time to time although no change was reported."""

    def of(self, tenant_id: str) -> int:
        """Bytes stored by a tenant."""
        with self._store.transaction() as session:
            uploads = [
                session.scalar(select(func.sum(table.bytes)).where(table.tenant_id == tenant_id)) or 0
                for table in (StoredFile, UploadedAdapter)
            ]
        self._load(tenant_id)
        with self._lock:
            return sum(map(int, uploads)) + sum(self._bytes[tenant_id].values())

    def add(self, tenant_id: str, part: str, size: int) -> None:
        """Count bytes written to a part; negative if removed."""
        self._load(tenant_id)
        with self._lock:
            parts = self._bytes[tenant_id]
            parts[part] = max(0, parts.get(part, 0) + size)
            self._changed.add((tenant_id, part))

    def changed(self, job_id: str) -> None:
        """Schedule a job to be measured after a change."""
        with self._lock:
            self._changed.add(("", job_id))

    def forget(self, job_id: str) -> None:
        """Remove a deleted job."""
        with self._lock:
            for parts in self._bytes.values():
                parts.pop(job_id, None)

    def measure(self) -> None:
        """Measure what has changed, and one further part in rotation."""
        with self._lock:
            changed, self._changed = self._changed, set()
            if not self._round:
                self._round = [(tenant, part) for tenant, parts in self._bytes.items() for part in parts]
            if self._round:
                changed.add(self._round.pop())
        jobs = [part for tenant, part in changed if not tenant]
        owners = select(StoredJob.tenant_id, StoredJob.id).where(StoredJob.id.in_(jobs))
        with self._store.transaction() as session:
            owned = [(str(row[0]), str(row[1])) for row in session.execute(owners)] if jobs else []
        for tenant_id, part in {*owned, *(one for one in changed if one[0])}:
            size = self._measured(tenant_id, part)
            with self._lock:
                if tenant_id in self._bytes and (part in self._bytes[tenant_id] or (tenant_id, part) in owned):
                    self._bytes[tenant_id][part] = size

    def _load(self, tenant_id: str) -> None:
        with self._lock:
            if tenant_id in self._bytes:
                return
        jobs = self._store.scalars(select(StoredJob.id).where(StoredJob.tenant_id == tenant_id))
        measured = {part: self._measured(tenant_id, part) for part in (*jobs, SAMPLES)}
        with self._lock:
            self._bytes.setdefault(tenant_id, measured)

    def _measured(self, tenant_id: str, part: str) -> int:
        return size_of(self._storage.samples(tenant_id) if part == SAMPLES else self._storage.job(part).path)
