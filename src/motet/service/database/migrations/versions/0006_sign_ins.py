"""Whose sign-in a key is."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keys that exist were made by hand."""
    op.add_column("keys", sa.Column("person", sa.String(64), nullable=True))
    op.create_index("ix_keys_person", "keys", ["person"])
