"""Starts the provider of `oidc_provider.py`, and says what a service has to know of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from motet.rollout.server_process import free_port
from motet.service.http.sign_in import SECRET_VARIABLE
from tests.support.oidc_provider import SECRET
from tests.support.processes import ending
from tests.support.service_run import Json
from tests.support.waiting import PATIENCE, wait_until

ROLES = {"ml-admins": "admin", "ml-leads": "tenant-admin", "ml": "member", "ml-readers": "reader"}


class Provider:
    """The process of a provider, and what a service has to know of it."""

    def __init__(self, directory: Path) -> None:
        self.port, self.service_port = free_port(), free_port()
        self.issuer, self.url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.service_port}"
        script = str(Path(__file__).with_name("oidc_provider.py"))
        with (directory / "provider.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, script, str(directory), str(self.port), f"{self.url}/login/callback"],
                stdout=log, stderr=log,
            )  # fmt: skip

    @classmethod
    @contextlib.contextmanager
    def running(cls, directory: Path) -> Iterator[Provider]:
        """A provider, and the secret of its client in the environment, while the block runs."""
        found = cls(directory)
        with ending(found.process), pytest.MonkeyPatch.context() as environment:
            environment.setenv(SECRET_VARIABLE, SECRET)
            wait_until(lambda: found._answers() or found.process.poll() is not None)
            assert found.process.poll() is None, (directory / "provider.log").read_text()
            yield found

    def _answers(self) -> bool:
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{self.issuer}/.well-known/jwks.json", trust_env=False, timeout=PATIENCE).is_success
        return False

    def config(self, **fields: Any) -> Json:
        """The section `oidc` of a service."""
        return {
            "issuer": self.issuer, "client_id": "motet", "tenant_claim": "team", "roles": ROLES,
            "per_minute": 10_000, **fields,
        }  # fmt: skip
