"""Logs requests: `access.log` for all, `audit.log` for refusals, `admin.log` for reads by admins; measures latency."""

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
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ID_HEADERS = ("x-request-id", "request-id")
"""Headers in which the stock clients of OpenAI and of Anthropic read the id of a request."""
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
"""Valid request ids from a client or a proxy."""
_FILE_BYTES, _FILES = 32 * 2**20, 8
"""Size and number of files per log; the oldest is deleted."""
_LONGEST = 300
"""Characters of a path or a reason in a line."""
_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REFUSED = (401, 403, 413, 429)
"""Status codes of refusals."""
_SCOPE = "motet.request"


@dataclass
class Asked:
    """A request's record, filled in during its handling."""

    id: str
    key: str = ""
    """The id of the key; empty without a valid one."""
    tenant: str = ""
    tenant_id: str = ""
    """Also in a service without keys."""
    admin: bool = False
    reason: str = ""
    """Reason of a refusal."""
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    sent: int = 0
    """Bytes of the response body."""
    written: bool = False


def asked_of(scope: Mapping[str, Any]) -> Asked:
    """The record of a request; a discarded one if the request bypassed `RequestLog`."""
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


class _Lines(RotatingFileHandler):
    """A rotating file of JSON lines. A full disk loses lines, and delays nobody."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=_FILES - 1, encoding="utf-8", delay=True)

    def write(self, line: Mapping[str, Any]) -> None:
        self.handle(logging.makeLogRecord({"msg": json.dumps(line, separators=(",", ":"))}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line."""


class RequestFiles:
    """`access.log`, `audit.log` and `admin.log` of a directory."""

    def __init__(self, directory: Path) -> None:
        self.access, self.audit = _Lines(directory / "access.log"), _Lines(directory / "audit.log")
        self.reads = _Lines(directory / "admin.log")  # separate, because strangers can fill the other two

    def close(self) -> None:
        """Close the files."""
        self.access.close()
        self.audit.close()
        self.reads.close()


class RequestLog:
    """The outermost ASGI middleware: it sees each response as the client does."""

    def __init__(self, app: ASGIApp, files: RequestFiles, metrics: RequestMetrics) -> None:
        self._app, self._files, self._metrics = app, files, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, and log it when the response ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        asked = scope[_SCOPE] = Asked(given if _ID.fullmatch(given) else secrets.token_hex(8))

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                asked.status = message["status"]
                message.setdefault("headers", [])
                MutableHeaders(scope=message).update(dict.fromkeys(ID_HEADERS, asked.id))
            else:
                asked.sent += len(message.get("body", b""))
                if not message.get("more_body"):  # log first, so that a client with the response finds the line
                    self._write(scope, asked)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:  # answered outside all middleware
            asked.status = asked.status or 500
            raise
        finally:
            self._write(scope, asked)

    def _write(self, scope: Scope, asked: Asked) -> None:
        """Log once per request. Status 499: the client left before the response."""
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
    """The method, or `other` for unknown ones, so that strangers cannot create labels."""
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"
