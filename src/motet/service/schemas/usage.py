"""Request and response models of limits and usage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from motet.config.service import LimitsConfig
from motet.service.schemas import Answer, Asked

By = Literal["job", "day", "tenant", "base", "key"]
"""Grouping of a usage report."""


class UsageLine(Answer):
    """Usage of a tenant, a job or a base."""

    day: str | None = None
    """In UTC; only with `by=day`."""
    tenant: str | None = None
    """The tenant's name; null for idle time."""
    job: str | None = None
    """The job's id; only with `by=job`."""
    name: str | None = None
    """The job's name; kept after the job is deleted."""
    kind: Literal["job", "completions", "idle", "all"]
    """The kind of usage; `all` if the report is not grouped by job."""
    tokens_prompt: int
    """Of completions, of jobs' rollouts and held-out prompts, and all tokens of judges on the base."""
    tokens_sampled: int
    tokens_trained: int
    device_seconds: float
    """Device time. An admin's lines, including idle ones, sum to the time that the engine was running. That of a tenant's
    completions is divided among its keys by tokens."""
    cpu_seconds: float = 0.0
    """CPU time of rewards, graders, schemas, uploads and preparations of jobs."""
    base: str | None = None
    """The base; with `by=base`, and for each job if the service has several."""
    submitter: str | None = None
    """Name of the person or key; only with `by=key`. Null for CPU time of graders and uploads, and what is not known."""
    account: str | None = None
    """Their id; only with `by=key`."""


class UsageReport(Answer):
    """Usage lines, grouped as requested."""

    data: list[UsageLine]
    next: str | None
    """Send it as `after` for the next page; null on the last."""


class TenantInfo(Answer):
    """A tenant, its limits and its usage."""

    id: str
    name: str
    limits: LimitsConfig
    """Effective limits; null means unlimited."""
    own: list[str]
    """Limits that an admin set for it; the others are defaults."""
    running: int
    """Jobs that run."""
    waiting: int
    """Jobs that are queued or paused."""
    tokens_today: int
    """Tokens sampled, trained and read as prompts of completions."""
    device_seconds_today: float
    cpu_seconds_today: float = 0.0
    """CPU time of rewards, graders, schemas, uploads and preparations of jobs."""
    stored_bytes: int
    """All stored data of the tenant, as counted by `storage_mb`."""
    left: dict[str, int | float | None] = {}
    """What is left of the limits that are used up; null without a limit. Of `queued_jobs`: how many may be submitted now."""

    def with_left(self, slots: int) -> TenantInfo:
        """The same with `left`; `slots` is the number of concurrent jobs of all tenants."""
        at_once = min(self.limits.running_jobs or slots, slots)
        used: dict[str, float] = {
            "running_jobs": self.running,
            "queued_jobs": self.running + self.waiting - at_once,
            "tokens_per_day": self.tokens_today,
            "device_seconds_per_day": self.device_seconds_today,
            "cpu_seconds_per_day": self.cpu_seconds_today,
            "storage_mb": self.stored_bytes / 2**20,
        }
        most = {name: getattr(self.limits, name) for name in used}
        left = {name: None if most[name] is None else max(0, most[name] - n) for name, n in used.items()}
        return self.model_copy(update={"left": left})


class Tenants(Answer):
    """Tenants by name."""

    data: list[TenantInfo]
    next: str | None
    """Send it as `after` for the next page; null on the last."""


class Erased(Answer):
    """Progress of a tenant's erasure."""

    erased: bool
    open_jobs: int
    """Jobs that have not ended yet; repeat the request."""


class JobChange(Asked):
    """Changes to a job that has not ended. Fields that you leave out keep their values."""

    budget: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Tokens after which it pauses; null for none."""
    priority: Annotated[int, Field(ge=-100, le=100)] | Literal["low", "normal", "high"] = 0
