"""Jobs of a service on the command line: submits them with their files, follows them, and shows one in full."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from motet.chat.clock import DATE
from motet.client import AsyncClient, Client
from motet.client.connection import path_of
from motet.client.sent_rewards import with_code
from motet.commands.answers import INTERRUPTED, command_for, minute, say
from motet.config import JobConfig, RunConfig
from motet.config.chain import chains
from motet.core.errors import ConfigError, MotetError, ServiceError
from motet.core.types import ADAPTER_CONFIG, JobState
from motet.data.row_files import READERS
from motet.data.shared import Sources
from motet.hosts.checks import Refusals, check_data
from motet.observe import LogView, glyphs_of
from motet.observe.text import (
    STATE_STYLES,
    Glyphs,
    count_text,
    duration_text,
    held_out_text,
    plain_console,
    reward_text,
)
from motet.runtime.evaluations import HARDLY, NOTHING
from motet.runtime.held_out import figure_of, rule_text
from motet.runtime.progress import JobProgress
from motet.service.schemas import Health, Job, JobEvent, Version

_OF_A_RUN = ("engine", "rollout", "cluster", "observers")
"""Sections of a job file that a service does not read."""
LocalWork = Callable[[AsyncClient, Sequence[str], Console], Coroutine[Any, Any, None]]
"""Work of this machine for jobs while they are followed, until all have ended; its lines go to the console."""


def base_meant(config: RunConfig, service: Health, file: Path) -> str | None:
    """The service's base that a file names; None if the service has only one.

    Prints which fields of the file are ignored.

    Raises:
        ConfigError: the service does not have that base.
    """
    served = service.base or ""
    places = service.bases or {served: served}
    names = [name for name, place in places.items() if name == config.base or _same(config.base, place)]
    if not names:
        several = ", ".join(map(repr, places))
        raise ConfigError(
            f"the file's base is {config.base!r}, but this service trains {several}; change the file, give "
            f"--set base={served}, or speak to another service"
        )
    if ignored := [f"`{name}`" for name in _OF_A_RUN if getattr(config, name) != RunConfig.model_fields[name].default]:
        say(f"note: {', '.join(ignored)} of {file}: ignored, because the service has its own", aside=True)
    return names[0] if service.bases else None


def _same(base: str, place: str) -> bool:
    return base == place or (Path(base).exists() and Path(base).resolve() == Path(place).resolve())


def with_uploads(client: Client, job: JobConfig, files: dict[str, str], base: str | None) -> JobConfig:
    """The job with ids instead of files and of a PEFT directory; each is uploaded once."""
    uploaded = {}
    for name in ("source", "eval_source"):
        source = getattr(job.data, name)
        if isinstance(source, str) and Path(source).suffix.lower() in READERS:
            if source not in files:
                files[source] = client.upload(source)
            uploaded[name] = files[source]
    start = job.adapter.init
    if start is not None and (Path(start) / ADAPTER_CONFIG).is_file():
        if start not in files:
            files[start] = client.push(start, base=base).id
        start = files[start]
    adapter = job.adapter.model_copy(update={"init": start})
    return job.model_copy(update={"data": job.data.model_copy(update=uploaded), "adapter": adapter})


def submit(
    client: Client,
    jobs: Sequence[JobConfig],
    *,
    after: Sequence[str] = (),
    at: str | None = None,
    base: str | None = None,
    quiet: bool = False,
    known: Mapping[str, Job] = {},
) -> list[Job]:
    """Submit the jobs of a file together; jobs may start from each other's adapters, and `known` ones stay as they are.

    Raises:
        MotetError: one of them was refused; then none is submitted, and their uploads are deleted.
    """
    new = [with_code(job) for job in jobs if job.name not in known]
    check_uploads(new)
    files: dict[str, str] = {}
    awaited: dict[str, list[str]] = {}
    to_submit, starts = [], chains(jobs)
    try:
        for job in new:
            own, awaited[job.name] = with_uploads(client, job, files, base), list(after)
            if (start := starts.get(job.name)) is not None and start.job in known:
                made_by = known[start.job].id
                own = own.model_copy(
                    update={"adapter": own.adapter.model_copy(update={"init": f"{made_by}@{start.version}"})}
                )
                awaited[job.name].append(made_by)
            to_submit.append(own)
        submitted = client.submit_all(to_submit, after=awaited, at=at, base=base) if to_submit else []
    except MotetError as error:
        refused = not isinstance(error, ServiceError) or 400 <= error.status < 500
        for uploaded in files.values() if refused else ():  # without an answer, jobs with them may have been accepted
            with contextlib.suppress(MotetError):
                (client.delete_file if uploaded.startswith("file-") else client.delete_adapter)(uploaded)
        raise
    by_name = {**known, **{taken.name: taken for taken in submitted}}
    if not quiet:
        for taken in submitted:
            say(f"{taken.name}  {taken.id}")
    return [by_name[job.name] for job in jobs]


def check_uploads(jobs: Sequence[JobConfig]) -> None:
    """Read the files of jobs as the service will, before they are uploaded.

    Raises:
        ConfigError: a file is wrong; the message has a line for each job.
    """
    sources, refusals = Sources(), Refusals()
    for job in jobs:
        if Path(job.data.source).suffix.lower() in READERS:
            with refusals.of(job.name):
                check_data(job, sources)
    refusals.check()


def scoring(rewards: Sequence[str], processes: int = 2) -> LocalWork:
    """Scores jobs until all have ended."""

    async def work(client: AsyncClient, jobs: Sequence[str], _: Console) -> None:
        await client.score(*jobs, reward=rewards, processes=processes)

    return work


def follow(
    url: str | None,
    key: str | None,
    jobs: Sequence[Job],
    work: LocalWork | None = None,
    again: str = "",
    *,
    aside: bool = False,
) -> int:
    """Show jobs until all have ended, and do their work on this machine meanwhile.

    `again` is the command that continues the work. Returns the exit code; with `aside`, lines go to standard error.
    """
    lines = JobLines(jobs, history=work is None, aside=aside)

    async def watch(client: AsyncClient, job: Job) -> None:
        await client._patiently(Job, "GET", path_of("jobs", job.id))  # from now on it may go away
        async for event in client.events(job.id, follow=True):
            lines.see(job, event)

    async def watch_all() -> list[Job]:
        async with AsyncClient(url, key) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for job in jobs:
                        group.create_task(watch(client, job))
                    if work is not None:
                        group.create_task(work(client, [job.id for job in jobs], lines.console))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors  # it has a message for people
            return [await client._patiently(Job, "GET", path_of("jobs", job.id)) for job in jobs]

    try:
        ended = asyncio.run(watch_all())
    except KeyboardInterrupt:
        logs = command_for(url, "logs", jobs[0].name, "-f")
        goes_on = f"; `{logs}` follows again" if work is None else f" with: `{again}`"
        say(f"the service continues{goes_on}", aside=aside)
        return INTERRUPTED
    return 1 if any(job.state == JobState.FAILED for job in ended) else 0


def _take_in(progress: JobProgress, event: JobEvent) -> None:
    """Update a job's progress with an event."""
    data = event.data
    if event.kind == "state":
        progress.state, progress.message = JobState(data["state"]), str(data.get("message") or "")
        return
    if "loss" in data:  # the last line has an evaluation only
        progress.step = int(data["step"]) + 1
        progress.figure, value = figure_of(data)
        progress.rewards.append(value)
    if evaluation := data.get("eval"):
        progress.evaluations.append((int(data["version"]), figure_of(evaluation)[1]))


