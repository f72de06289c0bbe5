"""What of its role a key may do, and which key it was made with."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What is there may do all that its role may."""
    op.add_column("keys", sa.Column("scope", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("keys", sa.Column("made_by", sa.String(40), nullable=True))
