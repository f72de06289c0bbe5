"""Sharing, uploaded adapters, and when a job may start."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this shape."""
    # Not as a batch, which may make the table anew, and so drop what refers to it.
    op.add_column("jobs", sa.Column("reward", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("after", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("start_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("waits", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("starts_from", sa.String(length=160), nullable=True))
    _adapters()
    _shares()


def _adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("bytes", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("target_modules", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_adapters_tenant_id"), ["tenant_id"], unique=False)


def _shares() -> None:
    op.create_table(
        "shares",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("object", sa.String(length=40), nullable=False),
        sa.Column("with_tenant", sa.String(length=40), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("object", "with_tenant"),
    )
    with op.batch_alter_table("shares", schema=None) as batch_op:
        for column in ("tenant_id", "object", "with_tenant"):
            batch_op.create_index(batch_op.f(f"ix_shares_{column}"), [column], unique=False)


def downgrade() -> None:
    """Go back."""
    op.drop_table("shares")
    op.drop_table("adapters")
    for column in ("starts_from", "waits", "start_at", "after", "reward"):
        op.drop_column("jobs", column)
