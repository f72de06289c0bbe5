"""Request and response models of sign-in."""

from __future__ import annotations

from pydantic import Field

from motet.service.schemas import Answer, Asked


class Me(Answer):
    """The requester: its key, tenant and rights."""

    id: str
    """Id of the key; `none` in a service without keys."""
    tenant: str
    name: str
    """Name of the key; for a sign-in, of the person."""
    role: str
    rights: list[str]
    """A subset of `read`, `jobs`, `completions`, `files`, `keys` and `service`."""
    expires: float | None
    signed_in: bool
    """Whether a sign-in created the key; `DELETE /v1/login` then ends it."""


class LoginWays(Answer):
    """Ways to sign in."""

    issuer: str
    """The OpenID Connect provider."""
    url: str
    """The page that starts a sign-in in a browser."""
    device: bool
    """Whether the provider supports the device flow."""


class LoginCode(Asked):
    """The code that a browser passed to a command line."""

    code: str = Field(min_length=1, max_length=8000)
    verifier: str = Field(pattern="^[A-Za-z0-9_-]{43,128}$")
    """PKCE verifier; its SHA-256 was sent at the start of the sign-in."""


class DeviceLogin(Answer):
    """A sign-in that a person finishes in any browser."""

    handle: str
    """Send it to `POST /v1/login/device/key`."""
    user_code: str
    """The code that the person enters."""
    verification_uri: str
    """The page where they enter it."""
    expires_in: float
    """Seconds."""
    interval: float
    """Seconds between two polls."""


class DeviceHandle(Asked):
    """An unfinished sign-in."""

    handle: str = Field(min_length=1, max_length=8000)


class DevicePending(Answer):
    """The person has not finished."""

    interval: float
    """Seconds until the next poll; five more each time the provider asks to slow down."""
    handle: str
    """Send it with the next poll."""
