"""A server that a node agent starts: it is started again when it dies or hangs, and ends with the agent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

from motet.commands.node_agent import listen
from motet.core.errors import ConfigError
from motet.rollout.node_agent import NodeServer
from motet.rollout.server_process import free_port
from tests.support.waiting import PATIENCE, until, wait_until

SERVER = """
import http.server, os, pathlib, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if pathlib.Path("hangs").exists():
            time.sleep(60)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *rest): pass
listening = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
with open("pids", "a") as pids:
    pids.write(f"{os.getpid()} ")
listening.serve_forever()
"""


def pids(directory: Path) -> list[int]:
    """Of the servers that were started, in order."""
    file = directory / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def test_a_server_that_dies_or_hangs_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    server = NodeServer(
        [sys.executable, "-c", SERVER, f"{port}"], tmp_path / "log", look_seconds=0.05, hangs_seconds=1.0
    )

    async def test() -> None:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=0.3, trust_env=False) as client:

            async def healthy() -> bool:
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx2.HTTPError:
                    return False

            async with server.running(healthy):
                await until(lambda: not server.failure)
                os.kill(pids(tmp_path)[-1], signal.SIGKILL)
                await until(lambda: "was killed with SIGKILL" in server.failure)
                await until(lambda: not server.failure and len(pids(tmp_path)) == 2)
                (tmp_path / "hangs").touch()
                await until(lambda: server.failure == "it does not answer")
                await until(lambda: not psutil.pid_exists(pids(tmp_path)[1]))
                (tmp_path / "hangs").unlink()
                await until(lambda: not server.failure and len(pids(tmp_path)) == 3)
        assert not psutil.pid_exists(pids(tmp_path)[-1])

    asyncio.run(test())


def test_one_that_cannot_live_is_given_up_with_the_reason(tmp_path: Path) -> None:
    code = "raise SystemExit('error: no such model')"
    server = NodeServer([sys.executable, "-c", code], tmp_path / "log", look_seconds=0.05)

    async def healthy() -> bool:
        return False

    async def test() -> None:
        async with server.running(healthy):
            await until(lambda: "it is given up" in server.failure)
            assert "error: no such model" in server.failure

    asyncio.run(test())


def test_the_command_starts_it_and_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere, which is to start the server, is not found"):
        listen(
            "http://127.0.0.1:1",
            "vllm",
            host="127.0.0.1",
            port=0,
            directory=tmp_path,
            key_env=None,
            command=["nowhere"],
        )
    port, own = free_port(), free_port()
    command = [sys.executable, "-m", "motet", "node-agent", f"http://127.0.0.1:{port}", "--port", f"{own}"]
    served = [*command, "--directory", f"{tmp_path / 'node'}", "--", sys.executable, "-c", SERVER, f"{port}"]
    agent = subprocess.Popen(served, cwd=tmp_path)

    def health() -> int:
        try:
            return httpx2.get(f"http://127.0.0.1:{own}/health", trust_env=False, timeout=PATIENCE).status_code
        except httpx2.HTTPError:
            return 0

    try:
        wait_until(lambda: health() == 200, PATIENCE)
        (pid,) = pids(tmp_path)
    finally:
        agent.terminate()
        agent.wait(PATIENCE)
    wait_until(lambda: not psutil.pid_exists(pid))
    assert (tmp_path / f"motet-node-agent-{own}.log").exists()
