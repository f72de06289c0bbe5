"""Everything that a service can be asked in one request, and how the answers are read. Nothing is sent from here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from motet.errors import ConfigError, DataError, ServiceError
from motet.service.schemas import (
    ApiKey,
    CheckedJobs,
    Error,
    Events,
    File,
    Files,
    Health,
    Job,
    JobEvent,
    Jobs,
    Keys,
    Model,
    Models,
    NewKey,
    Rollouts,
    Steps,
    Version,
    Versions,
)
from motet.service.schemas.scoring import Reward, Rewards

if TYPE_CHECKING:
    from motet.config import JobConfig

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

PAGE = 200
"""Jobs that are asked for at a time."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[bytes], T]
    params: Mapping[str, str | int | float | list[str] | None] = field(default_factory=dict)
    """None is left out."""
    body: Any = None
    """Sent as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    upload: Path | None = None
    packed: Callable[[], tuple[str, bytes]] | None = None
    """A file that is made to be uploaded: its name and its bytes."""
    also: int = 200
    """A status besides the successful ones whose answer is read."""

    @contextlib.contextmanager
    def request(self) -> Iterator[dict[str, Any]]:
        """Arguments of the transport's `request`, with the file open that is uploaded."""
        found: dict[str, Any] = {"method": self.method, "url": self.path, "headers": self.headers}
        found["params"] = {name: value for name, value in self.params.items() if value is not None}
        if self.body is not None:
            found["json"] = self.body
        if self.packed is not None:
            found["files"] = {"file": self.packed()}
        if self.upload is None:
            yield found
            return
        try:
            file = self.upload.open("rb")
        except OSError as error:
            raise DataError(f"{self.upload} cannot be read: {error.strerror}") from error
        with file:
            yield {**found, "files": {"file": (self.upload.name, file)}}

    def answer(self, response: httpx2.Response) -> T:
        """What the answer says.

        Raises:
            ServiceError: the service refuses, and why.
        """
        if not response.is_success and response.status_code != self.also:
            raise refusal(response)
        try:
            return self.read(response.content)
        except ValidationError as error:
            raise ServiceError(
                f"{response.url} does not answer as `motet serve` does; look at the address", response.status_code
            ) from error


def json_of(model: type[M]) -> Callable[[bytes], M]:
    """Reads an answer of this shape."""
    return model.model_validate_json


def nothing(content: bytes) -> None:
    """Reads an answer that has no body."""
    return


def seconds_of(at: datetime | str | float | None) -> float | None:
    """Unix seconds of a time; one that names no zone is of this machine's.

    Raises:
        ConfigError: it is not a time.
    """
    if at is None or isinstance(at, int | float):
        return at
    try:
        return (datetime.fromisoformat(at) if isinstance(at, str) else at).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(f"{at!r} is not a time; write it like 2026-12-01T08:00 or 2026-12-01T08:00+00:00") from error


def path_of(name: str) -> str:
    """Where a job is found."""
    return f"/v1/jobs/{quote(name, safe='')}"


