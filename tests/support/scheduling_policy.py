"""Who is next, found by a look at all, and how long a neighbour waits: what the scheduler is compared with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

from motet.algorithms.packing import Standing
from motet.runtime.scheduler import FairScheduler
from tests.support.fake_engine import FakeEngine


def next_job(waiting: Mapping[str, Standing]) -> str:
    """The tenant with the least weighted tokens per share, and of its waiting jobs the one with the least tokens per weight.

    How many jobs a tenant has does not enter. Ties go by name.

    Args:
        waiting: the standing of each job that waits; at least one.
    """

    def order(job: str) -> tuple[float, str, float, str]:
        standing = waiting[job]
        return (
            standing.tenant_consumed / standing.share,
            standing.tenant,
            standing.consumed / standing.weight,
            job,
        )

    return min(waiting, key=order)


async def rows_between_turns(scheduler: FairScheduler, engine: FakeEngine, over: Callable[[], bool]) -> int:
    """The most rows that an engine begins for others until a neighbour has its turn, who asks again and again."""

    def begun() -> int:
        return sum(len(request.seeds) for request in engine.requests)

    scheduler.join("neighbour", 1.0, "neighbours")
    seen = [0]
    while not over():
        async with scheduler.permit("neighbour", 1):
            seen.append(begun())
            scheduler.spend("neighbour", 1)
            await asyncio.sleep(0)
    scheduler.leave("neighbour")
    return max(after - before for before, after in itertools.pairwise([*seen, begun()]))
