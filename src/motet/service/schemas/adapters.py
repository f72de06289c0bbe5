"""What the service answers about adapters and shares."""

from __future__ import annotations

from pydantic import Field

from motet.service.schemas import Answer, Asked


class Adapter(Answer):
    """An adapter that was uploaded."""

    id: str
    """A job's `adapter.init`, and a model for completions."""
    name: str
    """The same, by name."""
    rank: int
    alpha: float
    target_modules: list[str]
    """Linear layers that it changes."""
    base: str | None = None
    """The name of the base that it fits, where the service has several."""
    bytes: int
    created: float
    """Unix seconds."""


class Adapters(Answer):
    """Uploaded adapters, newest first."""

    data: list[Adapter]


class ShareRequest(Asked):
    """What to share, and with whom."""

    name: str = Field(min_length=1, max_length=100)
    """A job, whose versions are shared, or an uploaded adapter; by name or id."""
    tenant: str = Field(min_length=1, max_length=100)
    """The other tenant's name; `*` for all."""


class Share(Answer):
    """An adapter that another tenant may chat with, start from and take home."""

    id: str
    name: str
    """How its owner names it."""
    owner: str
    """The owner's name."""
    tenant: str
    """With whom; `*`: all."""
    models: list[str]
    """How the other tenant names it, in requests for completions and in `adapter.init`; empty before the first version."""
    created: float
    """Unix seconds."""


class Shares(Answer):
    """Shares, oldest first."""

    given: list[Share]
    """What the tenant shares; for admins, all shares."""
    received: list[Share]
    """What others share with the tenant."""
