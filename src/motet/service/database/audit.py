"""Who changed what, newest first."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from motet.service.database.store import Store
from motet.service.database.tables import AuditEntry, Key, Tenant


def entries(
    store: Store, *, tenant_id: str | None = None, before: int | None = None, limit: int = 100
) -> Sequence[tuple[AuditEntry, str, str]]:
    """Entries with the names of the tenant and of the key, newest first.

    Args:
        store: where they are kept.
        tenant_id: only this tenant's; all unless given.
        before: the number of the last one of the page before.
        limit: the most entries.
    """
    query = (
        select(AuditEntry, Tenant.name, Key.name)
        .join(Tenant, Tenant.id == AuditEntry.tenant_id, isouter=True)
        .join(Key, Key.id == AuditEntry.key_id, isouter=True)
        .order_by(AuditEntry.id.desc())
        .limit(limit)
    )
    if tenant_id is not None:
        query = query.where(AuditEntry.tenant_id == tenant_id)
    if before is not None:
        query = query.where(AuditEntry.id < before)
    with store.transaction() as session:
        return [(entry, tenant or "", key or "") for entry, tenant, key in session.execute(query).all()]
