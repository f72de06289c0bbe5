"""Hosts on other machines: each connects to the service or run, and sends a secret token."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable

from motet.hosts import messages as m
from motet.hosts.host_link import HostChild
from motet.process.channel import LONGEST_LINE, Child

ADDRESS, TOKEN = "MOTET_HOST_PARENT", "MOTET_HOST_TOKEN"
"""Environment variables of a host's process: the address to connect to, and the token."""

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
