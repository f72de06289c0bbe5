"""Serves versions over HTTP, so that the workers of a server load them into memory without reading adapter files."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import socket
import tarfile
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from motet.core.errors import ConfigError
from motet.core.types import ADAPTER_FILES
from motet.rollout.in_vllm.motet_vllm import PREFIX

_SECONDS = 15.0
"""Socket timeout: a worker that stops reading is disconnected."""
_PIECE = 2**20
"""Bytes that a worker must read within the timeout."""
MOST_OPEN = 128
"""Open connections, each of which has a thread; further ones are closed at once."""


class VersionServer:
    """Serves the versions in a directory, from its own port and thread; starts at the first call of `location`."""

    def __init__(
        self, directory: Path, servers: Collection[str], keys: Collection[str], seconds: float = _SECONDS
    ) -> None:
        """It does not listen yet. `directory` contains the versions by name.

        `servers` are URLs of those whose workers fetch; if all are local, it listens on localhost only. A request must
        present one of their `keys`. `seconds` is the timeout of sockets.

        Raises:
            ConfigError: a server is remote and there is no key, so anyone on the network could fetch.
        """
        self._directory, self._keys, self._seconds = directory, [key.encode() for key in keys], seconds
        self._host = "127.0.0.1" if all(map(_is_here, servers)) else ""
        if not self._host and not keys:
            raise ConfigError(
                "with rollout.publish_by=tensors, servers on other hosts fetch versions over the network, which needs a key: "
                "start them with a key in VLLM_API_KEY, and name the variable that holds it here in rollout.api_key_env"
            )
        self._starting, self._packing = Lock(), Lock()
        self._http: ThreadingHTTPServer | None = None

    def location(self, name: str, server: str) -> str:
        """The location (see `motet_vllm.fetch`) that replaces a version's path; packs the version, which takes time."""
        with self._packing:
            _, digest = packed(str(self._directory / name))
        with self._starting:
            if self._http is None:
                self._http = _Server((self._host, 0), functools.partial(_Handler, self._answer, self._seconds))
                Thread(target=self._http.serve_forever, args=(0.05,), name="version server", daemon=True).start()
        host = self._host or _address_towards(server)
        return f"{PREFIX}http://{host}:{self._http.server_port}/versions/{name}#{digest}"

    def close(self) -> None:
        """Stop listening."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def _answer(self, path: str, key: str) -> tuple[int, bytes]:
        """A status, and the bytes of a version or an error message."""
        if self._keys and not any(hmac.compare_digest(key.encode(), known) for known in self._keys):
            return 401, b"the key is that of no server of this run"
        folder, _, name = path.removeprefix("/").partition("/")
        try:
            names = [version.name for version in self._directory.iterdir() if not version.name.startswith(".")]
            if folder == "versions" and name in names:
                with self._packing:
                    return 200, packed(str(self._directory / name))[0]
        except OSError:  # deleted meanwhile
            pass
        return 404, b"there is no such version, or nobody may ask for it any more"


@functools.lru_cache(maxsize=1)
def packed(directory: str) -> tuple[bytes, str]:
    """The files of a version as a tar archive, and its SHA-256. Cached for all servers, because a path is never reused."""
    parts = []
    for name in ADAPTER_FILES:
        member, content = tarfile.TarInfo(name), (Path(directory) / name).read_bytes()
        member.size = len(content)
        parts += [member.tobuf(), content, bytes(-len(content) % tarfile.BLOCKSIZE)]
    archive = b"".join((*parts, bytes(2 * tarfile.BLOCKSIZE)))  # one copy; TarFile would make three
    return archive, hashlib.sha256(archive).hexdigest()


class _Server(ThreadingHTTPServer):
    request_queue_size = MOST_OPEN

    def __init__(self, *settings: Any) -> None:
        self._room = BoundedSemaphore(MOST_OPEN)
        super().__init__(*settings)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: the worker retries, or logs the failure itself."""


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, answer: Callable[[str, str], tuple[int, bytes]], seconds: float, *of_server: object) -> None:
        self._answer = answer
        self.timeout = seconds  # type: ignore[misc]  # of the socket
        super().__init__(*of_server)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        status, content = self._answer(self.path, self.headers.get("Authorization", "").removeprefix("Bearer "))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for start in range(0, len(content), _PIECE):  # the timeout is for the whole of each write
            self.wfile.write(memoryview(content)[start : start + _PIECE])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: servers log their own fetches."""


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_towards(url: str) -> str:
    """This machine's address in the direction of a server; sends no packet."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname, parts.port or 80))
        return str(way.getsockname()[0])
