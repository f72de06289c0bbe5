"""The initial schema of `tables.py`. Each later change is a step after this one."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: a new database gets the newest tables directly."""
