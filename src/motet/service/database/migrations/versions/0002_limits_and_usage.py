"""Limits, budgets, priorities and the usage ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Go to this shape."""
    op.create_table(
        "limits",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("given", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("tenant_id"),
    )
    op.create_table(
        "usage",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("job_name", sa.String(length=100), nullable=False),
        sa.Column("tokens_prompt", BIG, nullable=False),
        sa.Column("tokens_sampled", BIG, nullable=False),
        sa.Column("tokens_trained", BIG, nullable=False),
        sa.Column("microseconds", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("day", "tenant_id", "job_id"),
    )
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.create_index("usage_of_tenant", ["tenant_id", "day"], unique=False)
        batch_op.create_index(batch_op.f("ix_usage_job_id"), ["job_id"], unique=False)
    op.create_table(
        "meter_readings",
        sa.Column("engine", sa.String(length=100), nullable=False),
        sa.Column("window", BIG, nullable=False),
        sa.PrimaryKeyConstraint("engine"),
    )


def downgrade() -> None:
    """Go back."""
    op.drop_table("meter_readings")
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_usage_job_id"))
        batch_op.drop_index("usage_of_tenant")
    op.drop_table("usage")
    op.drop_table("limits")
