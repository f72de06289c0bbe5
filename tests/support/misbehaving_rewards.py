"""A real HTTP server whose paths misbehave, each in its own way: `POST /good`, `/hang`, `/nan`, …"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Scorer:
    """What the server was asked."""

    port: int = 0
    scheme: str = "http"
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    """(path, headers, body) of each request."""
    closing: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The address of a way to misbehave."""
        return f"{self.scheme}://{host}:{self.port}/{path}"

    def count(self, path: str) -> int:
        """How often a path was asked."""
        return sum(one[0] == f"/{path}" for one in self.asked)


def lengths(body: Any) -> list[float]:
    """What `good` gives: (length mod 7) / 7, times `scale`."""
    return [body["args"].get("scale", 1.0) * (len(text) % 7) / 7 for text in body["completions"]]


def _bodies(n: int) -> dict[str, str]:
    """Answers of status 200 that are no good, by path."""
    return {
        "few": json.dumps({"scores": [0.5] * (n - 1)}),
        "many": json.dumps({"scores": [0.5] * (n + 1)}),
        "bare": json.dumps([0.5] * n),
        "text": json.dumps({"scores": ["0.5"] * n}),
        "none": json.dumps({"scores": [None] * n}),
        "first": json.dumps({"scores": [0.5] * (n - 1) + ["bad"]}),
        "nan": json.dumps({"scores": [float("nan")] * n}),
        "infinite": json.dumps({"scores": [float("-inf")] * n}),
        "huge": '{"scores": [' + ", ".join(["1" + "0" * 400] * n) + "]}",
        "html": "<html>hello</html>",
        "deep": "[" * 100_000,
        "empty": "",
        "bools": json.dumps({"scores": [True] * n}),
        "object": json.dumps({"scores": {"0": 1.0}}),
    }


class _Handler(BaseHTTPRequestHandler):
    scorer: Scorer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Nobody should come here: a redirect was followed."""
        self.scorer.asked.append(("GET " + self.path, {}, None))
        self._answer(200, json.dumps({"scores": [1.0] * 4}))

    def do_POST(self) -> None:
        """Misbehave as the path says."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.scorer.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        name, n = self.path.strip("/"), len(body["completions"])
        with contextlib.suppress(OSError):
            if name in (bodies := _bodies(n)):
                self._answer(200, bodies[name])
            else:
                _WAYS.get(name, _good)(self, body)

    def _answer(self, status: int, text: str, **headers: str) -> None:
        data = text.encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def _good(handler: _Handler, body: Any) -> None:
    handler._answer(200, json.dumps({"scores": lengths(body)}))


def conversed(transcript: Any) -> float:
    """What `conversed` gives: by all that was said."""
    return sum(len(one["content"]) for one in transcript) % 7 / 5


def _conversed(handler: _Handler, body: Any) -> None:
    handler._answer(200, json.dumps({"scores": list(map(conversed, body["transcripts"]))}))


def _hang(handler: _Handler, body: Any) -> None:
    handler.scorer.closing.wait(60)


def _slow(handler: _Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.scorer.closing.wait(0.1):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def _gigabyte(handler: _Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(2**30))
    handler.end_headers()
    for _ in range(2**10):
        handler.wfile.write(b" " * 2**20)


def _error(handler: _Handler, body: Any) -> None:
    handler._answer(500, "broken")


def _at_last(handler: _Handler, body: Any) -> None:
    if handler.scorer.count("at_last") % 3:
        handler._answer(503, "not yet")
    else:
        _good(handler, body)


def _missing(handler: _Handler, body: Any) -> None:
    handler._answer(404, "no such task")


def _elsewhere(handler: _Handler, body: Any) -> None:
    handler._answer(302, "", Location=handler.scorer.url("good"))


def _gzip(handler: _Handler, body: Any) -> None:
    handler._answer(200, "x", **{"Content-Encoding": "gzip"})


def _cut(handler: _Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [')
    handler.close_connection = True


def _reset(handler: _Handler, body: Any) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def _wait(handler: _Handler, body: Any) -> None:
    time.sleep(0.3)
    _good(handler, body)


_WAYS: dict[str, Callable[[_Handler, Any], None]] = {
    "hang": _hang, "slow": _slow, "gigabyte": _gigabyte, "error": _error, "at_last": _at_last, "missing": _missing,
    "redirect": _elsewhere, "gzip": _gzip, "cut": _cut, "reset": _reset, "wait": _wait, "conversed": _conversed,
}  # fmt: skip


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Whoever hangs up in the middle is expected."""


@contextlib.contextmanager
def misbehaving(context: ssl.SSLContext | None = None) -> Iterator[Scorer]:
    """The server, while the block runs."""
    scorer = Scorer(scheme="http" if context is None else "https")
    server = _Threads(("127.0.0.1", 0), type("Handler", (_Handler,), {"scorer": scorer}))
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scorer.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield scorer
    finally:
        scorer.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
