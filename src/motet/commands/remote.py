"""Commands that speak to `motet serve`: submit, ls, show, logs, pull, keys, and pause, resume, cancel, change and delete."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from rich.console import Console

from motet.client import AsyncClient, Client
from motet.client.reward_files import RewardFiles
from motet.commands.remote_view import JobLines, details, job_table, key_table
from motet.config import EngineConfig, JobConfig, RolloutConfig, RunConfig
from motet.errors import ConfigError
from motet.jobfile import load_jobs
from motet.service.schemas import Job
from motet.types import ADAPTER_CONFIG, JobState

INTERRUPTED = 130


@dataclass(frozen=True)
class Where:
    """The service that a command speaks to; the environment says what is not given."""

    url: str | None = None
    key: str | None = None


def submit(
    where: Where,
    path: Path,
    overrides: Sequence[str],
    *,
    follow: bool,
    as_json: bool,
    after: Sequence[str] = (),
    at: str | None = None,
    rewards: Sequence[str] = (),
) -> int:
    """Submit every job of a file, and score them here where `rewards` are given.

    The exit code: 0, or 1 where a job that was followed failed.

    Raises:
        MotetError: the file is wrong, or the service refuses a job; those before it are submitted.
    """
    config = load_jobs(path, overrides)
    jobs = RewardFiles(rewards).for_service(config.jobs) if rewards else config.jobs
    console, aside = Console(emoji=False), Console(emoji=False, stderr=True)
    with Client(where.url, where.key) as client:
        _same_base(config, client.health().base or "")
        if config.engine != EngineConfig() or config.rollout != RolloutConfig():
            aside.print(
                f"note: `engine` and `rollout` of {path} do not count here; the service has its own", markup=False
            )
        files: dict[str, str] = {}
        found = []
        for job in jobs:
            found.append(client.submit(_with_uploads(client, job, files), after=after, at=at))
            if not as_json:
                console.print(f"{found[-1].name}  {found[-1].id}", markup=False, highlight=False, soft_wrap=True)
    try:
        return _follow(where, found, aside if as_json else console, rewards) if follow or rewards else 0
    finally:
        if as_json:
            with Client(where.url, where.key) as client:
                show_json([client.job(job.id) for job in found] if follow or rewards else found)


def _same_base(config: RunConfig, served: str) -> None:
    """Refuse jobs that were meant for another base."""
    same_place = Path(config.base).exists() and Path(config.base).resolve() == Path(served).resolve()
    if config.base != served and not same_place:
        raise ConfigError(
            f"the file's base is {config.base!r}, but this service trains {served!r}; change the file, give "
            f"--set base={served}, or speak to another service"
        )


def _with_uploads(client: Client, job: JobConfig, files: dict[str, str]) -> JobConfig:
    """The job with ids in the place of files and of a PEFT directory, each of which is uploaded once."""
    found = {}
    for name in ("source", "eval_source"):
        source = getattr(job.data, name)
        if isinstance(source, str) and source.endswith((".jsonl", ".parquet")):
            if source not in files:
                files[source] = client.upload(source)
            found[name] = files[source]
    start = job.adapter.init
    if start is not None and (Path(start) / ADAPTER_CONFIG).is_file():
        if start not in files:
            files[start] = client.push(start).id
        start = files[start]
    adapter = job.adapter.model_copy(update={"init": start})
    return job.model_copy(update={"data": job.data.model_copy(update=found), "adapter": adapter})


def _follow(where: Where, jobs: Sequence[Job], console: Console, rewards: Sequence[str]) -> int:
    """Show jobs until all have ended, and score them meanwhile where there are rewards."""
    lines = JobLines(console, jobs)

    async def watch(client: AsyncClient, job: Job) -> None:
        async for event in client.events(job.id, follow=True):
            lines.see(job, event)

    async def all_of_them() -> list[Job]:
        async with AsyncClient(where.url, where.key) as client, asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(watch(client, job))
            if rewards:
                group.create_task(client.score(*(job.id for job in jobs), reward=rewards))
        async with AsyncClient(where.url, where.key) as client:
            return [await client.job(job.id) for job in jobs]

    try:
        ended = asyncio.run(_alone(all_of_them()))
    except KeyboardInterrupt:
        again = f"the service goes on; `motet logs {jobs[0].name} -f` follows again"
        if rewards:
            names = " ".join([job.name for job in jobs] + [f"--reward {reward}" for reward in rewards])
            again = f"the service goes on when somebody scores: `motet score {names}`"
        console.print(again, markup=False, soft_wrap=True)
        return INTERRUPTED
    return 1 if any(job.state == JobState.FAILED for job in ended) else 0


async def _alone(work: Any) -> Any:
    """The first error of a group by itself: it has a message for people."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


