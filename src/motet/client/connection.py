"""Where a service is, how it is reached, and what to do when the connection breaks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2

from motet.client.calls import path_of
from motet.errors import ConfigError, ServiceError
from motet.service.schemas import JobEvent

DEFAULT_URL = "http://127.0.0.1:8420"
"""Where `motet serve` listens unless told otherwise."""
PATIENCE_SECONDS = 600.0
"""How long following a job waits for a service that went away."""
_MOST_RETRIES = 8
_LONGEST_WAIT = 30.0
_TIMEOUT = httpx2.Timeout(120.0, connect=5.0)
_QUIET = httpx2.Timeout(45.0, connect=5.0)  # a stream says every fifteen seconds that it is there
AWAY = (0, 502, 503, 504)
"""Statuses of a service that restarts, its proxy included."""


@contextlib.contextmanager
def told(url: str) -> Iterator[None]:
    """Failures of the transport as errors for people."""
    try:
        yield
    except httpx2.ConnectError as error:
        raise ServiceError(
            f"nothing answers at {url} ({error}); start a service with `motet serve --base small --no-keys`, or set "
            "MOTET_URL (or --url) to where it runs"
        ) from error
    except (httpx2.TransportError, httpx2.StreamError) as error:
        raise ServiceError(f"the connection to {url} broke off ({error or type(error).__name__}); try again") from error


def to_wait(response: httpx2.Response, attempt: int) -> float | None:
    """Seconds after which a request that came too often is sent again, as the service tells; None where it is not.

    Args:
        response: what it was answered.
        attempt: how often it was sent again already.
    """
    told = response.headers.get("retry-after", "")
    if response.status_code != 429 or attempt >= _MOST_RETRIES or not told.isdecimal():
        return None
    return float(told) if float(told) <= _LONGEST_WAIT else None


class Connection:
    """Where a client's service is, and how it is reached."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        """Nothing is asked yet.

        Args:
            url: of the service; `$MOTET_URL`, or http://127.0.0.1:8420, unless given.
            key: an API key; `$MOTET_API_KEY` unless given. A service with --no-keys needs none.

        Raises:
            ConfigError: this cannot be an address, or not a key.
        """
        self.url = (url or os.environ.get("MOTET_URL") or DEFAULT_URL).rstrip("/")
        key = (key or os.environ.get("MOTET_API_KEY") or "").strip()
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ConfigError(f"{self.url!r} is not the address of a service; it looks like {DEFAULT_URL}")
        if not key.isascii() or not key.isprintable():
            raise ConfigError("this is not an API key; one looks like mk-… and has plain letters only")
        self.options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": _TIMEOUT,
            "trust_env": urlsplit(self.url).hostname not in ("127.0.0.1", "localhost", "::1"),  # no proxy to oneself
        }


class Following:
    """Where the following of a job stands."""

    def __init__(self, job: str, after: int) -> None:
        self.after = after
        self._path = f"{path_of(job)}/events/stream"
        self._heard = 0.0
        self._wait = 0.25
        self._refused = 0
        """How often in a row it was asked too often."""

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of the transport's `stream`."""
        return {
            "method": "GET", "url": self._path, "headers": {"Last-Event-ID": str(self.after)}, "timeout": _QUIET,
        }  # fmt: skip

    def read(self, line: str) -> JobEvent | None:
        """The event that a line of the stream holds."""
        self._heard, self._wait, self._refused = time.monotonic(), 0.25, 0
        if not line.startswith("data:"):
            return None
        event = JobEvent.model_validate_json(line.removeprefix("data:"))
        self.after = event.id
        return event

    def wait(self, error: ServiceError | None) -> float:
        """Seconds until the next attempt.

        Raises:
            ServiceError: there is no use in one.
        """
        if error is not None and error.status == 429 and self._refused < _MOST_RETRIES:  # too often: later
            self._refused += 1
            return 2.0
        lost = error is not None and error.status in AWAY
        if error is not None and (not lost or not self._heard or time.monotonic() - self._heard > PATIENCE_SECONDS):
            raise error
        self._wait = min(self._wait * 2, 5.0)
        return self._wait
