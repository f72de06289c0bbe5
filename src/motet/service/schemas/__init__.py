"""Response models of the service, described in its OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from motet.config.service import TENANT_NAME
from motet.core.settings import Described
from motet.service.schemas.faults import FewFaults


class Answer(Described):
    """Base of all responses; built from fields, or from an object with attributes of the same names."""

    model_config = ConfigDict(from_attributes=True)


class Asked(Described, FewFaults):
    """Base of all requests; unsupported fields are refused by name."""

    model_config = ConfigDict(extra="forbid")


class HeldOut(Answer):
    """Held-out results of a job."""

    figure: str = ""
    """What is measured, higher is better: `reward`, `accuracy` (`dpo`, `kto`) or `log-lik` (mean log-likelihood of a token)."""
    version: int
    """The last evaluated version."""
    value: float
    """Its figure."""
    best_version: int | None
    """The best version, which `JOB@best` names: never an untrained one. Null before a trained version was evaluated; `JOB@best`
    is then the latest."""
    best: float | None
    """Its figure."""
    best_by: str = ""
    """The rule that decides the best version: the figure, and what decides between equal ones. Empty in jobs that began with an
    earlier release: there the loss decides for `dpo` and `kto`, and version 0 may be the best."""


class Job(Answer):
    """A job and its progress."""

    id: str
    name: str
    tenant: str | None = None
    """Name of the owner; shown to admins only."""
    submitter: str | None = None
    """Name of the person or key that submitted it; null without keys, and if an earlier release stored it."""
    may_change: bool = True
    """Whether it is the requester's own or nobody's, or they are an admin; others of the tenant only see it."""
    state: str
    """`queued`, `running`, `paused`, `succeeded`, `failed` or `cancelled`."""
    message: str
    """Why it failed, or a notice."""
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
    """Its base, if the service has several."""
    after: list[str] = []
    """Ids of jobs that must succeed before it starts."""
    at: float | None = None
    """Earliest start, in Unix seconds."""
    spec: dict[str, Any]
    """The validated configuration."""
    progress: dict[str, Any] | None = None
    """Of a running job: phase, rollouts of the current step, tokens per second, seconds left."""


class Jobs(Answer):
    """A page of jobs, newest first."""

    data: list[Job]
    next: str | None
    """Send it as `after` for the next page; null on the last."""


class JobEvent(Answer):
    """An event of a job."""

    id: int
    """Increasing; send the last one seen as `after`, or as `Last-Event-ID` of a stream."""
    kind: Literal["state", "step"]
    time: float
    """Unix seconds."""
    data: dict[str, Any]
    """For `step`, a line of metrics.jsonl with tokens and seconds; for `state`, `state`, `message` and at first `submitter`."""


class Events(Answer):
    """Events in order."""

    data: list[JobEvent]


class TenantEvent(JobEvent):
    """An event of one of the tenant's jobs."""

    job: str
    """The job's id."""


class Steps(Answer):
    """Steps of a job, thinned for a chart."""

    data: list[dict[str, Any]]
    """Lines of metrics.jsonl in order, with tokens and seconds; only the requested fields."""
    after: int
    """The newest event. A stream that starts here has no gap and no duplicate."""


class Rollouts(Answer):
    """Rollouts of a step of a job, or of an evaluation."""

    step: int
    """The step, or the evaluated version."""
    steps: list[int]
    """Steps with stored rollouts, or evaluated versions."""
    data: list[dict[str, Any]]
    """As in the run directory's rollouts/<step>.jsonl."""
    note: str = ""
    """Why `data` is empty where a problem was asked for."""
    next: str | None = None
    """`after` of the following page, with the same `step` and filters."""


MOST_SUBMITTED = 500
"""Jobs of one request."""


class JobToSubmit(Asked):
    """One of several jobs."""

    job: dict[str, Any]
    """As in a job file: name, data, reward, …; with `base` if the service has several."""
    after: list[Annotated[str, StringConstraints(max_length=100)]] = Field([], max_length=20)
    """Jobs, by name or id, that must succeed before this one starts."""


