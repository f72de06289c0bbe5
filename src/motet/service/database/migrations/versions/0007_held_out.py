"""The newest and the best held-out figure of a job."""

import math

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What jobs have been evaluated to so far is in their events."""
    from motet.runtime.progress import figure_of
    from motet.service.database.tables import newer_evaluation

    op.add_column("jobs", sa.Column("held_out", sa.JSON(none_as_null=True), nullable=True))
    events = sa.table("events", sa.column("id"), sa.column("job_id"), sa.column("kind"), sa.column("data", sa.JSON))
    jobs = sa.table("jobs", sa.column("id"), sa.column("held_out", sa.JSON))
    connection = op.get_bind()
    for (job_id,) in connection.execute(sa.select(jobs.c.id)).all():
        steps = sa.select(events.c.data).where(events.c.job_id == job_id, events.c.kind == "step").order_by(events.c.id)
        held_out = None
        for (line,) in connection.execute(steps):
            if line.get("eval") and math.isfinite(value := figure_of(line["eval"])[1]):
                held_out = newer_evaluation(held_out, int(line["step"]), value)
        if held_out is not None:
            connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(held_out=held_out))
