"""What is asked and answered where people sign in."""

from __future__ import annotations

from pydantic import Field

from motet.service.schemas import Answer, Asked


class Me(Answer):
    """Who asks: the key, its tenant and what it may do."""

    id: str
    """Of the key; `none` where the service asks for none."""
    tenant: str
    name: str
    """Of the key; for a sign-in, the person's."""
    role: str
    rights: list[str]
    """Some of `read`, `jobs`, `completions`, `files`, `keys` and `service`."""
    expires: float | None
    signed_in: bool
    """Whether a sign-in made the key; `DELETE /v1/login` then ends it."""


class LoginWays(Answer):
    """How people sign in."""

    issuer: str
    """The OpenID Connect provider."""
    url: str
    """The page that begins a sign-in in a browser."""
    device: bool
    """Whether the provider has the device flow."""


class LoginCode(Asked):
    """What a command line was given by the browser."""

    code: str = Field(min_length=1, max_length=8000)
    verifier: str = Field(pattern="^[A-Za-z0-9_-]{43,128}$")
    """Of PKCE: its SHA-256 was given when the sign-in began."""


class DeviceLogin(Answer):
    """A sign-in that a person finishes in a browser anywhere."""

    handle: str
    """Send it to `POST /v1/login/device/key`."""
    user_code: str
    """What the person types."""
    verification_uri: str
    """Where they type it."""
    expires_in: float
    """Seconds."""
    interval: float
    """Seconds between two questions whether the person has finished."""


class DeviceHandle(Asked):
    """A sign-in that was begun."""

    handle: str = Field(min_length=1, max_length=8000)


class DevicePending(Answer):
    """The person has not finished."""

    interval: float
    """Seconds until the next question; five more each time that the provider asks to slow down."""
    handle: str
    """Send it with the next question."""
