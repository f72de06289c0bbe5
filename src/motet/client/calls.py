"""Everything that a service can be asked in one request, and how the answers are read. Nothing is sent from here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from motet.client.archive import unpack
from motet.errors import DataError, ServiceError
from motet.service.schemas import (
    ApiKey,
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
    Version,
    Versions,
)

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
    params: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """None is left out."""
    body: Any = None
    """Sent as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    upload: Path | None = None
    also: int = 200
    """A status besides the successful ones whose answer is read."""

    @contextlib.contextmanager
    def request(self) -> Iterator[dict[str, Any]]:
        """Arguments of the transport's `request`, with the file open that is uploaded."""
        found: dict[str, Any] = {"method": self.method, "url": self.path, "headers": self.headers}
        found["params"] = {name: value for name, value in self.params.items() if value is not None}
        if self.body is not None:
            found["json"] = self.body
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


def _json(model: type[M]) -> Callable[[bytes], M]:
    return model.model_validate_json


def _nothing(content: bytes) -> None:
    return None


def path_of(name: str) -> str:
    """Where a job is found."""
    return f"/v1/jobs/{quote(name, safe='')}"


class Rollouts(BaseModel):
    """What a step of a job sampled."""

    step: int
    steps: list[int]
    """Steps whose rollouts are kept."""
    data: list[dict[str, Any]]
    """As in the run directory's rollouts/<step>.jsonl."""


class Calls:
    """Everything that a service can be asked in one request."""

    @staticmethod
    def submit(job: JobConfig | Mapping[str, Any], idempotency_key: str | None = None) -> Call[Job]:
        """Submit a job, as it stands in a job file. The same idempotency key gives the same job again."""
        tree = dict(job) if isinstance(job, Mapping) else job.model_dump(mode="json", exclude_unset=True)
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return Call("POST", "/v1/jobs", _json(Job), body=tree, headers=headers)

    @staticmethod
    def job(job: str) -> Call[Job]:
        """A job by its id or name."""
        return Call("GET", path_of(job), _json(Job))

    @staticmethod
    def pause(job: str) -> Call[Job]:
        """Let a job finish its step, save, and give its slot away."""
        return Call("POST", f"{path_of(job)}/pause", _json(Job))

    @staticmethod
    def resume(job: str) -> Call[Job]:
        """Let a paused or failed job go on."""
        return Call("POST", f"{path_of(job)}/resume", _json(Job))

    @staticmethod
    def cancel(job: str) -> Call[Job]:
        """End a job; what it saved stays."""
        return Call("POST", f"{path_of(job)}/cancel", _json(Job))

    @staticmethod
    def delete(job: str) -> Call[None]:
        """Forget a job that has ended, with its versions, rollouts and events."""
        return Call("DELETE", path_of(job), _nothing)

    @staticmethod
    def rollouts(
        job: str,
        step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 100,
    ) -> Call[Rollouts]:
        """What a step sampled, with rewards; the newest step unless one is given."""
        params = {"step": step, "min_reward": min_reward, "max_reward": max_reward, "limit": limit}
        return Call("GET", f"{path_of(job)}/rollouts", _json(Rollouts), params)

    @staticmethod
    def versions(job: str) -> Call[list[Version]]:
        """The saved versions of a job's adapter, oldest first."""
        return Call("GET", f"{path_of(job)}/versions", lambda content: _json(Versions)(content).data)

    @staticmethod
    def upload(path: str | Path) -> Call[str]:
        """Upload rows (.jsonl or .parquet); the id that comes back is a job's `data.source`."""
        return Call("POST", "/v1/files", lambda content: _json(File)(content).id, upload=Path(path))

    @staticmethod
    def files() -> Call[list[File]]:
        """Uploaded files, newest first."""
        return Call("GET", "/v1/files", lambda content: _json(Files)(content).data)

    @staticmethod
    def delete_file(file: str) -> Call[None]:
        """Remove an uploaded file; jobs that name it cannot be taken up again."""
        return Call("DELETE", f"/v1/files/{quote(file, safe='')}", _nothing)

    @staticmethod
    def models() -> Call[list[Model]]:
        """What completions can be asked of: the base, and `job@version`."""
        return Call("GET", "/v1/models", lambda content: _json(Models)(content).data)

    @staticmethod
    def create_key(
        tenant: str,
        name: str = "",
        role: Literal["admin", "member"] = "member",
        expires_days: float | None = None,
    ) -> Call[NewKey]:
        """Make a key, and its tenant where there is none of the name; needs an admin's key."""
        body = {"tenant": tenant, "name": name, "role": role, "expires_days": expires_days}
        return Call("POST", "/v1/keys", _json(NewKey), body=body)

    @staticmethod
    def keys() -> Call[list[ApiKey]]:
        """All keys, oldest first, without their texts; needs an admin's key."""
        return Call("GET", "/v1/keys", lambda content: _json(Keys)(content).data)

    @staticmethod
    def revoke_key(key: str) -> Call[None]:
        """End a key by its id; needs an admin's key."""
        return Call("DELETE", f"/v1/keys/{quote(key, safe='')}", _nothing)

    @staticmethod
    def health() -> Call[Health]:
        """Whether jobs can run, and over which base."""
        return Call("GET", "/readyz", _json(Health), also=503)


def page(state: str | None, after: str | None) -> Call[Jobs]:
    """A page of jobs."""
    return Call("GET", "/v1/jobs", _json(Jobs), {"state": state, "after": after, "limit": PAGE})


def events(job: str, after: int) -> Call[list[JobEvent]]:
    """A page of what happened to a job; an empty one is the last."""
    return Call("GET", f"{path_of(job)}/events", lambda content: _json(Events)(content).data, {"after": after})


def download(job: str, version: str | int, directory: str | Path) -> Call[Path]:
    """A version of a job's adapter, unpacked."""
    path = f"{path_of(job)}/versions/{quote(str(version), safe='')}/download"
    return Call("GET", path, lambda content: unpack(content, Path(directory)))


def refusal(response: httpx2.Response) -> ServiceError:
    """Why the service said no, in its own words."""
    try:
        message = Error.model_validate_json(response.content).error.message
    except ValidationError:
        message = f"{response.url} answered {response.status_code}: {response.text[:200]}".rstrip(": ")
    if response.status_code == 401 and "authorization" not in response.request.headers:
        message = "this service needs an API key: set MOTET_API_KEY, or give --key (from Python: key=…)"
    return ServiceError(message, response.status_code)
