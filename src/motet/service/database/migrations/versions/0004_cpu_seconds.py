"""CPU time in the ledger. Tenants that there are have no limit on it, unless an admin sets one.

`open_samples` counted requests and now counts completions, so it grows as its default does.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_LIMIT, _SAMPLES = "cpu_seconds_per_day", "open_samples"
_TIMES, _MOST = 16, 10**6


def upgrade() -> None:
    """Add the column to `usage`, and the limit to each tenant."""
    big = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.add_column("usage", sa.Column("cpu_microseconds", big, nullable=False, server_default=sa.text("0")))
    tenants = sa.table("tenants", sa.column("id", sa.String))
    limits = sa.table("limits", sa.column("tenant_id", sa.String), sa.column("given", sa.JSON))
    connection = op.get_bind()
    given = {str(row[0]): dict(row[1]) for row in connection.execute(sa.select(limits.c.tenant_id, limits.c.given))}
    for own in given.values():
        if own.get(_SAMPLES) is not None:
            own[_SAMPLES] = min(_TIMES * own[_SAMPLES], _MOST)
    for (tenant,) in connection.execute(sa.select(tenants.c.id)).all():
        values = {"given": {_LIMIT: None, **given.get(tenant, {})}}
        if tenant in given:
            connection.execute(sa.update(limits).where(limits.c.tenant_id == tenant).values(values))
        else:
            connection.execute(sa.insert(limits).values(tenant_id=tenant, **values))
