"""Sign-in: who a person is here, and the key that they get. Nothing is kept in memory between the requests of one sign-in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from fastapi import Request, Response

from motet.config.service import TENANT_NAME, OidcConfig, RateConfig, Role
from motet.errors import StoreError
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
"""From the first page of a sign-in to its last."""
_CODE_SECONDS = 300
"""For a person to confirm that a command line may sign in, and for it to fetch its key."""
_NAMES = ("preferred_username", "email", "name", "sub")
_ATTEMPTS = 12
"""To finish a sign-in, for each that may begin: a command that waits for a person asks every few seconds."""
_AT_ONCE = 2
"""Requests to the provider, which takes eight, for one address."""
_ASK = "ask the service's operator"


@dataclass(frozen=True)
class Person:
    """Somebody who signed in."""

    id: str
    """A digest of the issuer and of the subject there."""
    name: str
    tenant: str
    role: Role


@dataclass(frozen=True)
class Loopback:
    """A command line on the person's machine that waits for the browser."""

    port: int
    challenge: str
    """SHA-256 of its secret, as PKCE has it."""
    state: str
    """By which it knows the browser that it sent."""


def challenge_of(verifier: str) -> str:
    """The S256 challenge of PKCE."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def session_cookie(public_url: str) -> str:
    """The name of the cookie with a browser's key; over https a name that no other host can set."""
    return "__Host-motet" if public_url.startswith("https:") else "motet"


def person_of(config: OidcConfig, claims: Mapping[str, Any]) -> Person:
    """Who somebody is here, by the claims of their ID token.

    Raises:
        Refusal: they have no tenant or no role.
    """
    named = [claims.get(name) for name in ((config.name_claim,) if config.name_claim else ()) + _NAMES]
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
    """Sign-ins of one service; without `oidc` in its configuration each is refused."""

    def __init__(self, settings: Settings, store: Store, sealing: Secrets) -> None:
        """`sealing` makes the texts that a browser keeps between two requests."""
        self.public_url, self.cookie = settings.public_url, session_cookie(settings.public_url)
        self._config, self._store, self._sealing = settings.config.oidc, store, sealing
        self._provider: Provider | None = None
        self._limits: dict[str, RateLimit] = {}
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        if (config := self._config) is not None:
            self._provider = Provider(config, os.environ.get(SECRET_VARIABLE) or config.client_secret)
            for kind, times in (("begin", 1), ("finish", _ATTEMPTS)):
                rate = config.per_minute * times / 60
                self._limits[kind] = RateLimit(RateConfig(requests_per_second=rate, burst=max(1, int(30 * rate))))

    @property
    def page(self) -> str:
        """The URL that begins a sign-in in a browser; empty without sign-in."""
        return f"{self.public_url}/login" if self._config is not None else ""

    @property
    def config(self) -> OidcConfig:
        """Of the provider.

        Raises:
            Refusal: this service has no sign-in.
        """
        if self._config is None:
            raise _none()
        return self._config

    def provider(self, request: Request, kind: Literal["begin", "finish"] | None = None) -> Provider:
        """The provider; a request that begins or finishes a sign-in is counted by its address.

        Raises:
            Refusal: there is none, or the address asks too often.
        """
        if self._provider is None:
            raise _none()
        if kind is not None and (seconds := self._limits[kind].wait(_address(request))):
            words = f"too many sign-ins from this address; try again in {seconds} s"
            raise Refusal(429, words, headers={"Retry-After": str(seconds)})
        return self._provider

    @contextlib.asynccontextmanager
    async def _turn(self, request: Request) -> AsyncIterator[None]:
        """One of the few requests to the provider that an address has under way; others wait for their own address alone."""
        turns = self._turns.setdefault(_address(request), asyncio.Semaphore(_AT_ONCE))
        async with turns:
            yield

    # --- in a browser ---------------------------------------------------------------------------------------------------

    async def begin(self, request: Request, loopback: Loopback | None) -> tuple[str, str]:
        """The provider's page, and the text that the browser keeps until it is back."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        provider = self.provider(request, "begin")
        page = await provider.page(self.public_url + CALLBACK, state, nonce, challenge_of(verifier))
        cli = None if loopback is None else [loopback.port, loopback.challenge, loopback.state]
        return page, self._sealing.pack("begun", {"state": state, "nonce": nonce, "verifier": verifier, "cli": cli})

    async def finish(self, request: Request, kept: str, state: str, code: str) -> tuple[Person, Loopback | None]:
        """The person who is back from the provider with a code, and the command line that waits for them, if one does.

        Raises:
            Refusal: this browser did not begin the sign-in, the provider does not accept it, or the person has no role.
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
        """Set a cookie that no script reads; without a value it is deleted."""
        secure = self.public_url.startswith("https:")
        age = int(seconds) if value else 0
        response.set_cookie(name, value, max_age=age, path="/", secure=secure, httponly=True, samesite=same_site)

    # --- on a command line ----------------------------------------------------------------------------------------------

    def code_for(self, person: Person, loopback: Loopback) -> str:
        """What the browser hands to the command line, which alone can exchange it."""
        fields = {"person": [person.id, person.name, person.tenant, person.role], "challenge": loopback.challenge}
        return self._sealing.pack("code", fields)

    def person_by(self, code: str, verifier: str) -> Person:
        """The person that a code is for.

        Raises:
            Refusal: it is too old, or for another command line.
        """
        fields = self._sealing.unpack("code", code, _CODE_SECONDS)
        if fields is None or not hmac.compare_digest(fields["challenge"], challenge_of(verifier)):
            raise Refusal(401, "this code is not good any more, or not for this command; `motet login` begins again")
        return Person(*fields["person"])

    async def begin_device(self, request: Request) -> tuple[DeviceCode, str]:
        """A device sign-in, and the handle by which it is asked for."""
        provider = self.provider(request, "begin")
        async with self._turn(request):
            device = await provider.begin_device()
        until = now() + BEGUN_SECONDS
        return device, self._device(device.device_code, device.interval, until)

    async def finish_device(self, request: Request, handle: str) -> Person | tuple[Pending, str]:
        """The person, once they have finished; until then the handle for the next question. Raises as `finish`."""
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
        """A key for a person, with its text; it expires with the sign-in."""
        expires = now() + self.config.hours * 3600
        try:
            key, text = self._store.tenants.sign_in(person.tenant, person.name, person.role, expires, person.id)
        except StoreError as error:
            raise Refusal(403, str(error)) from error
        who = self._store.tenants.who(text)
        assert who is not None
        self._store.audit(who, "sign in", key.id)
        return key, text


def _address(request: Request) -> str:
    return network_of(tuple(request.client) if request.client else None)


def _none() -> Refusal:
    return Refusal(404, "this service has no sign-in; give an API key, which an admin makes with `motet keys create`")
