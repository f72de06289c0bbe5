"""Fine-tuning jobs of the openai client."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this shape."""
    op.create_table(
        "fine_tunings",
        sa.Column("job_id", sa.String(length=40), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id"),
    )


def downgrade() -> None:
    """Go back."""
    op.drop_table("fine_tunings")
