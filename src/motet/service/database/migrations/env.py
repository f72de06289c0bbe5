"""Alembic's entry point: runs the steps in `versions/` on the connection from `Store`."""

from alembic import context

from motet.service.database.tables import Table

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Table.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
