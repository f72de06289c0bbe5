"""Being the reward worker of jobs of a service, and the rewards that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from motet.client import AsyncClient, Client
from motet.commands.remote import INTERRUPTED, Where, show_json
from motet.commands.remote_view import table
from motet.service.schemas import Job
from motet.service.schemas.scoring import Reward
from motet.types import JobState


def score(where: Where, names: Sequence[str], rewards: Sequence[str], processes: int) -> int:
    """Score jobs here until they have ended; the exit code: 0, or 1 where one failed.

    Raises:
        MotetError: a reward does not load, or the service refuses.
    """
    console = Console(emoji=False)

    async def work() -> list[Job]:
        async with AsyncClient(where.url, where.key) as client:
            jobs = [await client.job(name) for name in names]
            told = ", ".join(f"{job.name} ({job.state})" for job in jobs)
            console.print(f"scoring {told} here; Ctrl-C ends it", markup=False, highlight=False, soft_wrap=True)
            await client.score(*(job.id for job in jobs), reward=rewards, processes=processes)
            return [await client.job(job.id) for job in jobs]

    try:
        ended = asyncio.run(work())
    except KeyboardInterrupt:
        again = " ".join(["motet score", *names, *(f"--reward {reward}" for reward in rewards)])
        console.print(f"the service goes on when somebody scores: `{again}`", markup=False, soft_wrap=True)
        return INTERRUPTED
    for job in ended:
        console.print(
            f"{job.name} {job.state}{f': {job.message}' if job.message else ''}", markup=False, soft_wrap=True
        )
    return 1 if any(job.state == JobState.FAILED for job in ended) else 0


def list_rewards(where: Where, *, as_json: bool) -> None:
    """A table of rewards."""
    with Client(where.url, where.key) as client:
        found = client.rewards()
    if as_json:
        show_json(found)
    else:
        Console(emoji=False).print(_table(found))


def _table(rewards: Sequence[Reward]) -> Table:
    found = table("reward", "kind", "args", "about", folds=("args", "about"))
    for reward in rewards:
        args = ", ".join(
            name + (f"={default}" if default else " (required)") for name, default in reward.parameters.items()
        )
        found.add_row(*map(Text, (reward.name, reward.kind, args, reward.summary)))
    return found
