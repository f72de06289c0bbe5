"""The shape that `tables.py` makes. Each later change of it is a step after this one."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: a new database gets the newest tables at once."""
