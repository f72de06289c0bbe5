"""Who is next, found by a look at all: what the accounts of the scheduler are compared with."""

from __future__ import annotations

from collections.abc import Mapping

from motet.algorithms.packing import Standing


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
