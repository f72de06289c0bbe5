"""What the client does where there is no service, another server, or an archive that is not an adapter."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import inspect
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import motet
from motet.client import adapters, connection
from motet.core.errors import ConfigError, DataError, ServiceError
from motet.core.types import ADAPTER_FILES
from tests.support.adapter_files import link, tarred
from tests.support.commands import NOBODY, Motet
from tests.support.service_run import Json
from tests.support.waiting import PATIENCE


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(each).parameters) for name, each in found if not name.startswith("_")}

    assert methods(motet.Client) == methods(motet.AsyncClient)
    assert str(inspect.signature(motet.Client.job)) == "(self, job: 'str') -> 'Job'"
    assert str(inspect.signature(motet.Client.jobs)).endswith("-> 'Generator[Job, None]'")
    assert str(motet.Client.pause.__doc__).startswith("Let a job finish its step")


def test_a_client_that_nobody_closes_does_not_keep_python_from_ending() -> None:
    work = "import motet; c = motet.Client('http://127.0.0.1:1'); s = c.events('x', follow=True); e = c.jobs()\n"
    work += "try: next(e)\nexcept motet.MotetError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert (done.stdout[:15], done.stderr) == ("nothing answers", "")


def test_a_stream_that_is_left_is_closed_and_the_client_goes_on() -> None:
    """By leaving the loop, and by Ctrl-C while the next line is waited for."""
    with _events_and_silence() as url, motet.Client(url) as client:
        for event in client.events("x", follow=True):
            assert event.id == 1
            break
        stream = client.events("x", follow=True)
        assert next(stream).id == 1
        main = threading.main_thread().ident  # where a terminal's Ctrl-C arrives
        assert main is not None

        def interrupted() -> None:
            """Also if Ctrl-C comes before it waits: outside it would end all tests of this process."""
            threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
            next(stream)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert next(client.events("x", follow=True)).id == 1


@contextlib.contextmanager
def _events_and_silence(port: int = 0) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            event = {"id": 1, "job": "x", "time": 0.0, "kind": "state", "data": {"state": "running"}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            ended.wait(PATIENCE)

        def log_message(self, *_: Any) -> None:
            pass

    ended = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            ended.set()
            server.shutdown()


def test_following_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with motet.Client("http://127.0.0.1:1") as client, pytest.raises(ServiceError, match="nothing answers at"):
        next(client.events("any", follow=True))
    following = connection.Following("any", 0)
    lost = ServiceError("lost")
    following.read(": still here")
    waits = [following.wait(lost) for _ in range(6)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(ServiceError, match="lost"):
        following.wait(lost)


@pytest.mark.parametrize("given", [float("nan"), float("inf"), {1, 2}, "\ud800"])
def test_what_json_cannot_hold_is_told_before_it_is_sent(given: Any) -> None:
    reason = "this cannot be sent to the service: .*; send JSON"
    with motet.Client("http://127.0.0.1:1") as client:
        with pytest.raises(ConfigError, match=reason):
            client.set_limits("ours", {"share": given})
        with pytest.raises(ConfigError, match=reason):
            next(client.chat("base", [], temperature=given))


class _Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<h1>hello</h1>"
        self.send_response(404 if "jobs" in self.path else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _CutOff(http.server.BaseHTTPRequestHandler):
    """What a proxy passes on of a stream that broke: some pieces, and a proper end."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = b'data: {"choices": [{"index": 0, "delta": {"content": "he"}}]}\n\n'
        body += b"data: [DONE]\n\n" if asked["model"] == "whole" else b""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_an_answer_without_its_end_is_not_whole() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _CutOff) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with motet.Client(f"http://127.0.0.1:{server.server_port}") as client:
                assert list(client.chat("whole", [])) == ["he"]
                pieces = client.chat("cut", [])
                assert next(pieces) == "he"
                with pytest.raises(ServiceError, match="the answer broke off; try again"):
                    next(pieces)
        finally:
            server.shutdown()
            thread.join()


def test_no_service_there(monkeypatch: pytest.MonkeyPatch, says: Motet) -> None:
    monkeypatch.setenv("MOTET_URL", "http://127.0.0.1:1")
    code, _, err = says("ls")
    assert code == 2
    assert "nothing answers at http://127.0.0.1:1 " in err
    assert "start a service with `motet serve --base small --no-keys`, or set MOTET_URL" in err
    with pytest.raises(ServiceError) as gone, motet.Client() as client:
        client.models()
    assert gone.value.status == 0
    for url, reason in {
        "127.0.0.1:8420": "must begin with http:// or https://",
        "ftp://there": "must begin with http:// or https://",
        "http://": "it names no host",
        "http://[::1:8420": "Invalid IPv6 URL",
        "http://host:842O": "could not be cast",
        "http://host:80000": "out of range",
        "http://a host": "it has a blank",
    }.items():
        with pytest.raises(ConfigError, match=f"a service cannot be asked: .*{reason}"):
            motet.Client(url)
    with pytest.raises(ConfigError, match="not an API key"):
        motet.Client(key="schlüssel")
    monkeypatch.setenv("MOTET_URL", "")
    with motet.Client() as client:
        assert client.url == "http://127.0.0.1:8420"


