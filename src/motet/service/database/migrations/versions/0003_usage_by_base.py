"""Usage by base, and which bases a service has had."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What a job used is of its base; all else that is there, of the first."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "bases",
        sa.Column("number", number, primary_key=True, autoincrement=True),
        sa.Column("name", sa.Text(), nullable=False, unique=True),
        sa.Column("place", sa.Text(), nullable=False),
    )
    op.add_column("usage", sa.Column("base", sa.Text(), nullable=False, server_default=""))
    op.execute("UPDATE usage SET base = COALESCE((SELECT jobs.base FROM jobs WHERE jobs.id = usage.job_id), '')")
    unnamed = "usage_day_tenant_id_job_id_key"  # by PostgreSQL
    with op.batch_alter_table("usage", naming_convention={"uq": unnamed}) as usage:
        usage.alter_column("base", server_default=None)
        usage.drop_constraint(unnamed, type_="unique")
        usage.create_unique_constraint("usage_once", ["day", "tenant_id", "job_id", "base"])
