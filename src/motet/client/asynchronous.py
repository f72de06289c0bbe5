"""The asynchronous client."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from motet.client.adapters import AdapterMethods
from motet.client.connection import Connection, Following, path_of
from motet.client.sent_rewards import with_code
from motet.client.sign_in import SignInMethods
from motet.client.tenants import TenantMethods
from motet.core.errors import ConfigError, DataError, ServiceError
from motet.core.types import JobState, Thought
from motet.data.row_files import rows_of
from motet.service.schemas import (
    CheckedJobs,
    Events,
    File,
    Files,
    Health,
    Job,
    JobEvent,
    Jobs,
    Rollouts,
    Steps,
    SubmittedJobs,
    Version,
    Versions,
)
from motet.service.schemas.workers import Reward, Rewards

if TYPE_CHECKING:
    from motet.client.reward_files import RewardGiven
    from motet.config import JobConfig

_ROLLOUTS = 1000
"""Of one request, the most that a service takes."""


class StepMethods(Connection):
    """Methods of both clients for steps of jobs."""

    async def rollouts(
        self,
        job: str,
        step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 100,
        purpose: Literal["train", "eval"] = "train",
        problem: int | None = None,
        tokens: bool = False,
    ) -> Rollouts:
        """Rollouts of a step with rewards; by default of the newest step.

        Args:
            job: its id or name.
            step: the step; with `purpose="eval"` the evaluated version.
            min_reward: only rollouts with at least this reward.
            max_reward: only rollouts with at most this reward.
            limit: most rollouts, in data order; read in pages.
            purpose: rollouts of training or of an evaluation.
            problem: only rollouts of this problem.
            tokens: include the text and logprob of each token.
        """
        params: dict[str, Any] = {
            "step": step, "min_reward": min_reward, "max_reward": max_reward, "purpose": purpose, "problem": problem,
            "tokens": tokens or None,
        }  # fmt: skip
        path = f"{path_of('jobs', job)}/rollouts"
        found: Rollouts = await self._ask(Rollouts, "GET", path, params={**params, "limit": min(limit, _ROLLOUTS)})
        while found.next is not None and (missing := limit - len(found.data)) > 0:
            params |= {"step": found.step, "after": found.next, "limit": min(missing, _ROLLOUTS)}
            page = await self._ask(Rollouts, "GET", path, params=params)
            found = page.model_copy(update={"data": found.data + page.data})
        return found

    async def steps(self, job: str, fields: Sequence[str] = (), points: int = 5000) -> list[dict[str, Any]]:
        """Lines of a job's metrics.jsonl, or some of their fields; if there are more than `points`, thinned evenly."""
        params = {"field": list(fields), "points": points}
        return (await self._ask(Steps, "GET", f"{path_of('jobs', job)}/steps", params=params)).data


