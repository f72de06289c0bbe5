"""Which base a job trains on and an adapter fits, since a service may have several."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What is there has none: it is of the first base."""
    for table in ("jobs", "adapters"):
        op.add_column(table, sa.Column("base", sa.Text(), nullable=True))
