"""Erases a tenant: its keys, jobs, files, adapters, shares, limits, and names in its usage."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from sqlalchemy import delete, or_, select, update
from sqlalchemy.exc import IntegrityError

from motet.core.errors import StoreError
from motet.core.types import JobState, Wanted
from motet.observe.follow import remove_tenant
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Store
from motet.service.database.tables import (
    Key,
    Share,
    StoredFile,
    StoredJob,
    StoredRace,
    Tenant,
    TenantLimits,
    UploadedAdapter,
    Usage,
)
from motet.service.jobs.submissions import Submissions
from motet.service.storage import Storage


class Erasure:
    """Erases tenants in repeatable steps: call again after a crash, or while jobs are ending."""

    def __init__(
        self, store: Store, storage: Storage, adapters: Adapters, submissions: Submissions, observers: Path
    ) -> None:
        """`observers` is the directory of observers' files."""
        self._store, self._storage, self._adapters, self._submissions = store, storage, adapters, submissions
        self._observers = observers

    def erase(self, tenant_id: str) -> int:
        """Close the tenant and end its jobs; then delete everything. Returns the number of jobs that have not ended.

        Usage lines stay under the tenant's id without names of jobs; the audit log keeps ids.
        """
        self._store.tenants.close(tenant_id)
        jobs = self._store.scalars(select(StoredJob).where(StoredJob.tenant_id == tenant_id))
        for job in jobs:
            if not JobState(job.state).final and job.wanted != Wanted.CANCEL:
                with contextlib.suppress(StoreError):  # it has just ended
                    self._submissions.steer(job, Wanted.CANCEL)
        jobs = self._store.scalars(select(StoredJob).where(StoredJob.tenant_id == tenant_id))
        if waiting := sum(not JobState(job.state).final for job in jobs):
            return waiting
        for job in jobs:
            self._submissions.delete(job)
        for adapter in self._store.scalars(select(UploadedAdapter).where(UploadedAdapter.tenant_id == tenant_id)):
            self._adapters.remove(adapter)
        for file in self._store.scalars(select(StoredFile).where(StoredFile.tenant_id == tenant_id)):
            self._storage.upload(file.id, file.filename).unlink(missing_ok=True)
            self._store.delete_file(file.id)
        shutil.rmtree(self._storage.samples(tenant_id), ignore_errors=True)
        for race in self._store.scalars(select(StoredRace.id).where(StoredRace.tenant_id == tenant_id)):
            shutil.rmtree(self._storage.races / race, ignore_errors=True)
        remove_tenant(self._observers, self._store.tenants.name_of(tenant_id))
        try:
            with self._store.transaction() as session:
                session.execute(update(Usage).where(Usage.tenant_id == tenant_id).values(job_name=""))
                session.execute(delete(StoredRace).where(StoredRace.tenant_id == tenant_id))
                session.execute(delete(Share).where(or_(Share.tenant_id == tenant_id, Share.with_tenant == tenant_id)))
                session.execute(delete(TenantLimits).where(TenantLimits.tenant_id == tenant_id))
                session.execute(delete(Key).where(Key.tenant_id == tenant_id))
                session.execute(delete(Tenant).where(Tenant.id == tenant_id))
        except IntegrityError:  # a running request has just added something
            return 1
        self._store.tenants.forget(tenant_id)
        return 0