class AsyncClient(AdapterMethods, SignInMethods, StepMethods, TenantMethods):
    """A client for concurrent requests, with the methods of `Client`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def submit(
        self,
        job: JobConfig | Mapping[str, Any],
        idempotency_key: str | None = None,
        after: Sequence[str] = (),
        at: datetime | str | float | None = None,
        base: str | None = None,
    ) -> Job:
        """Submit a job, given as in a job file.

        Args:
            job: the configuration.
            idempotency_key: a repeated key returns the same job.
            after: names or ids of jobs that must succeed before this one starts; it may start from their versions.
            at: earliest start: a local time (2026-12-01T08:00), or Unix seconds.
            base: which base of a service with several; default: the first.

        Raises:
            ConfigError: `at` is not a time.
        """
        tree = _tree(job) | ({} if base is None else {"base": base})
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        params = {"after": list(after) or None, "at": _unix_seconds(at)}
        return await self._ask(Job, "POST", "/v1/jobs", params=params, json=tree, headers=headers)

    async def submit_all(
        self,
        jobs: Sequence[JobConfig | Mapping[str, Any]],
        idempotency_key: str | None = None,
        after: Sequence[str] | Mapping[str, Sequence[str]] = (),
        at: datetime | str | float | None = None,
        base: str | None = None,
    ) -> list[Job]:
        """Submit several jobs together, all or none. A job may start from an earlier one (`adapter.init`).

        The arguments are those of `submit`; `after` may also map each job's name to the jobs that it waits for.
        """
        trees = [_tree(job) | ({} if base is None else {"base": base}) for job in jobs]
        awaited = [after.get(str(tree.get("name")), ()) if isinstance(after, Mapping) else after for tree in trees]
        asked = [{"job": tree, "after": list(names)} for tree, names in zip(trees, awaited, strict=True)]
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        body = {"jobs": asked, "at": _unix_seconds(at)}
        return (await self._ask(SubmittedJobs, "POST", "/v1/submissions", json=body, headers=headers)).data

    async def job(self, job: str) -> Job:
        """A job by its id or name."""
        return await self._ask(Job, "GET", path_of("jobs", job))

    async def jobs(self, state: str | None = None) -> AsyncGenerator[Job, None]:
        """Yield jobs, newest first, optionally those in one state."""
        async for job in self._all_pages(Jobs, "/v1/jobs", state=state):
            yield job

    async def pause(self, job: str) -> Job:
        """Let a job finish its step, save, and give its slot away."""
        return await self._ask(Job, "POST", f"{path_of('jobs', job)}/pause")

    async def resume(self, job: str) -> Job:
        """Resume a paused or failed job."""
        return await self._ask(Job, "POST", f"{path_of('jobs', job)}/resume")

    async def cancel(self, job: str) -> Job:
        """End a job; its commits stay."""
        return await self._ask(Job, "POST", f"{path_of('jobs', job)}/cancel")

    async def change(self, /, job: str, **fields: int | str | None) -> Job:
        """Set `budget` (None means none) or `priority` (a number, `low`, `normal`, `high`) of a job before its end."""
        return await self._ask(Job, "PATCH", path_of("jobs", job), json=fields)

    async def delete(self, job: str) -> None:
        """Delete a job that has ended, with its versions, rollouts and events."""
        await self._send("DELETE", path_of("jobs", job))

    async def versions(self, job: str) -> list[Version]:
        """The saved versions of a job's adapter, oldest first."""
        return [one async for one in self._all_pages(Versions, f"{path_of('jobs', job)}/versions")]

    async def check(self, text: str) -> list[dict[str, Any]]:
        """Check the text of a job file; returns its jobs, and submits none."""
        return (await self._ask(CheckedJobs, "POST", "/v1/check", json={"text": text})).jobs

    async def upload(self, path: str | Path) -> str:
        """Upload rows (.jsonl, .parquet, .csv or .json); returns the id for a job's `data.source`."""
        name, rows = await asyncio.to_thread(_to_send, Path(path))
        with rows:
            return (await self._ask(File, "POST", "/v1/files", files={"file": (name, rows)})).id

    async def files(self) -> list[File]:
        """Uploaded files, newest first."""
        return (await self._ask(Files, "GET", "/v1/files")).data

    async def delete_file(self, file: str) -> None:
        """Delete an uploaded file; jobs that name it cannot resume."""
        await self._send("DELETE", path_of("files", file))

    async def rewards(self) -> list[Reward]:
        """Rewards that jobs may use: built in, installed by the operator, and scored elsewhere."""
        return (await self._ask(Rewards, "GET", "/v1/rewards")).data

    async def health(self) -> Health:
        """Whether jobs can run, and on which bases."""
        return await self._ask(Health, "GET", "/readyz", also=503)

    async def chat(
        self,
        /,
        model: str,
        messages: Sequence[Mapping[str, str]],
        *,
        thoughts: bool = False,
        **sampling: float | str | list[str],
    ) -> AsyncGenerator[str, None]:
        """Yield pieces of an answer to a conversation as they arrive.

        Args:
            model: `job@version`, an adapter's name, or the base's.
            messages: turns with `role` and `content`, and `reasoning_content` for a thought.
            thoughts: yield pieces of thoughts too, as `motet.core.types.Thought`, a kind of text.
            sampling: fields of the route for chat completions: temperature, max_tokens, top_p, seed, stop.
        """
        body = {**sampling, "model": model, "messages": [dict(message) for message in messages], "stream": True}
        whole = False
        async with aclosing(self._lines("POST", "/v1/chat/completions", json=body)) as lines:
            async for line in lines:
                whole = whole or line.removeprefix("data:").strip() == "[DONE]"
                for piece in _pieces(line, thoughts=thoughts):
                    yield piece
        if not whole:  # a proxy may end what it has of a broken stream as if it were complete
            raise ServiceError("the answer broke off; try again")

    async def events(self, job: str, after: int = 0, *, follow: bool = False) -> AsyncGenerator[JobEvent, None]:
        """Yield events of a job in order.

        Args:
            job: its id or name.
            after: the id of the last known event.
            follow: continue with new events until the job has ended; reconnects if the connection is lost.
        """
        if follow:
            async with aclosing(self._follow(job, Following(job, after, self._heard))) as stream:
                async for event in stream:
                    yield event
            return
        path = f"{path_of('jobs', job)}/events"
        while page := (await self._ask(Events, "GET", path, params={"after": after})).data:
            for event in page:
                yield event
            after = page[-1].id

    async def _follow(self, job: str, following: Following) -> AsyncGenerator[JobEvent, None]:
        while True:
            lost: ServiceError | None = None
            try:
                async with aclosing(self._lines("GET", following.path, **following.request)) as lines:
                    async for line in lines:
                        if (event := following.read(line)) is not None:
                            yield event
                        elif line.startswith(":") and await self._has_ended(job):  # the stream has no more events
                            break
                if await self._has_ended(job):
                    async for event in self.events(job, following.after):
                        yield event
                    return
            except ServiceError as error:
                lost = error
            await asyncio.sleep(following.wait(lost))

    async def _has_ended(self, job: str) -> bool:
        return JobState((await self.job(job)).state).final

    async def score(self, *jobs: str, reward: RewardGiven | Sequence[RewardGiven], processes: int = 2) -> None:
        """Act as reward worker of jobs until they have ended: lease rollouts, score them here, and send the scores.

        Args:
            jobs: ids or names of jobs with `reward: worker`.
            reward: the function, or files with the functions that the jobs name: `rewards.py`, `rewards.py:reward`.
            processes: number of scoring processes.

        Raises:
            RewardError: the reward does not load, or a job names a missing one.
            ServiceError: the service refuses, or was unreachable for ten minutes.
        """
        from motet.client.reward_files import RewardFiles
        from motet.client.scoring import RewardWorker

        await RewardWorker(self, RewardFiles(reward), processes).run(jobs)

    async def run_agent(self, *jobs: str, agent: str, concurrency: int = 32) -> None:
        """Run the agent of jobs on this machine until they have ended.

        Args:
            jobs: ids or names of jobs with `environment: agent`.
            agent: the function: `agent.py:run`, or `my_package.agents:run`.
            concurrency: concurrent episodes per job.

        Raises:
            EnvironmentFault: the agent does not load, or a job needs none.
            ServiceError: the service refuses, or was unreachable for ten minutes.
        """
        from motet.client.agents import AgentWorker

        await AgentWorker(self, agent, concurrency).run(jobs)