class JobLines:
    """The log lines of `motet run`, made from events; without `history`, only those of later steps."""

    def __init__(self, jobs: Sequence[Job], *, history: bool, aside: bool = False) -> None:
        self.console = plain_console(stderr=aside)
        self._view = LogView(self.console)
        self._progress = {job.id: JobProgress(job.name, job.steps) for job in jobs}
        self._done = {job.id: 0 if history else job.step for job in jobs}

    def see(self, job: Job, event: JobEvent) -> None:
        """Write what is new."""
        _take_in(self._progress[job.id], event)
        self._view.update([one for key, one in self._progress.items() if one.step >= self._done[key]])


def owner_of(job: Job) -> str:
    """The tenant, where an admin sees jobs of several; a service without keys has only `local`."""
    return "" if job.tenant in (None, "local") else str(job.tenant)


def job_cells(job: Job, *, based: bool, named: bool, owned: bool) -> list[str | Text]:
    """A job's row: name, state, steps, reward, the best version's figure, age, its base, its submitter, and its tenant."""
    plain = glyphs_of(plain_console()).plain
    return [
        Text(plain(job.name), style="bold"),
        Text(plain(_state(job)), style=STATE_STYLES[JobState(job.state)]),
        f"{job.step}/{job.steps}",
        "" if job.reward is None else reward_text(job.reward),
        _best(job),
        duration_text(time.time() - job.created),
        *([job.base or ""] if based else []),
        *([plain(job.submitter or "–")] if named else []),
        *([owner_of(job)] if owned else []),
    ]


