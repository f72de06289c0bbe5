"""A node agent as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from motet.config.dialects import DIALECTS
from motet.rollout.node_agent import NodeAgent
from tests.support.waiting import PATIENCE, until


@contextlib.contextmanager
def node_agent(server: str, directory: Path, key: str | None = None, dialect: str = "vllm") -> Iterator[str]:
    """An agent beside a server, with a directory of its own; its URL."""
    with answering(NodeAgent(server, DIALECTS[dialect], directory, key).app()) as url:
        yield url


@contextlib.contextmanager
def answering(app: Starlette) -> Iterator[str]:
    """Something that answers, in a thread of its own; its URL."""

    async def serve() -> None:
        config = uvicorn.Config(app, port=0, log_level="warning")
        serving = uvicorn.Server(config)
        task = asyncio.create_task(serving.serve())
        await until(lambda: serving.started)
        found.append(serving.servers[0].sockets[0].getsockname()[1])
        ready.set()
        await asyncio.to_thread(stop.wait)
        serving.should_exit = True
        await task

    ready, stop, found = threading.Event(), threading.Event(), list[int]()
    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="node agent")
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        stop.set()
        thread.join(PATIENCE)
