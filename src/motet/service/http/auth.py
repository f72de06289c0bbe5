"""Authentication of requests: keys, rights, and limits on requests and threads."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response
from starlette.types import Scope

from motet.config.service import RateConfig
from motet.core.json_text import json_pieces
from motet.process.thread_turns import ThreadTurns
from motet.service.database.store import AWAY
from motet.service.database.tenants import PREFIX, Principal, Tenants
from motet.service.errors import Refusal
from motet.service.http import rights
from motet.service.http.connections import BYTES_OF_A_REQUEST, MOST_UNREAD, network_of
from motet.service.http.opened import opened_by
from motet.service.request_log import asked_of
from motet.service.workers.agents import KEY_PREFIX, AgentWorkers, OfferedEpisode

Result = TypeVar("Result")
_MOST_BUCKETS = 10_000
SECONDS_OF_A_REQUEST = 0.01
"""Of the processor: a read of what was stored that takes longer counts as several requests."""
FEW_BYTES = 2**16
"""Of an answer that is encoded in the event loop."""
_REFUSALS = 5
"""How many times a burst of requests may be refused before further ones wait."""
HEALTH = ("/healthz", "/readyz")
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
    return _cookie(request, request.app.state.session_cookie) if PAGE_HEADER in request.headers else ""


def _cookie(request: Request, name: str) -> str:
    """One cookie alone: to read all of them may take milliseconds, before the rate is looked at."""
    found = re.search(rf"(?:^|;)\s*{re.escape(name)}=([^;]*)", request.headers.get("cookie", ""))
    return "" if found is None else found[1].strip()


def episode_key(request: Request) -> str:
    """As `bearer`, but an episode's key in another header wins, because some clients also send an unrelated bearer."""
    other = request.headers.get("x-api-key", "").strip()
    return other if other.startswith(KEY_PREFIX) else bearer(request)


def _key_for(request: Request) -> str:
    """The key that the request's path is opened with."""
    return episode_key(request) if _EPISODES.match(request.url.path) else bearer(request)


def address(request: Request) -> str:
    """Whose a request without a good key is."""
    return f"from {network_of(request.client) or 'nowhere'}"


