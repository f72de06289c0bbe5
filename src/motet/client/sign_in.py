"""How a person signs in to a service: with a browser on this machine, or with a code that they type in any browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from urllib.parse import parse_qs, urlencode, urlsplit

from motet.client.connection import Connection
from motet.core.errors import ConfigError, ServiceError
from motet.service.schemas import NewKey
from motet.service.schemas.sign_in import DeviceLogin, DevicePending, LoginWays, Me

_SECONDS = 600.0
"""For a person to sign in."""
_PAGE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\nCache-Control: no-store\r\n\r\n"
    b"Return to the terminal; this page can be closed.\n"
)
_OTHER = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
Show = Callable[[str, str], None]
"""Shows a person the URL to open, and the code to type there, if one is needed."""


class SignInMethods(Connection):
    """Methods of both clients."""

    async def me(self) -> Me:
        """The key's tenant, role and rights."""
        return await self._ask(Me, "GET", "/v1/me")

    async def sign_in(self, show: Show, browser: bool = False, port: int = 0) -> NewKey:
        """Sign a person in, and use the new key from now on.

        Args:
            show: called with the URL to open, and the code to enter there (empty if none is needed).
            browser: wait for a browser on this machine, even if the provider supports codes in any browser.
            port: port to wait for the browser; 0 is any free port.

        Raises:
            ServiceError: the service has no sign-in, or the person was refused or took too long.
        """
        ways = await self._ask(LoginWays, "GET", "/v1/login")
        try:
            async with asyncio.timeout(_SECONDS):
                made = await (
                    self._by_browser(ways.url, show, port) if browser or not ways.device else self._by_code(show)
                )
        except TimeoutError:
            raise ServiceError("nobody signed in within ten minutes; start again", 408) from None
        self._http.headers["Authorization"] = f"Bearer {made.key}"
        return made

    async def sign_out(self) -> None:
        """End the sign-in that made the key of this client, and the keys that were made with it."""
        await self._send("DELETE", "/v1/login")

    async def _by_code(self, show: Show) -> NewKey:
        begun = await self._ask(DeviceLogin, "POST", "/v1/login/device")
        show(begun.verification_uri, begun.user_code)
        wait, handle = begun.interval, begun.handle
        while True:
            await asyncio.sleep(max(wait, 1.0))
            answer = await self._send("POST", "/v1/login/device/key", json={"handle": handle})
            if answer.status_code != 202:
                return NewKey.model_validate_json(answer.content)
            pending = DevicePending.model_validate_json(answer.content)
            wait, handle = pending.interval, pending.handle

    async def _by_browser(self, url: str, show: Show, port: int) -> NewKey:
        verifier, state = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        async with _waiting(port, state) as (heard, code):
            show(f"{url}?{urlencode({'port': heard, 'challenge': challenge, 'state': state})}", "")
            body = {"code": await code, "verifier": verifier}
        return await self._ask(NewKey, "POST", "/v1/login/key", json=body)


@contextlib.asynccontextmanager
async def _waiting(port: int, state: str) -> AsyncIterator[tuple[int, asyncio.Future[str]]]:
    """A local port to which the browser brings a code with this state, while the block runs."""
    code: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, ValueError, OSError), contextlib.closing(writer):
            async with asyncio.timeout(10.0):
                line = (await reader.readline()).decode("ascii")
                while (await reader.readline()).strip():
                    pass
                query = parse_qs(urlsplit(line.split(" ")[1]).query) if line.startswith("GET /?") else {}
                ours = hmac.compare_digest(query.get("state", [""])[0].encode(), state.encode()) and "code" in query
                if ours and not code.done():
                    code.set_result(query["code"][0])
                writer.write(_PAGE if ours else _OTHER)
                await writer.drain()

    try:
        server = await asyncio.start_server(answer, "127.0.0.1", port, limit=2**14)
    except OSError as error:
        raise ConfigError(
            f"cannot wait for the browser on port {port}: {error.strerror}; give another --port"
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1], code
