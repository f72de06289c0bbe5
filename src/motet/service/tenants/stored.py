"""Bytes stored by each tenant: added where the service writes, measured again where the engine writes.

Files count in whole blocks, and rows of the database too: work for reward workers by its size, others by about their size.
Jobs pause because of the content of their tenant's files; the rest of blocks and rows only keep it from writing more.

A request walks no directories, except jobs that changed since they were measured, if a write would not fit.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import ColumnElement, Select, Text, cast, func, select

from motet.service.database import tables
from motet.service.database.store import Store
from motet.service.database.tables import AuditEntry, Event, Key, ScoringUnit, StoredFile, StoredJob, UploadedAdapter
from motet.service.storage import Storage

SAMPLES = "samples"
"""The part for a tenant's samples, besides the ids of its jobs."""
_BLOCK = 4096
_BLOCKS_OF: Mapping[type[StoredFile | UploadedAdapter], int] = {StoredFile: 1, UploadedAdapter: 3}
"""Blocks of an upload besides its content: a file's rest, an adapter's two files and its directory."""
_EVENT, _ENTRY = 1024, 512
"""About the bytes of an event, and of a key, a line of usage or an entry of the audit log, with their indexes."""
_COUNTED_SECONDS = 60.0
"""Keys, lines of usage and entries of the audit log are counted again after this time."""
_FILES = 100
"""Files looked at for each change: a job has some more with each step, and all of its steps would take the square of them."""


@dataclass(frozen=True)
class Measured:
    """All files below a directory."""

    bytes: int
    """In whole blocks, at least one for each file and directory; hard links count once."""
    content: int
    """Without the rest of blocks and without directories."""
    files: int


