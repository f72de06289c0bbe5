"""A hub over HTTP with one public repository to download from.

with HubServer({"config.json": b"{}"}) as hub:
    ...  # a program with HF_ENDPOINT=hub.url
    assert "HEAD /me/base/resolve/main/config.json" in hub.asked
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_OID = "0" * 40


def environment(url: str, directory: Path) -> dict[str, str]:
    """For a process of its own: the library reads these variables as it is imported."""
    home = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(directory / "home")}
    return {**os.environ, **home, "NO_PROXY": "127.0.0.1"}


class HubServer:
    """At 127.0.0.1."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                hub.answer(self, "GET")

            def do_HEAD(self) -> None:
                hub.answer(self, "HEAD")

        self._files = files
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        """Answer a request."""
        path = request.path.partition("?")[0]
        self.asked.append(f"{method} {path}")
        status, said = self._answer(path)
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("X-Repo-Commit", _OID)
        request.send_header("ETag", hashlib.sha256(data).hexdigest())
        request.send_header("Content-Length", str(len(data)))
        if status == 404:
            request.send_header("X-Error-Code", "EntryNotFound")
        request.end_headers()
        if method != "HEAD":
            request.wfile.write(data)

    def _answer(self, path: str) -> tuple[int, Any]:
        match path.strip("/").split("/"):
            case ["api", "models", space, name]:
                return 200, {"id": f"{space}/{name}", "private": False, "sha": _OID, "tags": [], "siblings": []}
            case [_, _, "resolve", _, file] if file in self._files:
                return 200, self._files[file]
        return 404, {"error": f"there is no {path}"}