def test_another_server_there() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with motet.Client(f"http://127.0.0.1:{server.server_port}/") as client:
                with pytest.raises(ServiceError, match=r"/v1/jobs/x answered 404: <h1>hello"):
                    client.job("x")
                with pytest.raises(ServiceError, match="does not answer as `motet serve` does"):
                    client.models()
        finally:
            server.shutdown()
            thread.join()


class _Restarted(http.server.BaseHTTPRequestHandler):
    """A service that is killed while an agent has its first episode: it is away, and then offers another."""

    asked: list[tuple[str, Any]]
    JOB: Json = {
        "id": "job-1", "name": "own", "tenant": "us", "state": "running", "message": "", "step": 0, "steps": 1, "created": 0.0,
        "ended": None, "spec": {"environment": {"name": "agent", "args": {}}},
    }  # fmt: skip

    def do_GET(self) -> None:
        self._answer(200, self.JOB)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path.rpartition("/")[2], body))
        if self.path.endswith("results"):
            self._answer(200, {"counted": [one["id"] for one in body["results"]], "known": [], "unknown": []})
            return
        leases = sum(name == "lease" for name, _ in self.asked)
        if leases in (2, 3):
            self._answer(503, {"error": {"message": "it is starting"}})
            return
        handed_in = any(name == "results" for name, _ in self.asked)
        offered = ["former"] if leases == 1 else ["next"] if body["most"] and not handed_in else []
        episodes = [
            {"id": name, "path": "/e", "key": "ek", "problem": {"id": 1, "messages": [], "answer": name, "metadata": {}},
             "args": {}, "seed": 1, "seconds": 60.0, "handed_out": 1}
            for name in offered
        ]  # fmt: skip
        self._answer(
            200,
            {"units": episodes, "held": offered, "seconds": 0.3, "state": "succeeded" if handed_in else "running"},
        )

    def do_DELETE(self) -> None:
        self._answer(200, {})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_an_agent_worker_waits_for_its_service_and_gives_up_what_went_with_it(tmp_path: Path) -> None:
    """The agent of the former episode hangs; its place is free for the next one at once."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import asyncio\nasync def run(problem):\n"
        "    await asyncio.sleep(3600 if problem.answer == 'former' else 0)\n    return 1.0\n"
    )
    asked: list[tuple[str, Any]] = []
    handler = type("Handler", (_Restarted,), {"asked": asked})

    async def work(url: str) -> None:
        async with asyncio.timeout(PATIENCE), motet.AsyncClient(url) as client:
            await client.run_agent("own", agent=f"{agent}:run", concurrency=1)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            asyncio.run(work(f"http://127.0.0.1:{server.server_port}"))
        finally:
            server.shutdown()
            thread.join()
    results = [one for name, body in asked if name == "results" for one in body["results"]]
    assert [(one["id"], one["reward"]) for one in results] == [("next", 1.0)]


GOOD = [(f"sort-v3/{name}", b"x" * 100) for name in ADAPTER_FILES]
BAD: dict[str, bytes] = {
    "upwards": tarred([*GOOD, ("../../evil", b"x")]),
    "from the root": tarred([*GOOD, ("/tmp/evil", b"x")]),
    "one file more": tarred([*GOOD, ("sort-v3/evil.py", b"x")]),
    "a directory below": tarred([*GOOD, ("sort-v3/a/adapter_config.json", b"x")]),
    "two directories": tarred([GOOD[0], ("sort-v4/adapter_model.safetensors", b"x")]),
    "a hidden way up": tarred((f"../{name}", b"x") for name in ADAPTER_FILES),
    "twice the same": tarred([*GOOD, GOOD[0]]),
    "a link": tarred([GOOD[0]], link(GOOD[1][0], "/etc/passwd")),
    "one missing": tarred([GOOD[0]]),
    "nothing": tarred([]),
    "cut off": tarred(GOOD)[:60],
    "not an archive": b"hello",
}


@pytest.mark.parametrize("fault", BAD)
def test_an_archive_that_is_not_an_adapter_is_refused(fault: str, tmp_path: Path) -> None:
    home = tmp_path / "a" / "b" / "home"
    with pytest.raises(ServiceError, match=r"the download is not|sent an archive"):
        adapters.unpack(BAD[fault], home)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_an_adapter_is_unpacked(tmp_path: Path) -> None:
    found = adapters.unpack(tarred(GOOD), tmp_path / "home")
    assert found == tmp_path / "home" / "sort-v3"
    assert sorted(item.name for item in found.iterdir()) == sorted(ADAPTER_FILES)


def test_the_directory_of_nobody_is_one_as_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        motet.Client("http://127.0.0.1:1") as client,
        pytest.raises(DataError, match=f"{NOBODY} has no "),
    ):
        client.push(NOBODY, "mine")
    assert (adapters.unpack(tarred(GOOD), NOBODY) / ADAPTER_FILES[0]).is_file()


def test_following_waits_for_a_service_that_goes_away_before_the_first_line() -> None:
    """As `motet score` and `motet agent` do, which have asked it before."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        threading.Thread(target=server.serve_forever).start()
        client = motet.Client(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ServiceError):
            client.job("x")
        server.shutdown()
    with client, ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: next(client.events("x", follow=True)).id)
        with _events_and_silence(server.server_port):
            assert following.result(PATIENCE) == 1


def test_an_error_without_words_is_told_by_its_kind() -> None:
    with pytest.raises(ServiceError, match=r"broke off \(ReadError\)"), connection._transport_errors("http://here"):
        raise httpx2.ReadError("")
