"""Answers and requests about limits and usage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from motet.config.service import LimitsConfig
from motet.service.schemas import Answer, Asked

By = Literal["job", "day", "tenant", "base"]
"""How a report of usage is grouped."""


class UsageLine(Answer):
    """What the tenant or job of a line used."""

    day: str | None = None
    """In UTC; only with `by=day`."""
    tenant: str | None = None
    """The tenant's name; absent where the device was idle."""
    job: str | None = None
    """The job's id; only with `by=job`."""
    name: str | None = None
    """The job's name; it stays when the job is deleted."""
    kind: Literal["job", "completions", "idle", "all"]
    """What it was used for: `all` where usage is not told by job."""
    tokens_prompt: int
    """Read as prompts of completions."""
    tokens_sampled: int
    tokens_trained: int
    device_seconds: float
    """Of the device. All lines of an admin, idle ones included, sum to the time that the engine was up."""
    base: str | None = None
    """The name of the base; with `by=base`, and with each job if the service has several."""


class UsageReport(Answer):
    """Usage in lines: by day, tenant, job and base, where these are told."""

    data: list[UsageLine]


class TenantInfo(Answer):
    """A tenant, its limits and what it uses of them."""

    id: str
    name: str
    limits: LimitsConfig
    """What holds for it; null is no limit."""
    own: list[str]
    """Limits that an admin set for it; the others are the service's defaults."""
    running: int
    """Jobs that run."""
    waiting: int
    """Jobs that are queued or paused."""
    tokens_today: int
    """Sampled, trained and read as prompts of completions."""
    device_seconds_today: float
    stored_bytes: int
    """Everything that is kept for the tenant, as `storage_mb` counts it."""


class Tenants(Answer):
    """Tenants by name."""

    data: list[TenantInfo]


class Erased(Answer):
    """How far the erasure of a tenant is."""

    erased: bool
    open_jobs: int
    """Jobs that have not ended yet; ask again."""


class JobChange(Asked):
    """Changes to a job that has not ended. Fields that you leave out keep their values."""

    budget: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Tokens after which it pauses; null is none."""
    priority: Annotated[int, Field(ge=-100, le=100)] | Literal["low", "normal", "high"] = 0
