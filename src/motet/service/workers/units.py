"""Rollouts that wait for a reward worker, in the database: asked once, handed out on lease, counted once.

A unit is one reward of one problem's completions. Its key is a digest of all that its score may depend on, so an engine
that asks again after a crash finds what was scored already. What was scored is kept, without its texts, until the job
has gone on so far that it cannot be asked again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sqlalchemy import Text, cast, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from motet.service.database.store import Store
from motet.service.database.tables import ScoringUnit, new_id, now

MOST_LEASED = 2**24
"""Characters of work that are handed out at once, unless one unit has more."""


@dataclass(frozen=True)
class Leased:
    """A unit in the hands of a worker."""

    key: str
    work: Mapping[str, Any]
    """`reward`, `problem`, `completions`, `transcripts`."""
    handed_out: int
    """How often it was handed out, this time included."""


def key_of(work: Mapping[str, Any]) -> str:
    """The digest of a piece of work."""
    return hashlib.sha256(json.dumps(work, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")).hexdigest()


class ScoringUnits:
    """The units of all jobs. Every call is one short transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ask(self, job_id: str, key: str, step: int, work: Mapping[str, Any]) -> list[Any] | None:
        """Scores of a piece of work where they are known; else it waits for a worker. `step`: steps that the job has done."""
        with self._store.transaction() as session:
            row = session.execute(
                select(ScoringUnit.scores).where(ScoringUnit.job_id == job_id, ScoringUnit.key == key)
            ).first()
        if row is not None:
            return None if row.scores is None else list(row.scores)
        unit = ScoringUnit(job_id=job_id, key=key, step=step, work=dict(work), completions=len(work["completions"]))
        try:
            with self._store.transaction() as session:
                session.add(unit)
        except IntegrityError:  # asked for at the same time, or the job was deleted
            pass
        return None

    def lease(self, job_id: str, worker: str, most: int, seconds: float) -> list[Leased]:
        """Renew what a worker holds of a job, and hand it more, the oldest first, as far as they fit into one answer."""
        lease, until = new_id("lease"), now() + seconds
        waiting = (ScoringUnit.job_id == job_id, ScoringUnit.scores.is_(None))
        free = or_(ScoringUnit.leased_until.is_(None), ScoringUnit.leased_until < now())
        size = func.length(cast(ScoringUnit.work, Text))
        oldest = select(ScoringUnit.id, size).where(*waiting, free).order_by(ScoringUnit.id).limit(most)
        with self._store.transaction() as session:
            session.execute(
                update(ScoringUnit).where(*waiting, ScoringUnit.worker == worker).values(leased_until=until)
            )
            if most < 1:
                return []
            rows = session.execute(oldest).all()
            sizes = accumulate(row[1] for row in rows)
            chosen = [row[0] for row, size in zip(rows, sizes, strict=True) if size <= MOST_LEASED]
            chosen = chosen or [row[0] for row in rows[:1]]
            # `free` once more: of two that ask at once, the second has to look at what the first has left.
            session.execute(
                update(ScoringUnit)
                .where(ScoringUnit.id.in_(chosen), *waiting, free)
                .values(worker=worker, lease=lease, leased_until=until, handed_out=ScoringUnit.handed_out + 1)
                .execution_options(synchronize_session=False)
            )
            units = session.scalars(select(ScoringUnit).where(ScoringUnit.lease == lease).order_by(ScoringUnit.id))
            return [Leased(unit.key, unit.work or {}, unit.handed_out) for unit in units]

    def give_back(self, job_id: str, worker: str) -> None:
        """End a worker's leases, so that others can have them at once."""
        with self._store.transaction() as session:
            session.execute(
                update(ScoringUnit)
                .where(ScoringUnit.job_id == job_id, ScoringUnit.worker == worker, ScoringUnit.scores.is_(None))
                .values(worker=None, leased_until=None)
            )

    def completions(self, job_id: str, keys: Sequence[str]) -> dict[str, int]:
        """How many completions each of these units has; one that is not there is left out."""
        with self._store.transaction() as session:
            rows = session.execute(
                select(ScoringUnit.key, ScoringUnit.completions).where(
                    ScoringUnit.job_id == job_id, ScoringUnit.key.in_(keys)
                )
            )
            return {str(row[0]): int(row[1]) for row in rows}

    def settle(self, job_id: str, key: str, scores: Sequence[Any]) -> bool:
        """Keep the scores of a unit; False where it has some already, or is not there."""
        with self._store.transaction() as session:
            done = session.execute(
                update(ScoringUnit)
                .where(ScoringUnit.job_id == job_id, ScoringUnit.key == key, ScoringUnit.scores.is_(None))
                .values(scores=list(scores), work=None, leased_until=None)
            )
            return bool(done.rowcount)  # type: ignore[attr-defined]

    def forget(self, job_id: str, before_step: int | None = None) -> None:
        """Forget a job's units: all, or those that were asked for before a step and are scored."""
        old = delete(ScoringUnit).where(ScoringUnit.job_id == job_id)
        if before_step is not None:
            old = old.where(ScoringUnit.step < before_step, ScoringUnit.scores.is_not(None))
        with self._store.transaction() as session:
            session.execute(old)