class Calls:
    """Everything that a service can be asked in one request."""

    @staticmethod
    def submit(
        job: JobConfig | Mapping[str, Any],
        idempotency_key: str | None = None,
        after: Sequence[str] = (),
        at: datetime | str | float | None = None,
    ) -> Call[Job]:
        """Submit a job, as it stands in a job file.

        Args:
            job: what to train.
            idempotency_key: the same one gives the same job again.
            after: jobs, by name or id, that have to succeed before this one starts; it may start from their versions.
            at: when it may start: a time (2026-12-01T08:00 means the time here), or Unix seconds.

        Raises:
            ConfigError: `at` is not a time.
        """
        tree = dict(job) if isinstance(job, Mapping) else job.model_dump(mode="json", exclude_unset=True)
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return Call(
            "POST", "/v1/jobs", json_of(Job), {"after": list(after) or None, "at": seconds_of(at)}, tree, headers
        )

    @staticmethod
    def job(job: str) -> Call[Job]:
        """A job by its id or name."""
        return Call("GET", path_of(job), json_of(Job))

    @staticmethod
    def pause(job: str) -> Call[Job]:
        """Let a job finish its step, save, and give its slot away."""
        return Call("POST", f"{path_of(job)}/pause", json_of(Job))

    @staticmethod
    def resume(job: str) -> Call[Job]:
        """Let a paused or failed job go on."""
        return Call("POST", f"{path_of(job)}/resume", json_of(Job))

    @staticmethod
    def cancel(job: str) -> Call[Job]:
        """End a job; what it saved stays."""
        return Call("POST", f"{path_of(job)}/cancel", json_of(Job))

    @staticmethod
    def delete(job: str) -> Call[None]:
        """Forget a job that has ended, with its versions, rollouts and events."""
        return Call("DELETE", path_of(job), nothing)

    @staticmethod
    def rollouts(
        job: str,
        step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 100,
        purpose: Literal["train", "eval"] = "train",
        problem: int | None = None,
        tokens: bool = False,
    ) -> Call[Rollouts]:
        """What a step sampled, with rewards; the newest step unless one is given.

        Args:
            job: its id or name.
            step: which step; with `purpose="eval"` the version that was evaluated.
            min_reward: only rollouts with at least this reward.
            max_reward: only those with at most this one.
            limit: how many, in data order.
            purpose: what training sampled, or an evaluation.
            problem: only those of this problem.
            tokens: with the text and the logprob of each token.
        """
        params: dict[str, str | int | float | None]
        params = {"step": step, "min_reward": min_reward, "max_reward": max_reward, "limit": limit, "purpose": purpose}
        params |= {"problem": problem, "tokens": tokens or None}
        return Call("GET", f"{path_of(job)}/rollouts", json_of(Rollouts), params)

    @staticmethod
    def steps(job: str, fields: Sequence[str] = (), points: int = 5000) -> Call[list[dict[str, Any]]]:
        """Lines of a job's metrics.jsonl, or some fields of them; where there are more than `points`, thinned evenly."""
        return Call(
            "GET",
            f"{path_of(job)}/steps",
            lambda content: json_of(Steps)(content).data,
            {"field": list(fields), "points": points},
        )

    @staticmethod
    def check(text: str) -> Call[list[dict[str, Any]]]:
        """The jobs that a job file, given as text, holds; each could be submitted, and nothing is."""
        return Call("POST", "/v1/check", lambda content: json_of(CheckedJobs)(content).jobs, body={"text": text})

    @staticmethod
    def versions(job: str) -> Call[list[Version]]:
        """The saved versions of a job's adapter, oldest first."""
        return Call("GET", f"{path_of(job)}/versions", lambda content: json_of(Versions)(content).data)

    @staticmethod
    def upload(path: str | Path) -> Call[str]:
        """Upload rows (.jsonl or .parquet); the id that comes back is a job's `data.source`."""
        return Call("POST", "/v1/files", lambda content: json_of(File)(content).id, upload=Path(path))

    @staticmethod
    def files() -> Call[list[File]]:
        """Uploaded files, newest first."""
        return Call("GET", "/v1/files", lambda content: json_of(Files)(content).data)

    @staticmethod
    def delete_file(file: str) -> Call[None]:
        """Remove an uploaded file; jobs that name it cannot be taken up again."""
        return Call("DELETE", f"/v1/files/{quote(file, safe='')}", nothing)

    @staticmethod
    def models() -> Call[list[Model]]:
        """What completions can be asked of: the base, and `job@version`."""
        return Call("GET", "/v1/models", lambda content: json_of(Models)(content).data)

    @staticmethod
    def rewards() -> Call[list[Reward]]:
        """Rewards that jobs may use: built in, installed by whoever runs the service, and scored elsewhere."""
        return Call("GET", "/v1/rewards", lambda content: json_of(Rewards)(content).data)

    @staticmethod
    def create_key(
        tenant: str,
        name: str = "",
        role: Literal["admin", "member"] = "member",
        expires_days: float | None = None,
    ) -> Call[NewKey]:
        """Make a key, and its tenant where there is none of the name; needs an admin's key."""
        body = {"tenant": tenant, "name": name, "role": role, "expires_days": expires_days}
        return Call("POST", "/v1/keys", json_of(NewKey), body=body)

    @staticmethod
    def keys() -> Call[list[ApiKey]]:
        """All keys, oldest first, without their texts; needs an admin's key."""
        return Call("GET", "/v1/keys", lambda content: json_of(Keys)(content).data)

    @staticmethod
    def revoke_key(key: str) -> Call[None]:
        """End a key by its id; needs an admin's key."""
        return Call("DELETE", f"/v1/keys/{quote(key, safe='')}", nothing)

    @staticmethod
    def health() -> Call[Health]:
        """Whether jobs can run, and over which base."""
        return Call("GET", "/readyz", json_of(Health), also=503)


def page(state: str | None, after: str | None) -> Call[Jobs]:
    """A page of jobs."""
    return Call("GET", "/v1/jobs", json_of(Jobs), {"state": state, "after": after, "limit": PAGE})


def events(job: str, after: int) -> Call[list[JobEvent]]:
    """A page of what happened to a job; an empty one is the last."""
    return Call("GET", f"{path_of(job)}/events", lambda content: json_of(Events)(content).data, {"after": after})


def refusal(response: httpx2.Response) -> ServiceError:
    """Why the service said no, in its own words."""
    try:
        message = Error.model_validate_json(response.content).error.message
    except ValidationError:
        message = f"{response.url} answered {response.status_code}: {response.text[:200]}".rstrip(": ")
    if response.status_code == 401 and "authorization" not in response.request.headers:
        message = "this service needs an API key: set MOTET_API_KEY, or give --key (from Python: key=…)"
    return ServiceError(message, response.status_code)
