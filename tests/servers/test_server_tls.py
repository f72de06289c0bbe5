"""Servers behind https: certificates are checked, against the system's or against `rollout.ca_file`."""

from __future__ import annotations

import asyncio
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from motet.config import RolloutConfig
from motet.config.dialects import DIALECTS
from motet.core.errors import ConfigError, ServerGone
from motet.hosts.servers import trust
from motet.rollout.connection import Clocks
from motet.rollout.replica import Replica


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(tmp_path: Path, authority: trustme.CA) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture
def url(authority: trustme.CA) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def healthy(config: RolloutConfig, url: str) -> None:
    """Ask for a server's health as an engine with this configuration would."""

    async def ask() -> None:
        replica = Replica(url, DIALECTS["vllm"], Clocks(), verify=trust(config))
        try:
            await replica.healthy()
        finally:
            await replica.close()

    asyncio.run(ask())


def config(**fields: object) -> RolloutConfig:
    return RolloutConfig.model_validate({"engine": "vllm", "urls": ["https://127.0.0.1"], **fields})


def test_a_certificate_of_the_given_authority_is_trusted(url: str, certificate: Path) -> None:
    healthy(config(ca_file=str(certificate)), url)


def test_a_certificate_that_nobody_vouches_for_is_refused(url: str) -> None:
    with pytest.raises(ServerGone, match="certificate"):
        healthy(config(), url)


def test_a_file_without_certificates_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"rollout\.ca_file.*empty\.pem cannot be"):
        trust(config(ca_file=str(tmp_path / "empty.pem")))