def _tree(job: JobConfig | Mapping[str, Any]) -> dict[str, Any]:
    return dict(job) if isinstance(job, Mapping) else with_code(job).model_dump(mode="json", exclude_unset=True)


def _unix_seconds(at: datetime | str | float | None) -> float | None:
    """The Unix time of a date and time; without a zone, it is local."""
    if at is None or isinstance(at, int | float):
        return at
    try:
        return (datetime.fromisoformat(at) if isinstance(at, str) else at).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(f"{at!r} is not a time; write it like 2026-12-01T08:00 or 2026-12-01T08:00+00:00") from error


def _pieces(line: str, *, thoughts: bool) -> Iterator[str]:
    """What a line of a stream adds to the answer. Raises ServiceError if the answer ends with an error."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return
    message = json.loads(data)
    if "error" in message:
        raise ServiceError(str(message["error"].get("message", "the answer broke off; try again")))
    for choice in message["choices"]:
        delta = choice["delta"]
        if thoughts:
            yield Thought(delta.get("reasoning_content") or "")
        yield delta.get("content") or ""


def _to_send(path: Path) -> tuple[str, IO[bytes]]:
    """Name and content of a file of rows; .csv and .json are sent as JSON lines, which a service reads one at a time."""
    try:
        if path.suffix.lower() not in (".csv", ".json"):
            return path.name, path.open("rb")
        lines = "".join(f"{json.dumps(row)}\n" for row in rows_of(path))
        return f"{path.stem}.jsonl", io.BytesIO(lines.encode())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
