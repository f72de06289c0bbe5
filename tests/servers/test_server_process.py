"""Servers that are started here: they come back when they die, end with their children, and nothing else is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from motet.core.errors import EngineError
from motet.process import child
from motet.rollout import server_process
from motet.rollout.server import ServerEngine
from motet.rollout.server_process import ServerProcess, free_port
from tests.support.protocol_server import ProtocolServer
from tests.support.server_run import CLOCKS, collect, drive, engine_on, in_process, request
from tests.support.waiting import PATIENCE, until

SERVER = """
import http.server, os, subprocess, sys, threading, time
port, pids = int(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(pids, "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
if "deaf" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ["WORD"].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Started:
    """A server of this test: its process, and what it wrote down about itself."""

    def __init__(self, path: Path, *more: str) -> None:
        self.port, self.pids, self.log = free_port(), path / "pids", path / "server.log"
        self.command = [sys.executable, "-c", SERVER, str(self.port), str(self.pids), *more]
        self.process = ServerProcess(self.command, {**os.environ, "WORD": "hello"}, self.log)

    def family(self) -> list[int]:
        """The server's newest process and its child."""
        return [int(pid) for pid in self.pids.read_text().splitlines()[-1].split()]

    def answer(self) -> str:
        """Wait until it answers."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}", timeout=PATIENCE) as found:
                    return str(found.read().decode())
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    server = Started(tmp_path)
    yield server
    server.process.close()


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(lives, pids)):
        time.sleep(0.02)
    return not any(map(lives, pids))


def ended(process: ServerProcess, seconds: float = PATIENCE) -> bool:
    """Whether the guard ends soon: a process whose threads are ending has ended for some and not for others."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.alive:
        time.sleep(0.01)
    return not process.alive


def ended_after(seconds: float, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers this long between SIGTERM and SIGKILL."""
    guard = Path(child.__file__).with_name("guard.py").read_text()
    assert "END_SECONDS = 10.0" in guard
    (directory / "guard.py").write_text(guard.replace("END_SECONDS = 10.0", f"END_SECONDS = {seconds}"))
    monkeypatch.setattr(child, "__file__", str(directory / "child.py"))
    monkeypatch.setattr(server_process, "_END_SECONDS", seconds)


def test_a_server_starts_and_ends_with_its_children(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when it is asked to: nobody waits for the time after which it would be killed."""
    ended_after(2 * PATIENCE, tmp_path, monkeypatch)
    process = started.process
    assert not process.alive
    process.start()
    assert started.answer() == "hello"
    assert (process.alive, process.starts, process.hopeless) == (True, 1, False)
    family = started.family()
    assert all(map(lives, family))
    begun = time.monotonic()
    process.close()
    assert time.monotonic() - begun < PATIENCE
    assert not process.alive
    assert gone([*family, process.pid])
    process.close()


def test_one_that_was_killed_is_started_again(started: Started) -> None:
    process = started.process
    process.start()
    started.answer()
    first = started.family()
    os.kill(first[0], signal.SIGKILL)
    assert gone(first)  # what it left behind too
    assert ended(process)
    assert process.ending.startswith("was killed with SIGKILL, which Motet did not send")
    process.start()
    assert started.answer() == "hello"
    assert started.family() != first
    assert (process.alive, process.starts, process.hopeless) == (True, 2, False)


def test_a_guard_that_was_killed_takes_its_server_along(started: Started) -> None:
    process = started.process
    process.start()
    started.answer()
    family = started.family()
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process)
    assert gone(family)


def test_a_server_that_will_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_after(0.2, tmp_path, monkeypatch)
    server = Started(tmp_path, "deaf")
    server.process.start()
    server.answer()
    family = server.family()
    begun = time.monotonic()
    server.process.close()
    assert time.monotonic() - begun >= 0.2
    assert gone(family)


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Also with SIGKILL, which leaves no time to say so."""
    server = Started(tmp_path)
    program = (
        "import os, sys, time; from pathlib import Path; from motet.rollout.server_process import ServerProcess\n"
        f"process = ServerProcess({server.command!r}, {{**os.environ, 'WORD': 'hello'}}, Path({str(server.log)!r}))\n"
        "process.start(); print('started', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"started\n"
            assert server.answer() == "hello"
            family = server.family()
        finally:
            parent.kill()
    assert gone(family)


def test_a_command_that_fails_at_once_is_given_up_with_its_reason(tmp_path: Path) -> None:
    code = "import sys; print('ValueError: no such model'); print('bye'); sys.exit(3)"
    process = ServerProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    for _ in range(3):
        assert not process.hopeless
        process.start()
        assert ended(process)
    with pytest.raises(EngineError, match=r"exit status 3;.*no such model;.*/log"):
        process.start()
    assert process.hopeless
    assert process.starts == 3
    process.close()


def test_the_reason_of_an_end_takes_no_memory_for_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(2**26)
        file.write(b"\nError: no memory\nbye\n")
    process = ServerProcess(["true"], dict(os.environ), log)
    tracemalloc.start()
    try:
        assert "Error: no memory" in process.ending
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_server_that_answered_before_it_died_is_not_hopeless(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path / "log")
    for _ in range(5):
        process.start()
        process.answered = True
        assert ended(process)
    process.close()
    assert process.starts == 5


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    process = ServerProcess([str(tmp_path / "python")], dict(os.environ), tmp_path / "log")
    process.start()
    assert ended(process)
    assert "Error: " in process.ending
    assert "/python cannot be run: No such file or directory" in process.ending
    process.close()
    with pytest.raises(EngineError, match=r"\(log:.*/none/log\):.*No such file"):
        ServerProcess(["true"], {}, tmp_path / "none" / "log").start()


def test_nothing_is_ended_twice(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its own group is gone, the number may be somebody else's."""
    groups: list[int] = []
    real = os.killpg

    def record(group: int, number: int) -> None:
        groups.append(group)
        real(group, number)

    monkeypatch.setattr(os, "killpg", record)
    process = started.process
    process.start()
    started.answer()
    first = process.pid
    os.kill(started.family()[0], signal.SIGKILL)
    for _ in range(3):
        assert ended(process)
    process.start()
    started.answer()
    assert groups == [first]
    process.close()
    process.close()
    assert groups == [first, process.pid]


def test_two_servers_do_not_meet(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = []
        for name in "ab":
            (tmp_path / name).mkdir()
            server = Started(tmp_path / name)
            stack.callback(server.process.close)
            server.process.start()
            server.answer()
            servers.append(server)
        servers[0].process.close()
        assert gone(servers[0].family(), 0.5)
        assert servers[1].answer() == "hello"
        assert all(map(lives, servers[1].family()))


# --- under an engine --------------------------------------------------------------------------------------------------------


def test_an_engine_starts_its_server_again(tmp_path: Path) -> None:
    """The process is a stand-in: when it dies, the engine does without the replica until it has started another."""

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        assert process.starts == 1
        first = process.pid
        assert await collect(engine, request()) == await in_process(request())
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.starts == 2)
        assert await collect(engine, request()) == await in_process(request())
        assert process.alive

    code = "import time; time.sleep(600)"
    process = ServerProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path, processes={server.url: process}), test)
    assert not process.alive


