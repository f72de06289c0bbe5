"""What pictures of jobs are drawn from: the steps of one, thinned."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Integer, cast, func, select

from motet.service.database.store import Store
from motet.service.database.tables import Event


def steps(store: Store, job_id: str, points: int, fields: Collection[str] = ()) -> tuple[list[dict[str, Any]], int]:
    """Steps of a job in order, and the id of its newest event: a stream goes on from there.

    Args:
        store: where events are kept.
        job_id: whose.
        points: about the most steps to give; between them steps are left out evenly. The last one and those that hold an
            evaluation are always given.
        fields: of the lines of metrics.jsonl, besides `step`; all of them where none is named.
    """
    with store.transaction() as session:
        last = session.scalar(select(func.max(Event.id)).where(Event.job_id == job_id)) or 0
        query = select(Event.data).where(Event.job_id == job_id, Event.kind == "step", Event.id <= last)
        lines = list(session.scalars(query.order_by(Event.id)))
    stride = -(-len(lines) // points)
    kept = [
        line for place, line in enumerate(lines) if place % stride == 0 or place == len(lines) - 1 or line.get("eval")
    ]
    if fields:
        kept = [{name: line[name] for name in ("step", *fields) if name in line} for line in kept]
    return kept, last


def told(store: Store, job_id: str) -> int:
    """The first step of a job that is not kept, or not sure to be: the engine has to tell it again, and those after it."""
    number = cast(Event.key, Integer)
    query = select(func.count(), func.max(number)).where(Event.job_id == job_id, Event.kind == "step")
    with store.transaction() as session:
        count, last = session.execute(query).one()
    return int(count) if count and count == last + 1 else 0  # else one of them is missing


def newest(store: Store) -> int:
    """The id of the newest event of all."""
    with store.transaction() as session:
        return session.scalar(select(func.max(Event.id))) or 0
