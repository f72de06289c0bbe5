"""Connections to a server that goes: none stays open, whatever the client was doing when it was told."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest
import uvicorn
from starlette.applications import Starlette

from motet.config.dialects import HttpRequest
from motet.environments.agent_runner import Gateway
from motet.rewards.scoring_server import ScoringServer
from motet.rollout.connection import Clocks, ServerConnection

IDLE = 30


class Server:
    """Answers once it is let, keeps connections open, and closes them all at once."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self.may_answer = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        while await reader.read(65536):
            await self.may_answer.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    def hang_up(self) -> None:
        for writer in self.connections:
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self.may_answer.set()
        self.hang_up()
        self._server.close()
        await self._server.wait_closed()

    def open(self) -> int:
        """Connections to it that this process has."""
        return sum(bool(one.raddr) and one.raddr.port == self.port for one in psutil.Process().net_connections("tcp"))


@pytest.mark.parametrize("moment", range(0, 32, 3))
def test_a_server_that_goes_leaves_no_connection_open(moment: int) -> None:
    """The client closes what the server has left, one after another, when it makes the next request; that takes many turns."""

    async def test() -> None:
        server = Server()
        await server.start()
        connection = ServerConnection(f"http://127.0.0.1:{server.port}", Clocks())
        asking = [asyncio.create_task(connection.request(HttpRequest("/x"), 30)) for _ in range(IDLE)]
        while len(server.connections) < IDLE:
            await asyncio.sleep(0.001)
        server.may_answer.set()
        await asyncio.gather(*asking)
        assert server.open() >= IDLE
        server.may_answer.clear()
        server.hang_up()
        await asyncio.sleep(0.05)
        last = asyncio.create_task(connection.request(HttpRequest("/x"), 30))
        for _ in range(moment):
            await asyncio.sleep(0)
        connection.leave("gone")
        await asyncio.sleep(0.1)
        if not last.done():  # it had not begun to wait
            server.may_answer.set()
        await asyncio.wait([last])
        await connection.close()
        await server.close()
        await asyncio.sleep(0.05)
        assert server.open() == 0

    asyncio.run(test())


def test_idle_connections_are_closed_by_clients_before_a_server_does_it() -> None:
    """A server that closes first closes under the request that its client sends just then, and looks gone."""

    async def test() -> None:
        teacher, gateway = ScoringServer("http://127.0.0.1:1", "model"), Gateway()
        await teacher.open()
        gateway.open()
        try:
            assert teacher._client is not None
            assert gateway._server is not None
            clients: list[Any] = [ServerConnection("http://127.0.0.1:1", Clocks())._open(), teacher._client]
            servers = uvicorn.Config(Starlette()).timeout_keep_alive  # vLLM has the same
            assert all(0 < one._transport._pool._keepalive_expiry < servers for one in clients)
            assert gateway._server.config.timeout_keep_alive > (httpx2.Limits().keepalive_expiry or math.inf)
        finally:
            await gateway.close()
            await teacher.close()

    asyncio.run(test())
