"""Who made a key, a job, a file and an adapter. Nobody is known for jobs, files and adapters that there are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and fill those of keys: a key that a member made for themselves is of the same account."""
    for table in ("keys", "jobs", "files", "adapters"):
        op.add_column(table, sa.Column("account", sa.String(40)))
        op.add_column(table, sa.Column("submitter", sa.String(100)))
    keys = sa.table("keys", *map(sa.column, ("id", "name", "role", "made_by", "person", "account", "submitter")))
    connection = op.get_bind()
    known = {str(row.id): row for row in connection.execute(sa.select(keys))}
    for key_id, key in known.items():
        while (maker := known.get(key.made_by)) is not None and maker.role == "member":
            key = maker
        account = f"person-{key.person[:32]}" if key.person else key.id
        values = {"account": account, "submitter": key.name or key.id}
        connection.execute(sa.update(keys).where(keys.c.id == key_id).values(values))
