"""A judge: a real HTTP server that speaks OpenAI's chat completions, with a function for a mind.

with judging(lambda question: '{"result": 0.5}') as judge:
    ...  # judge.url
    assert len(judge.questions) == 1
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import PATIENCE

Mind = Callable[[str], str]


class JudgeServer(ThreadingHTTPServer):
    """`fails` is how many requests are answered with 429 first; `odd` is answered in place of a completion."""

    daemon_threads = True

    def __init__(self, mind: Mind) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mind, self.fails, self.odd = mind, 0, b""
        self.questions: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        judge = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            judge.open += 1
            judge.most_open = max(judge.most_open, judge.open)
            judge.keys.append(self.headers.get("Authorization", ""))
            if fails := judge.fails:
                judge.fails -= 1
            else:
                judge.questions.append(asked)
        try:
            if fails:
                self._say(429, b"{}")
                return
            said = judge.mind(asked["messages"][-1]["content"])
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            answer = {"choices": [{"message": {"role": "assistant", "content": said}}], "usage": usage}
            self._say(200, judge.odd or json.dumps(answer).encode())
        finally:
            with judge.lock:
                judge.open -= 1

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status if self.path == "/v1/chat/completions" else 404)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def judging(mind: Mind) -> Iterator[JudgeServer]:
    """A judge while the block runs."""
    with JudgeServer(mind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(PATIENCE)
