"""Bytes stored by each tenant: added where the service writes, measured again where the engine writes.

A request walks no directories, except jobs that changed since they were measured, if a write would not fit.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import ColumnElement, Text, cast, func, select

from motet.service.database.store import Store
from motet.service.database.tables import StoredFile, StoredJob, UploadedAdapter
from motet.service.storage import Storage

SAMPLES = "samples"
"""The part for a tenant's samples, besides the ids of its jobs."""
_BLOCK = 4096
_FILES = 100
"""Files looked at for each change: a job has some more with each step, and all of its steps would take the square of them."""


@dataclass(frozen=True)
class Measured:
    """All files below a directory."""

    bytes: int
    """In whole blocks; hard links count once."""
    files: int


def measured(directory: Path) -> Measured:
    """Look at all files below a directory."""
    total, files, seen = 0, 0, set[tuple[int, int]]()
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:  # the engine deletes old files meanwhile
                continue
            files += 1
            if status.st_nlink == 1 or (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += blocks(status.st_size)
    return Measured(total, files)


def blocks(size: int) -> int:
    """Disk space of a file with `size` bytes."""
    return -(-size // _BLOCK) * _BLOCK


class StoredBytes:
    """Bytes of uploads, jobs with their configurations, and samples by tenant. Thread-safe."""

    def __init__(self, store: Store, storage: Storage) -> None:
        self._store, self._storage = store, storage
        self._lock = threading.Lock()
        self._bytes: dict[str, dict[str, int]] = {}
        """By tenant, and by job or `SAMPLES`; for tenants that were requested."""
        self._changed = Counter[tuple[str, str]]()
        """Changes since (tenant, part) was measured; an empty tenant must be looked up."""
        self._files: dict[tuple[str, str], int] = {}
        """Files of a part when it was measured last."""
        self._round: list[tuple[str, str]] = []
        """Parts that are measured from time to time although no change was reported."""
        self._rest = 0
        """Rounds without such a part, after one with many files."""

    def of(self, tenant_id: str) -> int:
        """Bytes stored by a tenant."""
        return self.of_each((tenant_id,))[tenant_id]

    def of_each(self, tenant_ids: Collection[str]) -> dict[str, int]:
        """Bytes stored by each of these tenants."""
        total = Counter[str]()
        with self._store.transaction() as session:
            for table in (StoredFile, UploadedAdapter):
                sums = select(table.tenant_id, func.sum(table.bytes)).where(table.tenant_id.in_(tenant_ids))
                for tenant_id, size in session.execute(sums.group_by(table.tenant_id)):
                    total[tenant_id] += int(size)
        for tenant_id in tenant_ids:
            self._load(tenant_id)
        with self._lock:
            return {one: total[one] + sum(self._bytes[one].values()) for one in tenant_ids}

    def add(self, tenant_id: str, part: str, size: int) -> None:
        """Count bytes written to a part; negative if removed."""
        self._load(tenant_id)
        with self._lock:
            parts = self._bytes[tenant_id]
            parts[part] = max(0, parts.get(part, 0) + size)
            self._changed[tenant_id, part] += 1

    def changed(self, job_id: str) -> None:
        """Schedule a job to be measured after a change."""
        with self._lock:
            self._changed["", job_id] += 1

    def forget(self, job_id: str) -> None:
        """Remove a deleted job."""
        with self._lock:
            for parts in self._bytes.values():
                parts.pop(job_id, None)
            self._files.pop(("", job_id), None)

    def measure(self, *, all_changed: bool = True) -> None:
        """Measure what has changed, and one further part in rotation.

        Without `all_changed`, a part with many files waits until it has changed more often; its size is then off by the last
        few of hundreds of steps.
        """
        with self._lock:
            due = {one for one, n in self._changed.items() if all_changed or n * _FILES >= self._files.get(one, 0)}
            for one in due:
                del self._changed[one]
            if not self._round:
                self._round = [(tenant, part) for tenant, parts in self._bytes.items() for part in parts]
            self._rest = max(0, self._rest - 1)
            further = None if self._rest or not self._round else self._round.pop()
        jobs = [part for tenant, part in due if not tenant]
        owners = select(StoredJob.tenant_id, StoredJob.id).where(StoredJob.id.in_(jobs))
        with self._store.transaction() as session:
            owned = [(str(row[0]), str(row[1])) for row in session.execute(owners)] if jobs else []
        parts = {*owned, *(one for one in due if one[0]), *([further] if further else [])}
        specs = self._specs(StoredJob.id.in_([part for _, part in parts])) if parts else {}
        for tenant_id, part in parts:
            now = self._measured(tenant_id, part)
            with self._lock:
                if (tenant_id, part) == further:
                    self._rest = now.files // _FILES
                self._files[("", part) if part != SAMPLES else (tenant_id, part)] = now.files
                if tenant_id in self._bytes and (part in self._bytes[tenant_id] or (tenant_id, part) in owned):
                    self._bytes[tenant_id][part] = now.bytes + specs.get(part, 0)

    def _load(self, tenant_id: str) -> None:
        with self._lock:
            if tenant_id in self._bytes:
                return
        specs = self._specs(StoredJob.tenant_id == tenant_id)
        sizes = {part: self._measured(tenant_id, part).bytes + specs.get(part, 0) for part in (*specs, SAMPLES)}
        with self._lock:
            self._bytes.setdefault(tenant_id, sizes)

    def _measured(self, tenant_id: str, part: str) -> Measured:
        return measured(self._storage.samples(tenant_id) if part == SAMPLES else self._storage.job(part).path)

    def _specs(self, which: ColumnElement[bool]) -> dict[str, int]:
        """Characters of jobs' configurations in the database."""
        sizes = select(StoredJob.id, func.length(cast(StoredJob.spec, Text))).where(which)
        with self._store.transaction() as session:
            return {str(job): int(size) for job, size in session.execute(sizes)}
