"""Sign-in: maps a person to a tenant and role, and creates their key. No state stays in memory between its requests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from fastapi import Request, Response

from motet.config.service import TENANT_NAME, OidcConfig, RateConfig, Role
from motet.core.errors import StoreError
from motet.service.database.store import Store
from motet.service.database.tables import Key, now
from motet.service.errors import Refusal
from motet.service.http.auth import RateLimit
from motet.service.http.connections import network_of
from motet.service.http.provider import DeviceCode, Pending, Provider
from motet.service.http.rights import ROLES
from motet.service.secrets import Secrets
from motet.service.settings import Settings

CALLBACK = "/login/callback"
SECRET_VARIABLE = "MOTET_OIDC_SECRET"
BEGUN_SECONDS = 600
"""Time limit of a sign-in from the first page to the last."""
_CODE_SECONDS = 300
"""Time to confirm a command line's sign-in, and for it to fetch its key."""
_NAMES = ("preferred_username", "email", "name", "sub")
_ATTEMPTS = 12
"""Requests allowed per sign-in: a waiting command polls every few seconds."""
_AT_ONCE = 2
"""Concurrent requests to the provider per address, of eight in total."""
_ASK = "ask the service's operator"


@dataclass(frozen=True)
class Person:
    """A signed-in person."""

    id: str
    """A digest of the issuer and of the subject there."""
    name: str
    tenant: str
    role: Role


@dataclass(frozen=True)
class Loopback:
    """A command on the person's machine that waits for the browser."""

    port: int
    challenge: str
    """SHA-256 of its secret (PKCE)."""
    state: str
    """Identifies the browser that it opened."""