def measured(directory: Path) -> Measured:
    """Look at all files below a directory."""
    total, content, files, seen = 0, 0, 0, set[tuple[int, int]]()
    for root, _, names in os.walk(directory):
        total += _BLOCK
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:  # the engine deletes old files meanwhile
                continue
            files += 1
            if status.st_nlink == 1 or (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += blocks(status.st_size)
                content += status.st_size
    return Measured(total, content, files)


def blocks(size: int) -> int:
    """Disk space of a file with `size` bytes; an empty one has an inode too."""
    return max(1, -(-size // _BLOCK)) * _BLOCK


class StoredBytes:
    """Bytes of uploads, jobs with their rows in the database, and samples by tenant. Thread-safe."""

    def __init__(self, store: Store, storage: Storage) -> None:
        self._store, self._storage = store, storage
        self._lock = threading.Lock()
        self._bytes: dict[str, dict[str, int]] = {}
        """By tenant, and by job or `SAMPLES`; for tenants that were requested."""
        self._content: dict[str, dict[str, int]] = {}
        """As `_bytes`, without the rest of blocks and without directories."""
        self._work: dict[str, Counter[str]] = {}
        """Work for reward workers and its scores in the database, by tenant and job."""
        self._events: dict[str, dict[str, int]] = {}
        """Events in the database in bytes, by tenant and job."""
        self._entries: tuple[float, Counter[str]] = (-math.inf, Counter())
        """When keys, lines of usage and entries of the audit log were counted, and their bytes by tenant."""
        self.prepared = Counter[str]()
        """Rows of jobs that hosts have in memory and in unlinked files, by tenant."""
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
        files, entries = self._files_of_each(tenant_ids, in_blocks=True), self._counted_entries()
        with self._lock:
            return {
                one: files[one]
                + self._work[one].total()
                + sum(self._events[one].values())
                + entries[one]
                + self.prepared[one]
                for one in tenant_ids
            }

    def content_of_each(self, tenant_ids: Collection[str]) -> dict[str, int]:
        """Bytes of the content of files and of configurations of each of these tenants: what makes jobs pause."""
        return self._files_of_each(tenant_ids, in_blocks=False)

    def _files_of_each(self, tenant_ids: Collection[str], *, in_blocks: bool) -> dict[str, int]:
        total, parts = Counter[str](), self._bytes if in_blocks else self._content
        with self._store.transaction() as session:
            for table, more in _BLOCKS_OF.items():
                taken = (table.bytes + _BLOCK - 1) // _BLOCK * _BLOCK + (more - 1) * _BLOCK
                sums = select(table.tenant_id, func.sum(taken if in_blocks else table.bytes))
                of_each = sums.where(table.tenant_id.in_(tenant_ids)).group_by(table.tenant_id)
                for tenant_id, size in session.execute(of_each):
                    total[tenant_id] += int(size)
        for tenant_id in tenant_ids:
            self._load(tenant_id)
        with self._lock:
            return {one: total[one] + sum(parts[one].values()) for one in tenant_ids}

    def tidy(self) -> None:
        """Give free space of the database back, and bound the logs of hosts."""
        self._store.presence.shrink()
        self._storage.bound_logs()

    def add(self, tenant_id: str, part: str, size: int) -> None:
        """Count bytes written to a part; negative if removed."""
        self._load(tenant_id)
        with self._lock:
            for parts in (self._bytes[tenant_id], self._content[tenant_id]):
                parts[part] = max(0, parts.get(part, 0) + size)
            self._changed[tenant_id, part] += 1

    def work_added(self, tenant_id: str, job_id: str, size: int) -> None:
        """Count work for reward workers."""
        self._load(tenant_id)
        with self._lock:
            self._work[tenant_id][job_id] += size

    def work_done(self, job_id: str, size: int | None = None) -> None:
        """Count a job's work no longer: so many bytes, or all of it."""
        with self._lock:
            for work in self._work.values():
                if job_id in work:
                    work[job_id] = 0 if size is None else max(0, work[job_id] - size)

    def changed(self, job_id: str) -> None:
        """Schedule a job to be measured after a change."""
        with self._lock:
            self._changed["", job_id] += 1

    def forget(self, job_id: str) -> None:
        """Remove a deleted job."""
        with self._lock:
            for kind in (self._bytes, self._content, self._work, self._events):
                for parts in kind.values():
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
        jobs = [part for _, part in parts]
        specs = self._specs(StoredJob.id.in_(jobs)) if parts else {}
        events = self._counted_events(Event.job_id.in_(jobs)) if parts else {}
        for tenant_id, part in parts:
            now = self._measured(tenant_id, part)
            with self._lock:
                if (tenant_id, part) == further:
                    self._rest = now.files // _FILES
                self._files[("", part) if part != SAMPLES else (tenant_id, part)] = now.files
                if tenant_id in self._bytes and (part in self._bytes[tenant_id] or (tenant_id, part) in owned):
                    self._bytes[tenant_id][part] = now.bytes + specs.get(part, 0)
                    self._content[tenant_id][part] = now.content + specs.get(part, 0)
                    self._events[tenant_id] |= {part: events[part]} if part in events else {}

    def _load(self, tenant_id: str) -> None:
        with self._lock:
            if tenant_id in self._bytes:
                return
        specs = self._specs(StoredJob.tenant_id == tenant_id)
        found = {part: self._measured(tenant_id, part) for part in (*specs, SAMPLES)}
        of_tenant = select(StoredJob.id).where(StoredJob.tenant_id == tenant_id)
        events, work = self._counted_events(Event.job_id.in_(of_tenant)), self._waiting_work(of_tenant)
        with self._lock:
            if tenant_id not in self._bytes:
                self._bytes[tenant_id] = {part: one.bytes + specs.get(part, 0) for part, one in found.items()}
                self._content[tenant_id] = {part: one.content + specs.get(part, 0) for part, one in found.items()}
                self._events[tenant_id], self._work[tenant_id] = events, work

    def _measured(self, tenant_id: str, part: str) -> Measured:
        return measured(self._storage.samples(tenant_id) if part == SAMPLES else self._storage.job(part).path)

    def _counted_entries(self) -> Counter[str]:
        """Bytes of keys, usage and entries of the audit log by tenant, as of a minute ago or less."""
        if time.monotonic() > self._entries[0] + _COUNTED_SECONDS:
            read, entries = time.monotonic(), Counter[str]()
            with self._store.transaction() as session:
                for table in (AuditEntry, Key, tables.Usage):
                    for row in session.execute(select(table.tenant_id, func.count()).group_by(table.tenant_id)):
                        entries[str(row[0])] += _ENTRY * int(row[1])
            self._entries = read, entries
        return self._entries[1]

    def _counted_events(self, which: ColumnElement[bool]) -> dict[str, int]:
        with self._store.transaction() as session:
            rows = session.execute(select(Event.job_id, func.count()).where(which).group_by(Event.job_id))
            return {str(job): _EVENT * int(number) for job, number in rows}

    def _waiting_work(self, jobs: Select[str]) -> Counter[str]:
        """Characters of the work that waits for reward workers, and of scores, by job; reads all of it."""
        texts = (func.length(cast(column, Text)) for column in (ScoringUnit.work, ScoringUnit.scores))
        waiting = select(ScoringUnit.job_id, func.sum(func.coalesce(*texts, 0))).where(ScoringUnit.job_id.in_(jobs))
        with self._store.transaction() as session:
            rows = session.execute(waiting.group_by(ScoringUnit.job_id))
            return Counter({str(job): int(size) for job, size in rows})

    def _specs(self, which: ColumnElement[bool]) -> dict[str, int]:
        """Characters of jobs' configurations in the database."""
        sizes = select(StoredJob.id, func.length(cast(StoredJob.spec, Text))).where(which)
        with self._store.transaction() as session:
            return {str(job): int(size) for job, size in session.execute(sizes)}
