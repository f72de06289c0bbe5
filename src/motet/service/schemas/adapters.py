"""Response models of adapters and shares."""

from __future__ import annotations

from pydantic import Field

from motet.service.schemas import Answer, Asked


class Adapter(Answer):
    """An uploaded adapter."""

    id: str
    """Usable as a job's `adapter.init` and as a model for completions."""
    name: str
    """Usable like the id."""
    rank: int
    alpha: float
    target_modules: list[str]
    """Linear layers that it changes."""
    base: str | None = None
    """Its base, if the service has several."""
    submitter: str | None = None
    """Name of the person or key that uploaded it; null without keys, and if an earlier release stored it."""
    bytes: int
    created: float
    """Unix seconds."""


class Adapters(Answer):
    """Uploaded adapters, newest first."""

    data: list[Adapter]
    next: str | None = None
    """Send it as `after` for the next page; null on the last."""


class ShareRequest(Asked):
    """What to share, and with whom."""

    name: str = Field(min_length=1, max_length=100)
    """A job, whose versions are shared, or an uploaded adapter; by name or id."""
    tenant: str = Field(min_length=1, max_length=100)
    """The other tenant's name; `*` for all."""


class Share(Answer):
    """An adapter that another tenant may chat with, start from and download."""

    id: str
    name: str
    """The owner's name for it."""
    owner: str
    """The owning tenant."""
    tenant: str
    """The other tenant; `*` for all."""
    models: list[str]
    """The other tenant's names for it, in requests for completions and in `adapter.init`; empty before the first version.
    """
    created: float
    """Unix seconds."""
    base: str | None = None
    """Its base, if the service has several."""


class Shares(Answer):
    """Shares, oldest first."""

    given: list[Share]
    """Shares of the tenant; for admins, all shares."""
    received: list[Share]
    """Shares of others with the tenant."""
    next: str | None = None
    """Send it as `after` for the next page; null on the last."""
