"""What the service answers, as documented in its OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from motet.config.service import TENANT_NAME
from motet.section import Described


class Answer(Described):
    """Base of all answers; made of fields, or of an object that has attributes of the same names."""

    model_config = ConfigDict(from_attributes=True)


class Asked(Described):
    """Base of what is asked; a field that is not supported is refused by its name."""

    model_config = ConfigDict(extra="forbid")


class HeldOut(Answer):
    """What a job's adapter came to on held-out problems: its mean reward; where nothing is rewarded, its log-likelihood."""

    version: int
    """The version that was evaluated last."""
    value: float
    best_version: int
    """The version with the highest figure."""
    best: float


class Job(Answer):
    """A job and its progress."""

    id: str
    name: str
    tenant: str | None = None
    """The name of whose it is; told to admins."""
    state: str
    """`queued`, `running`, `paused`, `succeeded`, `failed` or `cancelled`."""
    message: str
    """Why it failed, or what to know of it."""
    step: int
    """Steps done."""
    steps: int
    created: float
    """Unix seconds."""
    ended: float | None
    reward: float | None = None
    """Mean reward of the newest step."""
    held_out: HeldOut | None = None
    """Its newest and its best evaluation; null before the first."""
    base: str | None = None
    """The name of the base that it trains on, where the service has several."""
    after: list[str] = []
    """Ids of the jobs that have to succeed before it starts."""
    at: float | None = None
    """Unix seconds before which it does not start."""
    spec: dict[str, Any]
    """The job, as it was validated."""
    progress: dict[str, Any] | None = None
    """Of a running job: its phase, rollouts of the step under way, tokens per second, seconds left."""


class Jobs(Answer):
    """A page of jobs, newest first."""

    data: list[Job]
    next: str | None
    """Give it as `after` for the next page; absent on the last."""


class JobEvent(Answer):
    """Something that happened to a job."""

    id: int
    """Grows; give the last one seen as `after`, or as `Last-Event-ID` of a stream."""
    kind: Literal["state", "step"]
    time: float
    """Unix seconds."""
    data: dict[str, Any]
    """A `step` is a line of metrics.jsonl with tokens and seconds; a `state` has `state` and `message`."""


class Events(Answer):
    """Events in order."""

    data: list[JobEvent]


class TenantEvent(JobEvent):
    """Something that happened to one of the tenant's jobs."""

    job: str
    """The job's id."""


class Steps(Answer):
    """Steps of a job, thinned for a picture."""

    data: list[dict[str, Any]]
    """Lines of metrics.jsonl in order, with tokens and seconds; only the fields that were asked for."""
    after: int
    """The newest event. A stream that starts here has no gap and no duplicate."""


class Rollouts(Answer):
    """What a step of a job sampled, or the evaluation of a version."""

    step: int
    """The step; of an evaluation the version."""
    steps: list[int]
    """Steps whose rollouts are kept; of evaluations the versions."""
    data: list[dict[str, Any]]
    """As in the run directory's rollouts/<step>.jsonl."""


MOST_SUBMITTED = 1000
"""Jobs of one request."""


class JobToSubmit(Asked):
    """One of several jobs."""

    job: dict[str, Any]
    """As it is in a job file: name, data, reward, …; where the service has several bases, with its `base`."""
    after: list[Annotated[str, StringConstraints(max_length=100)]] = Field([], max_length=20)
    """Jobs, by name or id, that have to succeed before this one starts."""


class JobsToSubmit(Asked):
    """Jobs that are taken together, or not at all."""

    jobs: list[JobToSubmit] = Field(min_length=1, max_length=MOST_SUBMITTED)
    at: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Unix seconds before which none of them starts."""


class SubmittedJobs(Answer):
    """Jobs in the order of the request."""

    data: list[Job]


class CheckedJobs(Answer):
    """The jobs that a text holds; each can be submitted as it is."""

    jobs: list[dict[str, Any]]


class Version(Answer):
    """A saved version of a job's adapter."""

    version: int
    best: bool
    """Whether it is the best by evaluation."""
    latest: bool
    model: str
    """How requests for completions name it."""
    bytes: int


class Versions(Answer):
    """Versions that are kept, oldest first."""

    data: list[Version]


class File(Answer):
    """An uploaded file of rows."""

    id: str
    object: Literal["file"] = "file"
    filename: str
    bytes: int
    rows: int
    created: float
    """Unix seconds."""
    created_at: int
    """The same in whole seconds."""
    purpose: Literal["fine-tune"] = "fine-tune"
    status: Literal["processed"] = "processed"
    """Every row has been read when the upload is answered."""


class Files(Answer):
    """A page of files, newest first unless asked otherwise."""

    object: Literal["list"] = "list"
    data: list[File]
    has_more: bool = False
    """Give `last_id` as `after` for the next page."""
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(Answer):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ApiKey(Answer):
    """An API key, without its text."""

    id: str
    tenant: str
    name: str
    role: str
    created: float
    expires: float | None
    revoked: float | None
    scope: list[str] | None = None
    """What it may do of what its role may; all where there is none."""
    signed_in: bool = False
    """Whether a sign-in made it."""


class NewKey(ApiKey):
    """A key that was just made."""

    key: str
    """Shown this once."""


class Keys(Answer):
    """Keys, oldest first."""

    data: list[ApiKey]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds characters that are not printed, such as the end of a line; leave them out")
    return text


class KeyRequest(Asked):
    """A key to make."""

    tenant: str | None = Field(None, min_length=1, max_length=100, pattern=f"^{TENANT_NAME}$")
    """Whose it is; the asker's own tenant without one. Only an admin names another."""
    name: Annotated[str, Field(max_length=100), AfterValidator(_printable)] = ""
    role: Literal["reader", "member", "tenant-admin", "admin"] = "member"
    scope: list[Literal["read", "jobs", "completions", "files"]] | None = Field(None, min_length=1, max_length=4)
    """What it may do of what its role may; all without one. A key with a scope makes no keys."""
    expires_days: float | None = Field(None, gt=0, le=36500)


class AuditEntry(Answer):
    """Something that was changed."""

    id: int
    time: float
    """Unix seconds."""
    tenant: str
    """Whose key it was."""
    key: str
    """The key's id."""
    key_name: str
    action: str
    """What was done: `submit`, `cancel`, `create key`, …"""
    object: str
    """What it was done to, by id."""


class AuditEntries(Answer):
    """Entries, newest first."""

    data: list[AuditEntry]
    next: str | None
    """Give it as `after` for the next page; absent on the last."""


class Health(Answer):
    """How the service is."""

    status: str
    base: str | None = None
    """The base that is meant where none is named."""
    bases: dict[str, str] = {}
    """What each base is, by its name, where there are several."""
    message: str = ""


class Model(Answer):
    """Something that can be asked for completions."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "motet"
    base: str | None = None
    """Of an adapter, where the service has several bases: the name of the one that it is on."""


class Models(Answer):
    """The base and the versions of the tenant's adapters."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(Answer):
    """What went wrong."""

    message: str
    """For a person: what is wrong and what to do."""
    type: str
    param: str | None = None
    code: str | None = None


class Error(Answer):
    """The body of every answer that is not a success."""

    error: ErrorDetail
