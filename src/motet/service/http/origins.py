"""Protects a service without keys, which serves this machine only, from pages of other sites in a local browser."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class Origins:
    """Refuses requests with a foreign `Host` or `Origin`."""

    def __init__(self, app: ASGIApp, names: Collection[str], refusal: Callable[[int, str], Response]) -> None:
        """`names` are allowed hosts besides this machine's; `refusal` makes a response from a status and a message."""
        self._app, self._refusal = app, refusal
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and (wrong := self._foreign(Headers(scope=scope))):
            words = f"{wrong} is foreign here: this service has no keys. List its name under `http.hosts`, or use keys"
            await self._refusal(403, words)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _foreign(self, headers: Headers) -> str:
        """The foreign header with its value; empty if there is none."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if host and not self._known(f"//{host}"):
            return f"Host {host!r:.200}"
        if origin and not (_parts(origin)[0] == host or _parts(origin)[1] in self._names):
            return f"Origin {origin!r:.200}"
        return ""

    def _known(self, url: str) -> bool:
        name = _parts(url)[1].removesuffix(".")
        try:
            return name in self._names or name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _parts(url: str) -> tuple[str, str]:
    """Host with port, and host, of a URL; both empty for an invalid one."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""
