"""Hosts whose processes another one starts.

On this machine the small parent of a service owns them, and connects each of its HTTP processes with them. On other machines
each connects to the service or run, and sends a secret token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from motet.hosts import messages as m
from motet.hosts.host_link import HostChild, Launch
from motet.process.channel import LONGEST_LINE, Child
from motet.process.ending import EXIT_SECONDS, how_it_ended
from motet.process.supervised import Heart

ADDRESS, TOKEN = "MOTET_HOST_PARENT", "MOTET_HOST_TOKEN"
"""Environment variables of a host's process: the address to connect to, and the token."""

_LOOK_SECONDS = 0.02

Begin = Callable[[str, str], Awaitable[Awaitable[object]]]
"""Starts a process with an address and a token; the result is done when the process has ended."""


async def host_that_connects(host: str, begin: Begin, end: Callable[[], Awaitable[None]]) -> HostChild:
    """Start a process with `begin`, and wait until it connects to this address of this machine; `end` ends it.

    Raises:
        ConnectionError: it ended before it connected. The process's own error is raised instead, if it has one.
    """
    token, connected = secrets.token_hex(16), asyncio.get_running_loop().create_future()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readline()
        if connected.done() or not hmac.compare_digest(first.strip(), token.encode()):
            writer.close()
        else:
            connected.set_result((reader, writer))

    server = await asyncio.start_server(greet, host, 0, limit=LONGEST_LINE)
    try:
        port = server.sockets[0].getsockname()[1]
        ended = asyncio.ensure_future(await begin(f"{host}:{port}", token))
        await asyncio.wait((connected, ended), return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            ended.result()
            raise ConnectionError("the process ended before it connected")
    except BaseException:
        await end()
        raise
    finally:
        server.close()
    reader, writer = connected.result()
    ended.add_done_callback(lambda _: _hang_up(writer, ended))
    child = Child[m.FromHost](m.FromHost, reader, writer, end)
    child.over_network = True
    return child


def _hang_up(writer: asyncio.StreamWriter, ended: asyncio.Future[object]) -> None:
    """Close the connection of a process that is gone, in case its machine could not."""
    if not ended.cancelled():
        ended.exception()
    writer.transport.abort()


def owned_by(heart: Heart) -> Launch:
    """The launcher of a service's hosts: finds or starts them through the parent."""

    async def launch(start: m.StartHost, log: Path) -> HostChild:
        connection = await asyncio.to_thread(heart.connect, log)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LONGEST_LINE)
        host = _OwnedHost(heart, log)
        return HostChild(m.FromHost, reader, writer, host.end, host.how_it_ended)

    return launch


class _OwnedHost:
    """A host's process, whose parent is that of this process."""

    def __init__(self, heart: Heart, log: Path) -> None:
        self._heart, self._log = heart, log
        self._status: int | None = None
        self._stopped = False

    async def how_it_ended(self, hint: str = "") -> str:
        """Give it time to exit by itself; returns how it ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait(self._heart.status), EXIT_SECONDS)
        return how_it_ended(self._status, stopped=self._stopped, hint=hint)

    async def end(self) -> None:
        """Kill it if it still runs, and wait for its end."""
        self._stopped = self._stopped or self._status is None
        await self._wait(self._heart.kill)

    async def _wait(self, ask: Callable[[Path], int | None]) -> None:
        while self._status is None:
            self._status = await asyncio.to_thread(ask, self._log)
            await asyncio.sleep(0.0 if self._status is not None else _LOOK_SECONDS)
