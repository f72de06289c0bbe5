"""Starts of the service, by which it recognises its database."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """There were none."""
    op.create_table(
        "starts",
        sa.Column("token", sa.String(40), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("proof", sa.Text(), nullable=True),
    )
