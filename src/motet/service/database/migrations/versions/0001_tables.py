"""The shape of the first release, which `tables.py` made. What changes it later is a step of its own, after this one."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: a new database gets the newest tables at once."""
