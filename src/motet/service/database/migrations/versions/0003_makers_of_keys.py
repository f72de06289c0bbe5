"""An index of the keys that a key made."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index, so that a revocation does not read all keys while others wait for the database."""
    op.create_index("ix_keys_made_by", "keys", ["made_by"])
