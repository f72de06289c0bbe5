"""Client of an OpenID Connect provider: its metadata, and the ID tokens that it issues."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote_plus, urlencode, urlsplit

import httpx2
import jwt
from pydantic import BaseModel, ValidationError, model_validator

from motet.config.service import OidcConfig
from motet.config.urls import check_safe_url, is_loopback
from motet.service.errors import Refusal

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Accepted signature algorithms, all with public keys."""
_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_MOST_BYTES = 2**20
"""Largest response of the provider, in bytes."""
_SECONDS = 10.0
"""Time limit of a request to the provider."""
_AT_ONCE = 8
"""Most concurrent requests to the provider."""
_KEPT_SECONDS = 3600.0
_AGAIN_SECONDS = 30.0
"""Between attempts to load a document that failed or lacks a key."""
_LEEWAY_SECONDS = 60
"""Allowed clock difference to the provider."""
_ERROR = re.compile(r"[a-z_]{1,60}")
_log = logging.getLogger(__name__)
T = TypeVar("T")


class About(BaseModel):
    """The provider's metadata, as far as it is used."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    device_authorization_endpoint: str | None = None
    token_endpoint_auth_methods_supported: list[str] = ["client_secret_basic"]

    @model_validator(mode="after")
    def _is_reached_safely(self) -> About:
        for name, url in self:
            if name.endswith(("_endpoint", "_uri")) and url is not None:
                check_safe_url(url)
        return self


class DeviceCode(BaseModel):
    """The answer to a device authorization request (RFC 8628)."""

    device_code: str
    user_code: str
    verification_uri: str
    expires_in: float
    interval: float = 5.0


@dataclass(frozen=True)
class Pending:
    """The person has not finished a device sign-in."""

    interval: float
    """Seconds until the next poll."""


class Unusable(Exception):
    """The provider does not answer, or violates OpenID Connect."""


class _Kept(Generic[T]):
    """A document of the provider, loaded by one request at a time and cached for an hour, or longer if a reload fails."""

    def __init__(self, load: Callable[[], Awaitable[T]], clock: Callable[[], float]) -> None:
        self._load, self._clock = load, clock
        self._value: T | None = None
        self._loaded = self._tried = -float("inf")
        self._lock = asyncio.Lock()

    async def get(self, *, reload: bool = False) -> T:
        """The document; `reload` gets a newer one, unless it was loaded a moment ago."""
        async with self._lock:
            now = self._clock()
            stale = reload or now - self._loaded > _KEPT_SECONDS
            if stale and now - self._tried > _AGAIN_SECONDS:
                self._tried = now
                try:
                    self._value, self._loaded = await self._load(), now
                except Unusable as error:
                    _log.error("the OpenID Connect provider cannot be used: %s", error)
            if self._value is None:
                raise _away()
            return self._value


class Provider:
    """Requests to one provider as one client."""

    def __init__(self, config: OidcConfig, secret: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Sends nothing yet. `secret` is the client's; empty for a public client."""
        self._config, self._secret = config, secret
        self._about, self._keys = _Kept(self._discover, clock), _Kept(self._load_keys, clock)
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._trust: ssl.SSLContext | None = None

    async def has_device_flow(self) -> bool:
        """Whether `begin_device` is supported."""
        return (await self._about.get()).device_authorization_endpoint is not None

    async def page(self, redirect: str, state: str, nonce: str, challenge: str) -> str:
        """The URL where a person signs in; `challenge` is PKCE's."""
        about = await self._about.get()
        query = {
            "response_type": "code", "client_id": self._config.client_id, "redirect_uri": redirect,
            "scope": " ".join(self._config.scopes), "state": state, "nonce": nonce, "code_challenge": challenge,
            "code_challenge_method": "S256",
        }  # fmt: skip
        joint = "&" if urlsplit(about.authorization_endpoint).query else "?"
        return f"{about.authorization_endpoint}{joint}{urlencode(query)}"

    async def claims_of_code(self, code: str, redirect: str, verifier: str, nonce: str) -> Mapping[str, Any]:
        """The claims about the person who signed in. Raises Refusal if the code is rejected or the ID token invalid."""
        answer = await self._token(
            grant_type="authorization_code", code=code, redirect_uri=redirect, code_verifier=verifier
        )
        if "error" in answer:
            raise self._refused(answer["error"])
        return await self._claims(answer, nonce)

    async def begin_device(self) -> DeviceCode:
        """Start the device flow. Raises Refusal if the provider does not support it, or refuses."""
        about = await self._about.get()
        if about.device_authorization_endpoint is None:
            raise Refusal(409, "the provider has no device flow; sign in with a browser on this machine")
        scope = " ".join(self._config.scopes)
        answer = await self._post(about, about.device_authorization_endpoint, {"scope": scope})
        if "error" in answer:
            raise self._refused(answer["error"])
        try:
            return DeviceCode.model_validate(answer)
        except ValidationError as error:
            raise _away(f"its answer to a device request lacks {error.errors()[0]['loc']}") from error

    async def claims_of_device(self, device_code: str, interval: float) -> Mapping[str, Any] | Pending:
        """The claims about the person, once they finished the device flow. Raises as `claims_of_code`."""
        answer = await self._token(grant_type=_DEVICE_GRANT, device_code=device_code)
        match answer.get("error"):
            case None:
                return await self._claims(answer, None)
            case "authorization_pending":
                return Pending(interval)
            case "slow_down":
                return Pending(interval + 5.0)
            case error:
                raise self._refused(error)

    def _refused(self, error: object) -> Refusal:
        text = error if isinstance(error, str) and _ERROR.fullmatch(error) else "an unknown error"
        if text in ("invalid_client", "unauthorized_client"):
            _log.error("the OpenID Connect provider answers %s: check client_id and MOTET_OIDC_SECRET", text)
        return Refusal(401, f"the provider does not accept this sign-in ({text}); begin again")

    # --- tokens ---------------------------------------------------------------------------------------------------------

    async def _claims(self, answer: Mapping[str, Any], nonce: str | None) -> Mapping[str, Any]:
        """The claims of a token response; those missing in the ID token come from the userinfo endpoint."""
        claims = await self._verified(answer.get("id_token"), nonce)
        config, about = self._config, await self._about.get()
        wanted = {config.groups_claim, config.tenant_claim} - {""}
        access = answer.get("access_token")
        if wanted <= claims.keys() or about.userinfo_endpoint is None or not isinstance(access, str):
            return claims
        try:
            more = await self._ask("GET", about.userinfo_endpoint, headers={"Authorization": f"Bearer {access}"})
        except Unusable as error:
            raise _away(str(error)) from error
        return {**more, **claims} if more.get("sub") == claims["sub"] else claims

    async def _verified(self, token: object, nonce: str | None) -> Mapping[str, Any]:
        """The claims of an ID token that the provider signed for this client and this sign-in, and that has not expired."""
        if not isinstance(token, str):
            raise _away("its answer has no id_token; `scopes` must include openid")
        try:
            header = jwt.get_unverified_header(token)
            key = await self._key(header.get("kid"))
            claims: dict[str, Any] = jwt.decode(
                token, key, ALGORITHMS, issuer=self._config.issuer, audience=self._config.client_id,
                leeway=_LEEWAY_SECONDS, options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )  # fmt: skip
        except (jwt.PyJWTError, TypeError, ValueError, RecursionError) as error:
            _log.warning("an ID token of the OpenID Connect provider is refused: %s", error)
            raise Refusal(401, f"the provider's ID token is not valid ({error}); begin again") from error
        if claims.get("azp", self._config.client_id) != self._config.client_id:
            raise Refusal(401, "the provider's ID token is for another client; begin again")
        if nonce is not None and claims.get("nonce") != nonce:
            raise Refusal(401, "the provider's ID token is not for this sign-in; begin again")
        return claims

    async def _key(self, kid: object) -> Any:
        """The public key with this id; without an id, the only key."""
        for reload in (False, True):
            keys = await self._keys.get(reload=reload)
            known = [one for one in keys if one.key_id == kid or (kid is None and len(keys) == 1)]
            if known:
                return known[0].key
        raise jwt.InvalidKeyError("the provider does not publish the key that signed it")

    # --- requests -------------------------------------------------------------------------------------------------------

    async def _discover(self) -> About:
        url = f"{self._config.issuer.rstrip('/')}/.well-known/openid-configuration"
        answer = await self._ask("GET", url)
        try:
            about = About.model_validate(answer)
        except ValidationError as error:
            raise Unusable(f"{url} is not a description of a provider: {error.errors()[0]['msg']}") from error
        if about.issuer != self._config.issuer:
            raise Unusable(f"{url} names the issuer {about.issuer!r}; set `issuer` to exactly that")
        return about

    async def _load_keys(self) -> list[jwt.PyJWK]:
        url = (await self._about.get()).jwks_uri
        try:
            return list(jwt.PyJWKSet.from_dict(await self._ask("GET", url)).keys)
        except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
            raise Unusable(f"{url} holds no keys that can be used: {error}") from error

    async def _token(self, **form: str) -> dict[str, Any]:
        about = await self._about.get()
        return await self._post(about, about.token_endpoint, form)

    async def _post(self, about: About, url: str, form: dict[str, str]) -> dict[str, Any]:
        """The response to a form of this client; may be an OAuth error with a code under `error`."""
        name, auth = self._config.client_id, None
        methods = about.token_endpoint_auth_methods_supported
        if self._secret and "client_secret_basic" not in methods and "client_secret_post" in methods:
            form = {**form, "client_secret": self._secret}
        elif self._secret:
            auth = (quote_plus(name), quote_plus(self._secret))  # RFC 6749, 2.3.1
        try:
            return await self._ask("POST", url, data={**form, "client_id": name}, auth=auth)
        except Unusable as error:
            raise _away(str(error)) from error

    async def _ask(self, method: str, url: str, **request: Any) -> dict[str, Any]:
        """A JSON object: a success, or an OAuth error. Raises Unusable without a valid answer in time."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **request.pop("headers", {})}
        here = is_loopback(urlsplit(url).hostname or "")
        if self._trust is None:  # slow to create
            self._trust = await asyncio.to_thread(httpx2.create_ssl_context)
        try:
            async with (
                asyncio.timeout(_SECONDS),
                self._turn,
                httpx2.AsyncClient(
                    verify=self._trust, trust_env=not here, follow_redirects=False, timeout=_SECONDS
                ) as http,
                http.stream(method, url, headers=headers, **request) as answer,
            ):
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise Unusable(f"{url} answers with more than {_MOST_BYTES} bytes")
                content = json.loads(body)
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
            raise Unusable(f"{url} does not answer: {error or type(error).__name__}") from error
        except (ValueError, RecursionError) as error:
            raise Unusable(f"{url} answers {answer.status_code} without JSON") from error
        if not isinstance(content, dict) or not (answer.is_success or "error" in content):
            raise Unusable(f"{url} answers {answer.status_code} without what was asked for")
        return content


def _away(detail: str = "") -> Refusal:
    if detail:
        _log.error("the OpenID Connect provider cannot be used: %s", detail)
    return Refusal(503, "the sign-in provider cannot be used now; try again in a minute", headers={"Retry-After": "30"})
