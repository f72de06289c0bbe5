"""Usage by the person or key; nobody is known for what was used before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, also to what makes a line unique; SQLite makes the table anew for that."""
    with op.batch_alter_table("usage") as usage:
        usage.add_column(sa.Column("account", sa.String(40), nullable=False, server_default=sa.text("''")))
        usage.drop_constraint("usage_once", type_="unique")
        usage.create_unique_constraint("usage_once", ["day", "tenant_id", "job_id", "base", "account"])
