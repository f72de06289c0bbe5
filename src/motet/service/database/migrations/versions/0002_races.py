"""Races, and the jobs that are candidates of one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table `races`, and two columns to `jobs`."""
    op.create_table(
        "races",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(40), nullable=False, unique=True),
        sa.Column("tenant_id", sa.String(40), sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("base", sa.Text),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("ended", sa.Double),
        sa.Column("failure", sa.Text, nullable=False),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.execute("ALTER TABLE jobs ADD COLUMN race VARCHAR(40) REFERENCES races (id)")
    op.execute("ALTER TABLE jobs ADD COLUMN until INTEGER")
    op.create_index("ix_jobs_race", "jobs", ["race"])
