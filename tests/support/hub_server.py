"""A hub over HTTP: who am I, is it there, make it, which files how, and the commit of an upload; and files to download.

with HubServer() as hub:
    ...  # a program with HF_ENDPOINT=hub.url and HF_TOKEN=TOKEN
    assert hub.files["README.md"].startswith(b"---")

Weights go the way of large files (git LFS), the rest inside of the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of_a_test"
_OID = "0" * 40


def environment(url: str, directory: Path) -> dict[str, str]:
    """For a process of its own: the library reads these variables as it is imported."""
    home = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(directory / "home")}
    return {**os.environ, **home, "NO_PROXY": "127.0.0.1", "HF_TOKEN": TOKEN}


class HubServer:
    """At 127.0.0.1, with at most one repository."""

    def __init__(self, *, visible: bool | None = None, breaks: str = "") -> None:
        """`visible` is whether the repository that is there is public; None has none. `breaks` is a part of a path.

        Connections to such paths are closed without an answer.
        """
        self.visible, self.breaks = visible, breaks
        self.made: dict[str, Any] = {}
        """What was asked for as a new repository."""
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        """By sha256."""
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                hub.answer(self, "GET")

            def do_HEAD(self) -> None:
                hub.answer(self, "HEAD")

            def do_POST(self) -> None:
                hub.answer(self, "POST")

            def do_PUT(self) -> None:
                hub.answer(self, "PUT")

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
        """Read a request and answer it."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = request.path.partition("?")[0]
        self.asked.append(f"{method} {path}")
        if self.breaks and self.breaks in path:
            request.close_connection = True
            return
        allowed = path.startswith("/large/") or request.headers.get("Authorization") == f"Bearer {TOKEN}"
        status, said = self._answer(path, body) if allowed else (401, {"error": "Invalid credentials"})
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("X-Repo-Commit", _OID)
        request.send_header("ETag", hashlib.sha256(data).hexdigest())
        request.send_header("Content-Length", str(len(data)))
        if status == 404:
            request.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in path else "RepoNotFound")
        request.end_headers()
        if method != "HEAD":
            request.wfile.write(data)

    def _answer(self, path: str, body: bytes) -> tuple[int, Any]:
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                return 200, {"name": "me", "type": "user"}
            case ["api", "models", space, name]:
                known = {"id": f"{space}/{name}", "private": not self.visible, "sha": _OID, "tags": [], "siblings": []}
                return (404, {"error": "Repository not found"}) if self.visible is None else (200, known)
            case [_, _, "resolve", _, file]:
                return (200, self.files[file]) if file in self.files else (404, {"error": "Entry not found"})
            case ["api", "repos", "create"]:
                self.made = json.loads(body)
                return 200, {"url": f"{self.url}/{self.made['organization']}/{self.made['name']}"}
            case ["api", "validate-yaml"]:
                return 200, {"errors": [], "warnings": []}
            case ["api", "models", _, _, "preupload", "main"]:
                files = [file["path"] for file in json.loads(body)["files"]]
                modes = {True: "lfs", False: "regular"}
                told = [
                    {"path": one, "uploadMode": modes[one.endswith(".safetensors")], "shouldIgnore": False}
                    for one in files
                ]
                return 200, {"files": told}
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = [
                    {**one, "actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                return 200, {"objects": objects, "transfer": "basic"}
            case ["large", oid]:
                self.large[oid] = body
                return 200, {}
            case ["api", "models", space, name, "commit", "main"]:
                for line in map(json.loads, body.splitlines()):
                    match line["key"], line["value"]:
                        case "file", file:
                            self.files[file["path"]] = base64.b64decode(file["content"])
                        case "lfsFile", file:
                            self.files[file["path"]] = self.large[file["oid"]]
                return 200, {"commitUrl": f"{self.url}/{space}/{name}/commit/{_OID}", "commitOid": _OID}
        return 400, {"error": f"no such route: {path}"}