def details(job: Job, versions: Sequence[Version], events: Sequence[JobEvent]) -> Text:
    """Everything about one job, one line for each fact."""
    glyphs, progress = glyphs_of(plain_console()), JobProgress(job.name, job.steps)
    for event in events:
        _take_in(progress, event)
    rewards = progress.rewards[:1] + progress.rewards[1:][-1:]
    state = f"{job.state}: {job.message}" if job.message else job.state
    spent = duration_text((job.ended or time.time()) - job.created)
    lines = {
        "id": job.id,
        "state": state,
        "steps": f"{job.step}/{job.steps}",
        "base": job.base or "",
        "tenant": owner_of(job),
        "by": "" if job.tenant == "local" else job.submitter or "–",
        "now": _now(job),
        "reward": glyphs.to.join(map(reward_text, rewards)),
        "held-out": _held_out(job, progress, glyphs),
        "data": str(job.spec["data"]["source"]),
        "date": next((told[1] for one in events if (told := DATE.search(str(one.data.get("message"))))), ""),
        "rewards": ", ".join(str(reward["name"]) for reward in job.spec["rewards"]),
        "budget": f"{job.spec['budget']:,} tokens" if job.spec.get("budget") else "",
        "submitted": f"{minute(job.created)}, {'took' if job.ended else 'since'} {spent}",
        "versions": ", ".join(_version(version) for version in versions),
    }
    shown = Text(glyphs.plain(job.name), style="bold")
    for name, value in lines.items():
        if value:
            style = STATE_STYLES[JobState(job.state)] if name == "state" else ""
            shown.append(f"\n{name:<10}", style="not bold bright_black")
            shown.append(glyphs.plain(value), style=f"not bold {style}" if style != "bold red" else style)
    return shown


def _best(job: Job) -> str:
    """`accuracy 0.86 (v15)`, of the best version; of the newest before there is one."""
    if (held := job.held_out) is None:
        return ""
    version, value = (held.version, held.value) if held.best is None else (held.best_version, held.best)
    return f"{held.figure} {reward_text(value)} (v{version})".strip()


def _state(job: Job) -> str:
    """The state, the worker that the job waits for, and whether a job that has ended learned, in the words of its sign."""
    if job.state == JobState.SUCCEEDED:
        return next(
            (f"{job.state}, {sign}" for sign in (NOTHING, HARDLY) if f"hint: {sign}: " in job.message), job.state
        )
    phase = str((job.progress or {}).get("phase") or "")
    return f"{job.state}, {phase}" if phase.startswith("waits for") and job.state == JobState.RUNNING else job.state


def _now(job: Job) -> str:
    if job.progress is None or job.state != JobState.RUNNING:
        return ""
    phase, rate = str(job.progress.get("phase") or "starting"), float(job.progress.get("tokens_per_second") or 0)
    left = duration_text(job.progress.get("seconds_left"))
    return ", ".join(filter(None, [phase, f"{count_text(rate)} tok/s" if rate else "", f"{left} left" if left else ""]))


def _held_out(job: Job, progress: JobProgress, glyphs: Glyphs) -> str:
    """The held-out figures with their name, the best version and what chose it."""
    if (held := job.held_out) is None:
        return ""
    taken = None if held.best_version is None or held.best is None else (held.best_version, held.best)
    text = held_out_text(progress.evaluations or [(held.version, held.value)], taken, glyphs)
    best = f", best version v{taken[0]}" if taken and f"(v{taken[0]})" not in text else ""
    return ", ".join(filter(None, [f"{held.figure} {text}{best}".strip(), rule_text(held.best_by, held.figure)]))


def _version(version: Version) -> str:
    holds = {"best": version.best, "latest": version.latest, "untrained": version.untrained}
    marks = [mark for mark in holds if holds[mark]]
    return version.model + (f" ({', '.join(marks)})" if marks else "")