class RateLimit:
    """Token buckets of requests, in memory."""

    def __init__(
        self, config: RateConfig | None, clock: Callable[[], float] = time.monotonic, *, restarted: bool = False
    ) -> None:
        """Without a configuration there is no limit. Buckets begin full; if `restarted`, with what one second brings."""
        self._config, self._clock, self._restarted = config, clock, restarted
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(requests left, time of that count) by whose they are; the least recently used are dropped first."""
        self._lock = threading.Lock()

    @property
    def requests_per_second(self) -> float | None:
        """Limit of each bucket; None without one."""
        return None if self._config is None else self._config.requests_per_second

    def of_refusals(self) -> RateLimit:
        """A limit for refusals by this one and others: as many a second as requests, and more at once."""
        config = RateConfig() if self._config is None or self.requests_per_second is None else self._config
        return RateLimit(config.model_copy(update={"burst": _REFUSALS * config.burst}), self._clock)

    def seconds_of(self, length: str) -> int:
        """The seconds in which a body of so many bytes, which is charged though it is refused, is paid for."""
        size = min(int(length), MOST_UNREAD) if length.isdigit() and len(length) < 20 else 0
        return int(size / BYTES_OF_A_REQUEST / (self.requests_per_second or 1))

    def spend(self, whose: str, requests: float) -> None:
        """Take more from a bucket for an allowed request, until as much as a burst is missing; less than 0 gives back."""
        with self._lock:
            if self._config is not None and whose in self._buckets:
                left, then = self._buckets[whose]
                self._buckets[whose] = max(-float(self._config.burst), left - requests), then

    def wait(self, whose: str) -> int:
        """Take a request from a bucket: returns 0 if allowed, else the whole seconds to wait."""
        rate = self.requests_per_second
        if self._config is None or rate is None:
            return 0
        with self._lock:
            now = self._clock()
            burst = float(self._config.burst)
            left, then = self._buckets.pop(whose, (min(burst, max(1.0, rate)) if self._restarted else burst, now))
            left = min(burst, left + (now - then) * rate)
            goes = left >= 1
            self._buckets[whose] = (left - goes, now)
            if len(self._buckets) > _MOST_BUCKETS:
                self._buckets.popitem(last=False)
        return 0 if goes else math.ceil((1 - left) / rate)


@dataclass
class _Admitted:
    """What is known of a request before its body is read."""

    who: Principal | None = None
    """The principal of its key; None without a valid one."""
    looked_up: bool = False
    """Whether the key was looked up; otherwise the database was away."""
    counted_as: str = ""
    """The bucket in which it was counted."""


def _admitted(scope: Scope) -> _Admitted:
    found: _Admitted = scope.setdefault("motet.admitted", _Admitted())
    return found


class Access:
    """Checks keys, and counts requests. Limits are those of a tenant: all its keys and episodes share them."""

    def __init__(self, tenants: Tenants, rate: RateLimit, episodes: AgentWorkers, open_to_all: bool) -> None:
        self._tenants, self._rate, self._episodes, self.open_to_all = tenants, rate, episodes, open_to_all
        self._refusals = rate.of_refusals()

    def known_tenant(self, request: Request) -> str | None:
        """As `admit`, from memory only; None if the database must be asked. The key may have ended since it was used."""
        if self.open_to_all:
            return "local"
        if (key := _key_for(request)).startswith(KEY_PREFIX):
            return "" if (leased := self._leased(request, key)) is None else leased.tenant
        return self._tenants.tenant_of(key) if key.startswith(PREFIX) else ""

    def admit(self, request: Request) -> str:
        """Count a request; returns the tenant that pays for it, by its key or its episode's, empty if the key is not valid.

        This is done before anything of its body is read. A key that is not in memory is looked up within its address's
        rate. The request ends with its key from now on. One that needs no key has a tenant too.

        Raises:
            Refusal: its tenant, or its address without a valid key, sends too many requests.
        """
        key, asked, admitted = _key_for(request), asked_of(request.scope), _admitted(request.scope)
        admitted.looked_up = not key or key.startswith(KEY_PREFIX)
        if key.startswith(KEY_PREFIX) and (leased := self._leased(request, key)) is not None:
            opened_by(request, leased.owner)  # the key that leased the episode; the episode's key ends with it
            asked.tenant_id = leased.tenant
            self._count(request, f"episodes of {leased.tenant}")
            return leased.tenant
        if unknown := self.known_tenant(request) is None:  # its address pays for the look-up, unless the key is good
            self._count_address(request)
        if not admitted.looked_up:
            try:
                admitted.who = who = self._tenants.who(key)
            except AWAY:  # the handler finds that out too, and reports it
                return "unknown"
            admitted.looked_up = True
            if who is not None:
                if unknown:
                    self._rate.spend(admitted.counted_as, -1)
                opened_by(request, who.key_id)
                asked.key, asked.tenant, asked.admin = who.key_id, who.tenant, who.admin
                asked.tenant_id = who.tenant_id
                self._count(request, who.tenant_id)
                return who.tenant_id
        if self.open_to_all:  # with any key: clients such as openai's always send one
            self._count(request, "none")
            asked.tenant_id = self._tenants.made_id("local")
            return "local"
        if not unknown:
            self._count_address(request)
        return ""

    def tenant(self, request: Request) -> str:
        """The tenant of an admitted request; empty if its key is not valid."""
        return asked_of(request.scope).tenant_id

    def principal(self, request: Request) -> Principal:
        """The principal of an admitted request. Raises Refusal if its key is not valid, or has no right to it."""
        key, admitted = bearer(request), _admitted(request.scope)
        if key.startswith(KEY_PREFIX):
            raise Refusal(401, "this is the key of an episode; it opens what the model answers there, and nothing else")
        who = admitted.who if admitted.looked_up or not key else self._tenants.who(key)
        if who is not None:
            rights.check(who, request.method, request.url.path)
            return who
        if self.open_to_all:
            return Principal(self.tenant(request) or self._tenants.made_id("local"), "local", "none", "admin")
        if key:
            raise Refusal(401, "this key is unknown, revoked or expired; sign in again, or make another key")
        raise Refusal(401, "give an API key: Authorization: Bearer mk-…")

    def looked_up(self, request: Request) -> bool:
        """Whether the key of an admitted request was looked up; otherwise the database was away."""
        return _admitted(request.scope).looked_up

    def refused(self, scope: Scope, whose: str) -> bool:
        """Note that a request was refused by a limit; gives whether it was one of far too many."""
        admitted = _admitted(scope)
        admitted.counted_as = admitted.counted_as or whose  # who pays for the rest of its body
        return self._refusals.wait(whose) > 0

    def charge(self, scope: Scope, requests: float) -> bool:
        """Count an admitted request as so many more: its body or its answer takes as long. False if it is not admitted."""
        if whose := _admitted(scope).counted_as:
            self._rate.spend(whose, requests)
        return bool(whose)

    def timed(self, scope: Scope, read: Callable[[], Result]) -> Result:
        """Do a read in this thread; it counts as one request for each `SECONDS_OF_A_REQUEST` of the processor."""
        began = time.thread_time()
        try:
            return read()
        finally:
            self.charge(scope, max(0.0, (time.thread_time() - began) / SECONDS_OF_A_REQUEST - 1))

    def _leased(self, request: Request, key: str) -> OfferedEpisode | None:
        """The episode whose model a request asks with its key."""
        named = _EPISODES.match(request.url.path)
        return None if named is None else self._episodes.leased(named[1], key)

    def _count_address(self, request: Request) -> None:
        health = "health " if request.url.path.endswith(HEALTH) else ""
        self._count(request, f"{health}{address(request)}", "of an address without a good key", close=True)

    def _count(
        self, request: Request, whose: str, what: str = "of all keys of a tenant together", *, close: bool = False
    ) -> None:
        """Count a request in a bucket. Raises Refusal if it exceeds the limit; `close` ends the connection then."""
        if seconds := self._rate.wait(whose):
            seconds += self._rate.seconds_of(request.headers.get("content-length", ""))
            message = (
                f"more than {self._rate.requests_per_second:g} requests a second, the most {what} here; try again in "
                f"{seconds} s"
            )
            headers = {"Retry-After": str(seconds), **({"Connection": "close"} if close else {})}
            raise Refusal(429, message, headers=headers)
        _admitted(request.scope).counted_as = whose


class EncodeThreads(ThreadTurns):
    """For large answers of models and large leases, which wait for no reads."""

    async def answer(self, tenant_id: str, size: int, shown: Callable[[], object]) -> Response:
        """An answer of about `size` bytes as JSON, in ASCII: the data may contain invalid UTF-8."""

        def text() -> str:
            return "".join(json_pieces(shown()))

        body = text() if size <= FEW_BYTES else await self.run(tenant_id, text)
        return Response(body, media_type="application/json")
