"""Hosts on other machines: each connects to whoever started it, with a token that only the two know."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from motet.channel import LONGEST_LINE, Child
from motet.cluster import messages as m
from motet.cluster.host import Engine

ADDRESS, TOKEN = "MOTET_HOST_PARENT", "MOTET_HOST_TOKEN"
"""In the environment of a host's process: where it connects to, and what it says first."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Listener:
    """Waits for hosts to connect. Lives in one event loop."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._expected: dict[str, asyncio.Future[Streams]] = {}

    async def open(self, host: str) -> int:
        """Listen at an address of this machine; gives the port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, host, 0, limit=LONGEST_LINE)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no longer; who has connected stays."""
        if self._server is not None:
            self._server.close()

    async def engine(
        self, begin: Callable[[str], Awaitable[Awaitable[object]]], end: Callable[[], Awaitable[None]]
    ) -> Engine:
        """The process that `begin` starts with a token, once it has connected; what `begin` gives is done when it ends."""
        token = secrets.token_hex(16)
        connected = self._expected[token] = asyncio.get_running_loop().create_future()
        try:
            ended = asyncio.ensure_future(await begin(token))
            await asyncio.wait((connected, ended), return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                ended.result()  # why, where it is known
                raise ConnectionError("the process of a host ended before it connected")
        except BaseException:
            await end()
            raise
        finally:
            del self._expected[token]
        reader, writer = connected.result()
        ended.add_done_callback(lambda _: _hang_up(writer, ended))
        return Child[m.FromEngine](m.FromEngine, reader, writer, end)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readline()
        expected = self._expected.get(first.decode("utf-8", "replace").strip())
        if expected is None or expected.done():
            writer.close()
        else:
            expected.set_result((reader, writer))


def _hang_up(writer: asyncio.StreamWriter, ended: asyncio.Future[object]) -> None:
    """A process that is gone sends nothing any more, also where its machine could not say so."""
    if not ended.cancelled():
        ended.exception()
    writer.transport.abort()
