"""What a service's database takes for a job, by how many there are: `python -m bench.registered`."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

from sqlalchemy import insert

from motet.service.database.store import Store
from motet.service.database.tables import StoredJob, Tenant, new_id
from motet.service.database.tenants import Principal

REPEATS = 50


def milliseconds(work: Callable[[], object]) -> float:
    """The median of several calls."""
    found = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - begun))
    return statistics.median(found)


def filled(store: Store, jobs: int) -> Principal:
    """A store with so many jobs that have ended, of a hundred tenants; one of these."""
    tenants = [new_id("tenant") for _ in range(100)]
    row = {"spec": {}, "steps": 10, "state": "succeeded", "wanted": "run", "message": "", "step": 10}
    with store.transaction() as session:
        session.execute(insert(Tenant), [{"id": tenant, "name": tenant} for tenant in tenants])
        rows = [{**row, "id": f"job-{n}", "name": f"job {n}", "tenant_id": tenants[n % 100]} for n in range(jobs)]
        session.execute(insert(StoredJob), rows)
    return Principal.member_of(tenants[7])


def figures(jobs: int) -> list[float]:
    """Milliseconds of what one job or one page needs."""
    with tempfile.TemporaryDirectory() as directory:
        store, number = Store(f"sqlite:///{directory}/db"), itertools.count()
        who = filled(store, jobs)
        found = [
            milliseconds(store.open_jobs),
            milliseconds(lambda: store.jobs(who)),
            milliseconds(lambda: store.job(who, "job 107")),
            milliseconds(lambda: store.submit(who, [StoredJob(name=f"new {next(number)}", spec={}, steps=10)])),
            milliseconds(lambda: store.change_job("job-107", state="succeeded", wanted="run")),
        ]
        store.close()
    return found


def main() -> None:
    """Print a table."""
    print("| jobs | open the service | a page of 50 | one job | submit | resume |\n|---|---|---|---|---|---|")
    for jobs in (1_000, 10_000, 100_000):
        print(f"| {jobs:,} | {' | '.join(f'{figure:.2f} ms' for figure in figures(jobs))} |")


if __name__ == "__main__":
    main()
