"""A line of `access.log` for each request, of `audit.log` for refusals, of `admin.log` for admins' reads; their latency."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
"""An id that a client or a proxy may give its request."""
_FILE_BYTES, _FILES = 32 * 2**20, 8
"""Of each log: when a file is full, a new one begins, and the oldest is deleted."""
_LONGEST = 300
"""Characters of a path or a reason in a line."""
_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REFUSED = (401, 403, 413, 429)
"""Statuses of answers that deny something to the asker."""
_SCOPE = "motet.request"


@dataclass
class Asked:
    """One request, filled in while it is answered."""

    id: str
    key: str = ""
    """The id of the key; empty without a good one."""
    tenant: str = ""
    admin: bool = False
    reason: str = ""
    """Why it was refused."""
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    sent: int = 0
    """Bytes of the answer's body."""
    written: bool = False


def asked_of(scope: Mapping[str, Any]) -> Asked:
    """The record of a request; one that is dropped, for a request that came past `RequestLog`."""
    asked: Asked = scope.get(_SCOPE) or Asked("")
    return asked


class RequestMetrics:
    """Latency and refusals of requests, by route."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["method", "route", "status"]
        self._seconds = Histogram(
            "motet_http_seconds",
            "Seconds until a request is answered.",
            labels,
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._refused = Counter(
            "motet_http_refusals", "Requests that were refused.", ["status"], registry=self.registry
        )

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._seconds.labels(method, route, f"{status // 100}xx").observe(seconds)
        if status in REFUSED:
            self._refused.labels(str(status)).inc()


class _Lines:
    """A rotated file of JSON lines. A full disk loses lines, and delays nobody."""

    def __init__(self, path: Path) -> None:
        self._file = _Rotated(path, maxBytes=_FILE_BYTES, backupCount=_FILES - 1, encoding="utf-8", delay=True)

    def close(self) -> None:
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.handle(logging.makeLogRecord({"msg": json.dumps(line, separators=(",", ":"))}))


class _Rotated(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line."""


class RequestFiles:
    """`access.log`, `audit.log` and `admin.log` of a directory."""

    def __init__(self, directory: Path) -> None:
        self.access, self.audit = _Lines(directory / "access.log"), _Lines(directory / "audit.log")
        self.reads = _Lines(directory / "admin.log")  # apart: strangers fill the other two

    def close(self) -> None:
        """Close the files."""
        self.access.close()
        self.audit.close()
        self.reads.close()


class RequestLog:
    """ASGI middleware, outermost: it sees each answer as the client does."""

    def __init__(self, app: ASGIApp, files: RequestFiles, metrics: RequestMetrics) -> None:
        self._app, self._files, self._metrics = app, files, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and write it down when the answer has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        asked = scope[_SCOPE] = Asked(given if _ID.fullmatch(given) else secrets.token_hex(8))

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                asked.status = message["status"]
                message.setdefault("headers", [])
                others = [one for one in message["headers"] if one[0] != b"x-request-id"]
                message["headers"] = [*others, (b"x-request-id", asked.id.encode())]
            else:
                asked.sent += len(message.get("body", b""))
                if not message.get("more_body"):  # first the line: whoever has the answer finds it
                    self._write(scope, asked)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:  # answered outside of all middleware
            asked.status = asked.status or 500
            raise
        finally:
            self._write(scope, asked)

    def _write(self, scope: Scope, asked: Asked) -> None:
        """Once per request. Status 499: the client left before it was answered."""
        if asked.written:
            return
        asked.written = True
        seconds = time.perf_counter() - asked.started
        route, status = getattr(scope.get("route"), "path", "unknown"), asked.status or 499
        self._metrics.count(_method(scope), route, status, seconds)
        client = scope.get("client")
        line = {
            "time": round(time.time(), 3), "id": asked.id, "address": client[0] if client else "", "key": asked.key,
            "tenant": asked.tenant, "method": _method(scope), "path": scope["path"][:_LONGEST], "status": status,
            "ms": round(seconds * 1e3, 1), "bytes": asked.sent,
        }  # fmt: skip
        self._files.access.write(line)
        if status in REFUSED:
            self._files.audit.write({**line, "event": "refused", "reason": asked.reason[:_LONGEST]})
        elif asked.admin and scope["method"] in ("GET", "HEAD") and status < 400:
            self._files.reads.write({**line, "event": "admin read"})


def _method(scope: Scope) -> str:
    """A method that HTTP knows, so that a stranger makes no new label."""
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"
