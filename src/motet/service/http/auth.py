"""Authentication of requests: keys, rights, and limits on requests and threads."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from fastapi import Request

from motet.config.service import RateConfig
from motet.process.apart import ThreadTurns
from motet.service.database.store import AWAY
from motet.service.database.tenants import PREFIX, Principal, Tenants
from motet.service.errors import Refusal
from motet.service.http import rights
from motet.service.http.opened import opened_by
from motet.service.request_log import asked_of
from motet.service.workers.agents import KEY_PREFIX, AgentWorkers

_MOST_BUCKETS = 10_000
_EPISODES = re.compile(r"/episodes/([^/]+)/v1/")
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


def address(request: Request) -> str:
    """Whose a request without a good key is."""
    return f"from {request.client.host if request.client else 'nowhere'}"


class RateLimit:
    """Token buckets of requests. In memory: all buckets are full after a start."""

    def __init__(self, config: RateConfig | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a configuration there is no limit."""
        self._config, self._clock = config, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(requests left, time of that count) by whose they are; the least recently used are dropped first."""
        self._lock = threading.Lock()

    @property
    def requests_per_second(self) -> float | None:
        """Limit of each bucket; None without one."""
        return None if self._config is None else self._config.requests_per_second

    def wait(self, whose: str) -> int:
        """Take a request from a bucket: returns 0 if allowed, else the whole seconds to wait."""
        rate = self.requests_per_second
        if self._config is None or rate is None:
            return 0
        with self._lock:
            now = self._clock()
            left, then = self._buckets.pop(whose, (float(self._config.burst), now))
            left = min(float(self._config.burst), left + (now - then) * rate)
            goes = left >= 1
            self._buckets[whose] = (left - goes, now)
            if len(self._buckets) > _MOST_BUCKETS:
                self._buckets.popitem(last=False)
        return 0 if goes else math.ceil((1 - left) / rate)


class Access:
    """Checks keys, and counts requests. Limits are those of a tenant: all its keys and episodes share them."""

    def __init__(self, tenants: Tenants, rate: RateLimit, episodes: AgentWorkers, open_to_all: bool) -> None:
        self._tenants, self._rate, self._episodes, self.open_to_all = tenants, rate, episodes, open_to_all

    def known_tenant(self, request: Request) -> str | None:
        """As `tenant`, from memory only; None if the database must be asked. The key may have ended since it was used."""
        if self.open_to_all:
            return "local"
        if (key := episode_key(request)).startswith(KEY_PREFIX):
            named = _EPISODES.match(request.url.path)
            leased = None if named is None else self._episodes.leased(named[1], key)
            return "" if leased is None else leased.tenant
        return self._tenants.tenant_of(key) if key.startswith(PREFIX) else ""

    def tenant(self, request: Request) -> str:
        """The tenant that pays for a request, by its key or its episode's; empty if the key is not valid.

        The request ends with its key from now on, while its body arrives. A request that needs no key has a tenant too.
        """
        if self.open_to_all:
            return "local"
        if (key := episode_key(request)).startswith(KEY_PREFIX):
            return self.known_tenant(request) or ""
        try:
            who = self._tenants.who(key)
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
                self.count(who.tenant_id)
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
        self.count(f"unknown keys {address(request)}", "of an address without a good key")

    def count(self, whose: str, what: str = "of all keys of a tenant together") -> None:
        """Count a request in a tenant's or an address's bucket. Raises Refusal if it exceeds the limit."""
        if seconds := self._rate.wait(whose):
            message = (
                f"more than {self._rate.requests_per_second:g} requests a second, the most {what} here; try again in "
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