def challenge_of(verifier: str) -> str:
    """The S256 challenge of PKCE."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def person_of(config: OidcConfig, claims: Mapping[str, Any]) -> Person:
    """The person described by the claims of an ID token. Raises Refusal if the claims give no tenant or no role."""
    named = map(claims.get, _NAMES)
    name = next((text for text in named if isinstance(text, str) and text.strip()), "somebody")
    tenant = config.tenant or claims.get(config.tenant_claim)
    if isinstance(tenant, list) and len(tenant) == 1:
        tenant = tenant[0]
    if not isinstance(tenant, str) or len(tenant) > 100 or not re.fullmatch(TENANT_NAME, tenant):
        raise Refusal(
            403,
            f"your account has no tenant here: the claim {config.tenant_claim!r} must be one name of letters, digits, "
            f"`_`, `.` and `-`; {_ASK}",
        )
    groups = claims.get(config.groups_claim)
    theirs = ["*", *([groups] if isinstance(groups, str) else groups if isinstance(groups, list) else ())]
    roles = {role for group, role in config.roles.items() if group in theirs}
    if not roles:
        raise Refusal(403, f"none of your groups has a role here; {_ASK} to let one in")
    digest = hashlib.sha256(f"{claims['iss']}\n{claims['sub']}".encode()).hexdigest()
    shown = "".join(letter for letter in name if letter.isprintable())[:100]
    return Person(digest, shown, tenant, max(roles, key=list(ROLES).index))


class SignIns:
    """Sign-ins of a service; without `oidc` in its configuration all are refused."""

    def __init__(self, settings: Settings, store: Store, sealing: Secrets) -> None:
        """`sealing` encrypts the state that a browser keeps between two requests."""
        self.public_url, self._secure = settings.public_url, settings.public_url.startswith("https:")
        self.cookie = "__Host-motet" if self._secure else "motet"
        """Name of the cookie with a browser's key; over https, the prefix prevents other hosts from setting it."""
        self._config, self._store, self._sealing = settings.config.oidc, store, sealing
        self._provider: Provider | None = None
        self._limits: dict[str, RateLimit] = {}
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        if (config := self._config) is not None:
            self._provider = Provider(config, os.environ.get(SECRET_VARIABLE, ""))
            for kind, times in (("begin", 1), ("finish", _ATTEMPTS)):
                rate = config.per_minute * times / 60
                self._limits[kind] = RateLimit(RateConfig(requests_per_second=rate, burst=max(1, int(30 * rate))))

    @property
    def page(self) -> str:
        """The URL that starts a sign-in in a browser; empty without sign-in."""
        return f"{self.public_url}/login" if self._config is not None else ""

    @property
    def config(self) -> OidcConfig:
        """The provider's configuration. Raises Refusal if this service has no sign-in."""
        if self._config is None:
            raise _none()
        return self._config

    def provider(self, request: Request, kind: Literal["begin", "finish"] | None = None) -> Provider:
        """The provider; with `kind`, counts requests by address. Raises Refusal without a provider, or after too many."""
        if self._provider is None:
            raise _none()
        if kind is not None and (seconds := self._limits[kind].wait(_address(request))):
            words = f"too many sign-ins from this address; try again in {seconds} s"
            raise Refusal(429, words, headers={"Retry-After": str(seconds)})
        return self._provider

    def _turn(self, request: Request) -> asyncio.Semaphore:
        """Limits an address's concurrent requests to the provider; waiting does not delay other addresses."""
        return self._turns.setdefault(_address(request), asyncio.Semaphore(_AT_ONCE))

    # --- in a browser ---------------------------------------------------------------------------------------------------

    async def begin(self, request: Request, loopback: Loopback | None) -> tuple[str, str]:
        """The provider's page, and the state for the browser's cookie."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        provider = self.provider(request, "begin")
        page = await provider.page(self.public_url + CALLBACK, state, nonce, challenge_of(verifier))
        cli = None if loopback is None else [loopback.port, loopback.challenge, loopback.state]
        return page, self._sealing.pack("begun", {"state": state, "nonce": nonce, "verifier": verifier, "cli": cli})

    async def finish(self, request: Request, kept: str, state: str, code: str) -> tuple[Person, Loopback | None]:
        """The person who returned from the provider with a code, and the command line that waits for them, if any.

        Raises:
            Refusal: another browser began the sign-in, the provider rejects it, or the person has no role.
        """
        config, provider = self.config, self.provider(request, "finish")
        begun = self._sealing.unpack("begun", kept, BEGUN_SECONDS)
        if begun is None or not hmac.compare_digest(begun["state"].encode(), state.encode()):
            raise Refusal(401, "this sign-in was begun in another browser or tab, or too long ago; begin again")
        async with self._turn(request):
            claims = await provider.claims_of_code(code, self.public_url + CALLBACK, begun["verifier"], begun["nonce"])
        return person_of(config, claims), None if begun["cli"] is None else Loopback(*begun["cli"])

    def set_cookie(
        self, response: Response, name: str, value: str, seconds: float, same_site: Literal["lax", "strict"]
    ) -> None:
        """Set a cookie that scripts cannot read; an empty value deletes it."""
        age = int(seconds) if value else 0
        response.set_cookie(name, value, max_age=age, path="/", secure=self._secure, httponly=True, samesite=same_site)

    # --- on a command line ----------------------------------------------------------------------------------------------

    def code_for(self, person: Person, loopback: Loopback) -> str:
        """The code that the browser passes to the command line; only that can exchange it."""
        fields = {"person": [person.id, person.name, person.tenant, person.role], "challenge": loopback.challenge}
        return self._sealing.pack("code", fields)

    def person_by(self, code: str, verifier: str) -> Person:
        """The person of a code. Raises Refusal if it has expired, or is for another command line."""
        fields = self._sealing.unpack("code", code, _CODE_SECONDS)
        if fields is None or not hmac.compare_digest(fields["challenge"], challenge_of(verifier)):
            raise Refusal(401, "this code has expired, or is for another command; `motet login` begins again")
        return Person(*fields["person"])

    async def begin_device(self, request: Request) -> tuple[DeviceCode, str]:
        """Start a device sign-in; returns it with a handle for polling."""
        provider = self.provider(request, "begin")
        async with self._turn(request):
            device = await provider.begin_device()
        until = now() + BEGUN_SECONDS
        return device, self._device(device.device_code, device.interval, until)

    async def finish_device(self, request: Request, handle: str) -> Person | tuple[Pending, str]:
        """The person, once they have finished; until then a handle for the next poll. Raises as `finish`."""
        provider = self.provider(request, "finish")
        fields = self._sealing.unpack("device", handle, BEGUN_SECONDS)
        if fields is None or fields["until"] < now():
            raise Refusal(401, "this sign-in was begun too long ago; `motet login` begins again")
        async with self._turn(request):
            claims = await provider.claims_of_device(fields["code"], fields["interval"])
        if isinstance(claims, Pending):
            return claims, self._device(fields["code"], claims.interval, fields["until"])
        return person_of(self.config, claims)

    def _device(self, code: str, interval: float, until: float) -> str:
        return self._sealing.pack("device", {"code": code, "interval": interval, "until": until})

    # --- keys -----------------------------------------------------------------------------------------------------------

    def key_of(self, person: Person) -> tuple[Key, str]:
        """Create a key for a person; returns it with its text. It expires with the sign-in."""
        expires = now() + self.config.hours * 3600
        try:
            return self._store.tenants.sign_in(person.tenant, person.name, person.role, expires, person.id)
        except StoreError as error:
            raise Refusal(403, str(error)) from error


def _address(request: Request) -> str:
    return network_of(tuple(request.client) if request.client else None)


def _none() -> Refusal:
    return Refusal(404, "this service has no sign-in; give an API key, which an admin makes with `motet keys create`")