def test_an_engine_starts_a_server_again_that_hangs(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        first = process.pid
        server.stop()
        engine.fleet.doubt(engine.fleet.replicas[0])
        await until(lambda: process.starts == 2)
        assert not psutil.pid_exists(first)
        server.start()
        assert await collect(engine, request()) == await in_process(request())
        assert process.starts == 2

    code = "import time; time.sleep(600)"
    process = ServerProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    with ProtocolServer() as server:
        clocks = replace(CLOCKS, health=0.2, hangs=0.5)
        drive(engine_on([server], tmp_path, processes={server.url: process}, clocks=clocks), test)
    assert not process.alive


def test_an_engine_gives_up_a_server_that_cannot_start(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        told = r"no server can be used: http://127.0.0.1:\d+: ended with exit status 1; .*RuntimeError: out of memory"
        with pytest.raises(EngineError, match=told):
            await engine.ready()

    code = "raise RuntimeError('out of memory')"
    process = ServerProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    with ProtocolServer() as server:
        server.stop()
        engine = engine_on(
            [server], tmp_path, processes={server.url: process}, wait_seconds=2 * PATIENCE, clocks=replace(CLOCKS)
        )
        drive(engine, test)
    assert process.starts == 3


def test_a_server_is_not_asked_before_it_listens(tmp_path: Path) -> None:
    """A process that runs is not yet a server that answers."""

    async def test(engine: ServerEngine) -> None:
        waiting = asyncio.ensure_future(collect(engine, request()))
        while engine.loads()[0].note == "not asked yet":
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert process.alive
        assert not waiting.done()
        assert engine.loads()[0].note == "starting"
        server.start()
        assert await waiting == await in_process(request())
        assert process.starts == 1

    code = "import time; time.sleep(600)"
    process = ServerProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    with ProtocolServer() as server:
        server.stop()
        drive(engine_on([server], tmp_path, processes={server.url: process}), test)
