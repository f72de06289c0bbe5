"""Rollouts that wait for a reward worker."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this shape."""
    op.create_table(
        "scoring_units",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("work", sa.JSON(), nullable=True),
        sa.Column("completions", sa.Integer(), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=True),
        sa.Column("worker", sa.String(length=60), nullable=True),
        sa.Column("lease", sa.String(length=40), nullable=True),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("handed_out", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("job_id", "key"),
    )
    with op.batch_alter_table("scoring_units", schema=None) as batch_op:
        batch_op.create_index("scoring_units_of_lease", ["lease"], unique=False)


def downgrade() -> None:
    """Go back."""
    with op.batch_alter_table("scoring_units", schema=None) as batch_op:
        batch_op.drop_index("scoring_units_of_lease")

    op.drop_table("scoring_units")
