"""Tenants that were erased."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Those that were erased before are not known."""
    op.create_table(
        "closed_tenants",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
    )
