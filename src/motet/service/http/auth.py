"""Authentication of requests: keys, rights, and limits on requests and threads."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from fastapi import Request

from motet.config.service import RateConfig
from motet.process.apart import ThreadTurns
from motet.service.database.store import AWAY
from motet.service.database.tenants import Principal, Tenants
from motet.service.errors import Refusal
from motet.service.http import rights
from motet.service.http.opened import opened_by
from motet.service.request_log import asked_of
from motet.service.workers.agents import KEY_PREFIX

_MOST_KEYS = 10_000
OF_TINKER = "tml-"
"""The `tinker` package only sends keys with this prefix; a Motet key follows it."""


PAGE_HEADER = "x-motet-page"
"""Sent by the dashboard's scripts; pages of other sites cannot send it, so they never use the browser's session."""


def bearer(request: Request) -> str:
    """The key of a request: a bearer, as the `tinker` package sends it, or the dashboard's cookie; may be empty."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key.removeprefix(OF_TINKER)
    return request.cookies.get(request.app.state.session_cookie, "") if PAGE_HEADER in request.headers else ""


def episode_key(request: Request) -> str:
    """As `bearer`, but an episode's key in another header wins, because some clients also send an unrelated bearer."""
    other = request.headers.get("x-api-key", "").strip()
    return other if other.startswith(KEY_PREFIX) else bearer(request)


def asker(request: Request) -> str:
    """The request's key, valid or not, or its address."""
    return episode_key(request) or f"from {request.client.host if request.client else 'nowhere'}"


class RateLimit:
    """A token bucket of requests per key. In memory: all buckets are full after a start."""

    def __init__(self, config: RateConfig | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a configuration there is no limit."""
        self._config, self._clock = config, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(requests left, time of that count) by key; the least recently used are dropped first."""
        self._lock = threading.Lock()

    @property
    def requests_per_second(self) -> float | None:
        """Limit per key; None without one."""
        return None if self._config is None else self._config.requests_per_second

    def wait(self, key: str) -> int:
        """Take a request from a key's bucket: returns 0 if allowed, else the whole seconds to wait."""
        rate = self.requests_per_second
        if self._config is None or rate is None:
            return 0
        with self._lock:
            now = self._clock()
            left, then = self._buckets.pop(key, (float(self._config.burst), now))
            left = min(float(self._config.burst), left + (now - then) * rate)
            goes = left >= 1
            self._buckets[key] = (left - goes, now)
            if len(self._buckets) > _MOST_KEYS:
                self._buckets.popitem(last=False)
        return 0 if goes else math.ceil((1 - left) / rate)


class Access:
    """Checks keys, and counts their requests."""

    def __init__(self, tenants: Tenants, rate: RateLimit, open_to_all: bool) -> None:
        self._tenants, self._rate, self.open_to_all = tenants, rate, open_to_all

    def tenant(self, request: Request) -> str:
        """The tenant of the request's key; empty if the key is not valid. A request that needs no key has one too.

        The request ends with its key from now on, while its body arrives.
        """
        if self.open_to_all:
            return "local"
        try:
            who = self._tenants.who(bearer(request))
        except AWAY:  # the handler finds that out too, and reports it
            return "unknown"
        if who is None:
            return ""
        opened_by(request, who.key_id)
        return who.tenant_id

    def principal(self, request: Request) -> Principal:
        """The principal of the request's key. Raises Refusal if the key is not valid, or sends too many requests."""
        if key := bearer(request):
            if key.startswith(KEY_PREFIX):
                raise Refusal(
                    401, "this is the key of an episode; it opens what the model answers there, and nothing else"
                )
            who = self._tenants.who(key)
            if who is not None:
                opened_by(request, who.key_id)
                asked = asked_of(request.scope)
                asked.key, asked.tenant, asked.admin = who.key_id, who.tenant, who.admin
                asked.tenant_id = who.tenant_id
                self.count(who.key_id)
                rights.check(who, request.method, request.url.path)
                return who
            if not self.open_to_all:  # otherwise any key is accepted: clients such as openai's always send one
                self.count_unknown(request)
                raise Refusal(401, "this key is unknown, revoked or expired; sign in again, or make another key")
        if self.open_to_all:
            self.count("none")
            asked_of(request.scope).tenant_id = local = self._tenants.made_id("local")
            return Principal(local, "local", "none", "admin")
        raise Refusal(401, "give an API key: Authorization: Bearer mk-…")

    def count_unknown(self, request: Request) -> None:
        """Count a request with an unknown key, by address. Raises as `count`."""
        self.count(f"unknown keys from {request.client.host if request.client else 'nowhere'}")

    def count(self, key: str) -> None:
        """Count a request of a key. Raises Refusal if it exceeds the limit."""
        if seconds := self._rate.wait(key):
            message = (
                f"more than {self._rate.requests_per_second:g} requests a second, the most for one key here; try again in "
                f"{seconds} s"
            )
            raise Refusal(429, message, headers={"Retry-After": str(seconds)})


class CheckThreads(ThreadTurns):
    """For checks of jobs."""


class ReadThreads(ThreadTurns):
    """For files of rows and archives, which may take minutes."""


class WriteThreads(ThreadTurns):
    """For writes, which wait for others of their tenant."""


class StreamThreads(ThreadTurns):
    """For reads of event streams: all those of a tenant read whenever there is an event."""
