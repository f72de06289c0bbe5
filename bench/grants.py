"""How many turns the fair scheduler gives in a second, by how many jobs ask for one: `python -m bench.grants`."""

from __future__ import annotations

import asyncio
import random
import time

from motet.runtime.scheduler import FairScheduler

SECONDS = 3.0


async def grants_per_second(jobs: int, per_tenant: int) -> float:
    """Every job asks again as soon as it was served, for eight rows; each turn costs another number of tokens."""
    scheduler, dice, served = FairScheduler(64), random.Random(7), 0

    async def ask(name: str) -> None:
        nonlocal served
        while True:
            async with scheduler.permit(name, 8):
                await asyncio.sleep(0)
                scheduler.spend(name, dice.randrange(100, 2000))
                served += 1

    for number in range(jobs):
        scheduler.join(f"{number}", 1.0, f"tenant {number // per_tenant}")
    tasks = [asyncio.create_task(ask(f"{number}")) for number in range(jobs)]
    await asyncio.sleep(0.5)
    before, begun = served, time.perf_counter()
    await asyncio.sleep(SECONDS)
    rate = (served - before) / (time.perf_counter() - begun)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rate


def main() -> None:
    """Print a table."""
    print("| jobs | one job a tenant | ten jobs a tenant |\n|---|---|---|")
    for jobs in (10, 1_000, 10_000):
        alone, crowd = (asyncio.run(grants_per_second(jobs, per_tenant)) for per_tenant in (1, 10))
        print(f"| {jobs:,} | {alone:,.0f} | {crowd:,.0f} |")


if __name__ == "__main__":
    main()