def ls(where: Where, state: str | None, limit: int, *, as_json: bool) -> None:
    """A table of jobs, newest first.

    Raises:
        ConfigError: there is no such state.
    """
    if state is not None and state not in list(JobState):
        raise ConfigError(f"there is no state {state!r}; there are {', '.join(JobState)}")
    with Client(where.url, where.key) as client:
        listed = client.jobs(state)
        jobs = list(itertools.islice(listed, limit or None))
        more = bool(limit) and next(listed, None) is not None
    if as_json:
        show_json(jobs)
        return
    console = Console(emoji=False)
    console.print(job_table(jobs, console) if jobs else "no jobs")
    if more:
        console.print(f"the newest {limit}; --limit 0 shows all")


def show(where: Where, name: str, *, as_json: bool) -> None:
    """One job with its versions."""
    with Client(where.url, where.key) as client:
        job, versions = client.job(name), client.versions(name)
        if as_json:
            show_json(
                {**job.model_dump(mode="json"), "versions": [version.model_dump(mode="json") for version in versions]}
            )
            return
        console = Console(emoji=False)
        console.print(details(job, versions, list(client.events(job.id)), console), soft_wrap=True)


def logs(where: Where, name: str, *, follow: bool, as_json: bool) -> int:
    """What happened to a job, a line each; the exit code is 1 where a job that was followed failed."""
    console = Console(emoji=False)
    with Client(where.url, where.key) as client:
        job = client.job(name)
        lines = JobLines(console, [job])
        try:
            for event in client.events(job.id, follow=follow):
                if as_json:
                    print(event.model_dump_json(), flush=True)
                else:
                    lines.see(job, event)
        except KeyboardInterrupt:
            return INTERRUPTED
        return 1 if follow and client.job(job.id).state == JobState.FAILED else 0


def pull(where: Where, name: str, version: str | None, directory: Path) -> None:
    """Take an adapter home."""
    with Client(where.url, where.key) as client:
        print(client.pull(name, version, directory))


def change(where: Where, name: str, **fields: int | str | None) -> None:
    """Give a job another budget or priority."""
    with Client(where.url, where.key) as client:
        client.change(name, **fields)


def steer(where: Where, name: str, word: str) -> None:
    """Pause, resume or cancel a job of the service.

    Raises:
        ConfigError: this is not the name of a job.
    """
    if "/" in name or (Path(name) / "run.json").is_file():
        raise ConfigError(f"{name} is a run directory; name a job of it too: motet {word} {name} JOB")
    with Client(where.url, where.key) as client:
        getattr(client, word)(name)
    print(f"asked {name} to {word}")


def delete(where: Where, name: str) -> None:
    """Forget a job that has ended."""
    with Client(where.url, where.key) as client:
        client.delete(name)
    print(f"{name} is forgotten, with its files")


def create_key(
    where: Where, tenant: str, name: str, role: Literal["admin", "member"], days: float | None, *, as_json: bool
) -> None:
    """Make a key and show it."""
    with Client(where.url, where.key) as client:
        found = client.create_key(tenant, name, role, days)
    if as_json:
        show_json(found)
        return
    print(found.key)
    Console(emoji=False, stderr=True).print(
        f"{found.id}, {role} of {found.tenant}; it is shown this once", highlight=False
    )


def list_keys(where: Where, *, as_json: bool) -> None:
    """A table of keys."""
    with Client(where.url, where.key) as client:
        found = client.keys()
    if as_json:
        show_json(found)
    else:
        Console(emoji=False).print(key_table(found, time.time()) if found else "no keys")


def revoke_key(where: Where, key: str) -> None:
    """End a key."""
    with Client(where.url, where.key) as client:
        client.revoke_key(key)
    print(f"{key} is refused from now on")


def show_json(found: BaseModel | Mapping[str, Any] | Iterable[BaseModel]) -> None:
    """JSON for other programs."""
    if isinstance(found, BaseModel):
        found = found.model_dump(mode="json")
    elif not isinstance(found, Mapping):
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=2))
        return
    print(json.dumps(found, indent=2))
