"""Fifty clients that read and stream while four jobs train: errors, how long reads take, and what it costs the training.

    .venv/bin/python -m bench.service                       # lines for docs/service.md; about five minutes
    .venv/bin/python -m bench.service --repeats 1 --steps 60

The same four jobs run with and without the clients, in turn, each time in a fresh service; the engine has one thread. Training
throughput is tokens sampled and trained per second, from the moment when every job has done two steps to the end of the first
job, so start-up is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.support.service_run import Service, tiny

CLIENTS = 50
RATE = 20.0
"""Requests per second of all clients together."""
STREAMING = 10
"""Clients of these that follow a job instead, and look away and back all the time."""
JOBS = 4
SETTLED = 2
"""Steps of each job before anything is measured."""


@dataclass
class Seen:
    """What the clients met."""

    seconds: list[float] = field(default_factory=list)
    """Of each read, from request to last byte."""
    first_bytes: list[float] = field(default_factory=list)
    """Of each stream, until its first event."""
    errors: list[str] = field(default_factory=list)


def paths(number: int) -> str:
    """What a reader asks for, in turn."""
    job = f"job-{number % JOBS}"
    routes = (
        "/v1/jobs",
        f"/v1/jobs/{job}",
        f"/v1/jobs/{job}/events",
        f"/v1/jobs/{job}/versions",
        "/v1/models",
        "/metrics",
    )
    return routes[number % len(routes)]


async def read(client: httpx2.AsyncClient, number: int, seen: Seen, stop: asyncio.Event) -> None:
    """One client that polls."""
    pause = (CLIENTS - STREAMING) / RATE
    await asyncio.sleep(pause * number / CLIENTS)
    turn = number
    while not stop.is_set():
        began = time.perf_counter()
        try:
            answer = await client.get(paths(turn))
            seen.seconds.append(time.perf_counter() - began)
            if answer.status_code != 200:
                seen.errors.append(f"{paths(turn)}: {answer.status_code}")
        except httpx2.HTTPError as error:
            seen.errors.append(f"{paths(turn)}: {type(error).__name__}")
        turn += 1
        await asyncio.sleep(max(0.0, pause - (time.perf_counter() - began)))


async def follow(client: httpx2.AsyncClient, number: int, seen: Seen, stop: asyncio.Event) -> None:
    """One client that streams a job's events for a few seconds at a time."""
    while not stop.is_set():
        began, last = time.perf_counter(), 0
        try:
            async with (
                asyncio.timeout(5.0),
                client.stream("GET", f"/v1/jobs/job-{number % JOBS}/events/stream") as answer,
            ):
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        if not last:
                            seen.first_bytes.append(time.perf_counter() - began)
                        identity = int(line[4:])
                        if identity <= last:
                            seen.errors.append(f"event {identity} came after {last}")
                        last = identity
        except TimeoutError:
            continue
        except httpx2.HTTPError as error:
            seen.errors.append(f"stream: {type(error).__name__}")


@contextlib.asynccontextmanager
async def clients(url: str, seen: Seen) -> AsyncIterator[None]:
    """All of them, while the block runs."""
    stop = asyncio.Event()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30.0, limits=limits) as client:
        work = [
            asyncio.create_task((follow if number < STREAMING else read)(client, number, seen, stop))
            for number in range(CLIENTS)
        ]
        yield
        stop.set()
        await asyncio.gather(*work)


def job(number: int, steps: int) -> dict[str, Any]:
    """One of the four."""
    return tiny(f"job-{number}", steps, sampling={"max_tokens": 16}, algorithm={"group_size": 8, "groups_per_step": 4})


async def one_run(directory: Path, steps: int, seen: Seen | None = None) -> float:
    """Tokens per second of the four jobs, alone or with clients that note what they meet."""
    service = Service(directory)
    try:
        await asyncio.to_thread(service.start)
        async with contextlib.AsyncExitStack() as stack:
            if seen is not None:
                await stack.enter_async_context(clients(service.url, seen))
            for number in range(JOBS):
                await asyncio.to_thread(service.submit, job(number, steps))
            return await asyncio.to_thread(_rate, directory, steps)
    finally:
        await asyncio.to_thread(service.close)


def _rate(directory: Path, steps: int) -> float:
    """Wait until one job has done its steps: tokens per second since all had settled."""
    while min(_counts(directory)[0]) < SETTLED:
        time.sleep(0.1)
    (_, before), began = _counts(directory), time.monotonic()
    while max((counts := _counts(directory))[0]) < steps:
        time.sleep(0.1)
    return (counts[1] - before) / (time.monotonic() - began)


def _counts(directory: Path) -> tuple[list[int], int]:
    """Steps of each job and tokens of all, from their files: asking the service would be one client more."""
    steps, tokens = [], 0
    for path in sorted((directory / "run").glob("job-*/timings.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        steps.append(len(records))
        tokens += sum(int(record["tokens_sampled"]) + int(record["tokens_trained"]) for record in records)
    return (steps if len(steps) == JOBS else [0]), tokens


async def measure(repeats: int, steps: int) -> None:
    """Alternate, and print."""
    ratios, seen = [], Seen()
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(prefix="motet-bench-") as scratch:
            alone = await one_run(Path(scratch) / "alone", steps)
            watched = await one_run(Path(scratch) / "watched", steps, seen)
        ratios.append(watched / alone)
        figures = f"{alone:.0f} tokens/s alone, {watched:.0f} with clients ({ratios[-1]:.3f})"
        print(f"repeat {repeat + 1}: {figures}", flush=True)
    ordered = sorted(seen.seconds)
    print(f"{len(ordered)} reads by {CLIENTS - STREAMING} clients, {len(seen.first_bytes)} streams by {STREAMING}")
    print(f"errors: {len(seen.errors)} {seen.errors[:3]}")
    print(
        f"reads: median {1000 * statistics.median(ordered):.0f} ms, 99 % within "
        f"{1000 * ordered[int(0.99 * len(ordered))]:.0f} ms, slowest {1000 * ordered[-1]:.0f} ms; "
        f"first event of a stream: median {1000 * statistics.median(seen.first_bytes):.0f} ms"
    )
    print(
        f"training with clients: {statistics.median(ratios):.3f} of that without ({min(ratios):.3f}–{max(ratios):.3f})"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    asyncio.run(measure(given.repeats, given.steps))


if __name__ == "__main__":
    main()