class JobsToSubmit(Asked):
    """Jobs that are accepted together or not at all."""

    jobs: list[JobToSubmit] = Field(min_length=1, max_length=MOST_SUBMITTED)
    at: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Earliest start of all jobs, in Unix seconds."""


class SubmittedJobs(Answer):
    """Jobs in the order of the request."""

    data: list[Job]


class CheckedJobs(Answer):
    """The jobs in a text; each can be submitted as it is."""

    jobs: list[dict[str, Any]]


class Version(Answer):
    """A saved version of a job's adapter."""

    version: int
    best: bool
    """Whether it is the best by evaluation."""
    untrained: bool = False
    """Whether it equals the adapter that the job began with."""
    latest: bool
    model: str
    """Its name in requests for completions."""
    bytes: int


class Versions(Answer):
    """A page of stored versions, oldest first."""

    data: list[Version]
    next: str | None = None
    """Send it as `after` for the next page; null on the last."""


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
    """`created` in whole seconds."""
    purpose: Literal["fine-tune"] = "fine-tune"
    status: Literal["processed"] = "processed"
    """Every row has been checked before the response."""
    submitter: str | None = None
    """Name of the person or key that uploaded it; null without keys, and if an earlier release stored it."""


class Files(Answer):
    """A page of files, newest first by default."""

    object: Literal["list"] = "list"
    data: list[File]
    has_more: bool = False
    """If true, send `last_id` as `after` for the next page."""
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(Answer):
    """A deleted file."""

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
    """The subset of its role's rights that it has; null for all."""
    signed_in: bool = False
    """Whether a sign-in created it."""
    submitter: str | None = None
    """The name that jobs, files and adapters show which are made with it."""


class NewKey(ApiKey):
    """A new key."""

    key: str
    """Shown only once."""


class Keys(Answer):
    """Keys, oldest first."""

    data: list[ApiKey]
    next: str | None
    """Send it as `after` for the next page; null on the last."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it contains unprintable characters, such as line breaks; remove them")
    return text


class KeyRequest(Asked):
    """A key to create."""

    tenant: str | None = Field(None, min_length=1, max_length=100, pattern=f"^{TENANT_NAME}$")
    """Its tenant; by default the requester's. Only admins may name another."""
    name: Annotated[str, Field(max_length=100), AfterValidator(_printable)] = ""
    role: Literal["reader", "member", "tenant-admin", "admin"] = "member"
    scope: list[Literal["read", "jobs", "completions", "files"]] | None = Field(None, min_length=1, max_length=4)
    """A subset of its role's rights; default: all. A key with a scope cannot create keys."""
    expires_days: float | None = Field(None, gt=0, le=36500)


class AuditEntry(Answer):
    """A recorded change."""

    id: int
    time: float
    """Unix seconds."""
    tenant: str
    """Tenant of the key."""
    key: str
    """The key's id."""
    key_name: str
    submitter: str | None = None
    """Name of the person or key to whom the key belongs."""
    action: str
    """The action: `submit`, `cancel`, `create key`, …"""
    object: str
    """Id of the changed object."""


class AuditEntries(Answer):
    """Entries, newest first."""

    data: list[AuditEntry]
    next: str | None
    """Send it as `after` for the next page; null on the last."""


class Health(Answer):
    """State of the service."""

    status: str
    base: str | None = None
    """The default base."""
    bases: dict[str, str] = {}
    """Locations of the bases by name, if there are several."""
    message: str = ""


class Model(Answer):
    """A model for completions."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "motet"
    base: str | None = None
    """Base of an adapter, if the service has several."""
    max_model_len: int | None = None
    """Tokens of the longest prompt with its answer, by the name that vLLM gives it. Left out while it is not known."""
    tool_format: str | None = None
    """Of a base: the form in which it writes thoughts and tool calls. Left out while it is not known."""
    note: str | None = None
    """Of a base: what you must know before you talk to it, such as that its form is not known."""


class Models(Answer):
    """A page of models: the bases, then adapters."""

    object: Literal["list"] = "list"
    data: list[Model]
    next: str | None = None
    """Send it as `after` for the next page; left out on the last."""


class ErrorDetail(Answer):
    """What went wrong."""

    message: str
    """What is wrong and what to do."""
    type: str
    param: str | None = None
    code: str | None = None


class Error(Answer):
    """The body of every error response."""

    error: ErrorDetail
