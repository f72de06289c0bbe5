"""Agent workers of tenants: episodes that wait for them, and their conversations and results.

An episode lives in memory, as long as the host that offers it. Each lease starts it again under another name and key,
so that messages of an earlier agent do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from motet.core.json_text import rough_size
from motet.environments import episode_messages as m
from motet.environments.environment_messages import LATE
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.errors import Refusal
from motet.service.events import EventBus
from motet.service.schemas.workers import Counted, EpisodeResult, LeaseRequest
from motet.service.workers.attached import MOST_LEASED, AttachedWorkers, Gone, Room

KEY_PREFIX = "ek-"
"""Prefix of episode keys."""
MOST_OPEN = 1024
"""Most open episodes of a tenant's jobs."""
MOST_LOST = 3
"""How often an episode is leased again after its worker disappears."""
_REMEMBERED = 10_000
_GRACE_SECONDS = 15.0
"""Time for a worker to report an agent whose time has run out."""
_OVER = "there is no such episode, or it is over: its lease has ended, or its reward is in"


class AgentHost(Protocol):
    """The host that offers an episode."""

    def send(self, *messages: m.BeginEpisode) -> None:
        """Notify it that an agent takes the episode."""
        ...

    def ask(self, question: m.AskEpisode, /) -> AsyncGenerator[Any, None]:
        """Ask for the agent; yields as `HostLink.ask`."""
        ...


@dataclass(eq=False)
class OfferedEpisode:
    """An episode offered by a host, and its current lease."""

    host: AgentHost
    offer: m.OfferEpisode
    ended: asyncio.Future[m.EpisodeEnded]
    name: str = ""
    """Name of this lease; empty without one."""
    key: str = ""
    worker: str = ""
    owner: str = ""
    """Id of the API key that leased it."""
    tenant: str = ""
    """Id of its job's tenant, known from the first lease on."""
    tokens: int = 0
    """Most tokens that a call samples."""
    leased_until: float = 0.0
    """On the monotonic clock, as is `deadline`."""
    deadline: float = 0.0
    calls: int = 0
    """Running calls of the agent."""
    handed_out: int = 0
    lost: int = 0
    size: int = 0
    """About the characters of its row."""


class AgentWorkers(AttachedWorkers):
    """Waiting and leased episodes of all jobs. Use in one event loop."""

    kind, phase = "episodes", "waits for an agent worker"

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float) -> None:
        """`lease_seconds`: how long a silent worker keeps an episode."""
        super().__init__(store, bus, lease_seconds)
        self._waiting: defaultdict[str, list[OfferedEpisode]] = defaultdict(list)
        """By job, in the order offered."""
        self._open: dict[str, OfferedEpisode] = {}
        """Leased episodes by name."""
        self._settled: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        """Names of recently finished episodes, by job."""

    # --- the engine's side ------------------------------------------------------------------------------------------------

    async def run(self, host: AgentHost, offer: m.OfferEpisode) -> m.EpisodeEnded:
        """Wait until an agent has ended the episode; returns its result."""
        if self._closing:
            return m.EpisodeEnded(offer.episode, away=True)
        self._start_checking()
        size = rough_size((offer.problem, offer.args), MOST_LEASED)
        one = OfferedEpisode(host, offer, asyncio.get_running_loop().create_future(), size=size)
        self._waiting[offer.job].append(one)
        self._publish(offer.job)
        try:
            return await one.ended
        finally:
            self._free(one)
            self._waiting[offer.job].remove(one)
            if not self._waiting[offer.job]:
                del self._waiting[offer.job]
                self._resting.discard(offer.job)

    def send_away(self, job_id: str) -> None:
        """Release a job that waits for agents."""
        for one in self._waiting.get(job_id, ()):
            self._end(one, m.EpisodeEnded(0, away=True))

    def ended(self, job_id: str) -> None:
        """Forget an ended job, and wake its waiting workers. Thread-safe."""
        self._settled.pop(job_id, None)
        self._publish(job_id)

    # --- leases -----------------------------------------------------------------------------------------------------------

    async def lease(
        self, job: StoredJob, asked: LeaseRequest, owner: str, gone: Gone, room: Room
    ) -> list[dict[str, Any]]:
        """As `AttachedWorkers.lease`; also a worker for whose answer there is no room keeps what it holds."""
        self.renew(job.id, asked.worker, asked.holds)
        return await super().lease(job, asked, owner, gone, room)

    async def take(self, job: StoredJob, asked: LeaseRequest, owner: str) -> list[dict[str, Any]]:
        """Lease waiting episodes to a worker."""
        until = time.monotonic() + self.lease_seconds
        room = min(asked.most, MOST_OPEN - sum(one.tenant == job.tenant_id for one in self._open.values()))
        free, size = list[OfferedEpisode](), 0
        for one in self._waiting.get(job.id, ()):
            if one.name or one.ended.done():
                continue
            if len(free) >= room or (free and size + one.size > MOST_LEASED):
                break
            free.append(one)
            size += one.size
        for one in free:
            one.name, one.key = f"ep-{secrets.token_hex(8)}", f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
            one.worker, one.owner, one.tenant, one.calls = asked.worker, owner, job.tenant_id, 0
            one.tokens = int(job.spec["sampling"]["max_tokens"])
            one.leased_until, one.deadline = until, time.monotonic() + one.offer.seconds
            one.handed_out += 1
            self._open[one.name] = one
            one.host.send(m.BeginEpisode(one.offer.episode, one.name))
        return [
            {
                "id": one.name, "path": f"/episodes/{one.name}/v1", "key": one.key, "problem": one.offer.problem,
                "args": one.offer.args, "seed": one.offer.seed, "seconds": one.offer.seconds,
                "handed_out": one.handed_out,
            }
            for one in free
        ]  # fmt: skip

    def renew(self, job_id: str, worker: str, holds: Collection[str] | None) -> None:
        """Renew the episodes in `holds` (None for all), and free the worker's others."""
        freed = False
        for one in self._held(job_id, worker):
            if holds is None or one.name in holds:
                one.leased_until = time.monotonic() + self.lease_seconds
            else:
                self._free(one)
                freed = True
        if freed:
            self._publish(job_id)

    def held(self, job_id: str, worker: str) -> list[str]:
        """Names of the episodes that a worker has."""
        return [one.name for one in self._held(job_id, worker)]

    def _held(self, job_id: str, worker: str) -> list[OfferedEpisode]:
        return [one for one in self._waiting.get(job_id, ()) if one.name and one.worker == worker]

    async def leave(self, job_id: str, worker: str) -> None:
        """Free a leaving worker's episodes at once."""
        self._seen[job_id].pop(worker, None)
        for one in self._held(job_id, worker):
            self._free(one)
        self._publish(job_id)

    def count(self, job_id: str, results: Sequence[EpisodeResult]) -> Counted:
        """Take results; those of expired leases do not count."""
        said: dict[str, list[str]] = {"counted": [], "known": [], "unknown": []}
        for one in results:
            ended = m.EpisodeEnded(0, one.reward, one.rewards or {}, one.error, one.late)
            said[self.settle(job_id, one.id, ended)].append(one.id)
        return Counted(**said)

    def settle(self, job_id: str, name: str, result: m.EpisodeEnded) -> str:
        """Record an episode's result: returns `counted`, `known` for a repeat, or `unknown`."""
        one = self._open.get(name)
        if one is None or one.offer.job != job_id:
            return "known" if name in self._settled.get(job_id, ()) else "unknown"
        self._settled[job_id].append(name)
        self._end(one, result)
        return "counted"

    def keys(self) -> set[str]:
        """Ids of API keys with leased episodes."""
        return {one.owner for one in self._open.values()}

    async def end(self, keys: Collection[str]) -> None:
        """Free the episodes leased under these keys."""
        for one in [one for one in self._open.values() if one.owner in keys]:
            self._seen[one.offer.job].pop(one.worker, None)
            self._free(one)
            self._publish(one.offer.job)

    def check(self) -> None:
        """Free the episodes of silent workers, and end those whose time has run out."""
        now = time.monotonic()
        for one in list(self._open.values()):
            if now > one.deadline + _GRACE_SECONDS:
                self._end(one, m.EpisodeEnded(0, error=LATE, late=True))
            elif not one.calls and now > one.leased_until:
                self._lose(one)

    def _lose(self, one: OfferedEpisode) -> None:
        one.lost += 1
        if one.lost > MOST_LOST:
            error = f"was lost {one.lost} times: its worker was silent for {self.lease_seconds:g} s"
            self._end(one, m.EpisodeEnded(0, error=error, late=True))
            return
        self._free(one)
        self._publish(one.offer.job)

    def _end(self, one: OfferedEpisode, result: m.EpisodeEnded) -> None:
        self._free(one)
        if not one.ended.done():
            one.ended.set_result(replace(result, episode=one.offer.episode))

    def _free(self, one: OfferedEpisode) -> None:
        """Invalidate its name and key."""
        self._open.pop(one.name, None)
        one.name = one.key = one.worker = ""

    # --- what agents ask --------------------------------------------------------------------------------------------------

    def leased(self, name: str, key: str) -> OfferedEpisode | None:
        """A leased episode, if `key` is its key."""
        one = self._open.get(name)
        return one if one is not None and secrets.compare_digest(key.encode(), one.key.encode()) else None

    async def answer(self, name: str, key: str, question: m.AskEpisode) -> m.EpisodeAnswered:
        """Answer an agent's request.

        Raises:
            Refusal: the episode is over, or the key is wrong.
            EngineError: the engine cannot answer.
        """
        one = self._open.get(name)
        if one is None:
            raise Refusal(404, _OVER)
        if self.leased(name, key) is None:
            raise Refusal(401, "the key is not that of this episode")
        one.calls += 1
        try:
            async with contextlib.aclosing(one.host.ask(question)) as answers:
                async for answer in answers:
                    if isinstance(answer, m.EpisodeAnswered):
                        return answer
        finally:
            if one.name == name:  # a newer lease has its own count
                one.calls -= 1
                one.leased_until = max(one.leased_until, time.monotonic() + self.lease_seconds)
        raise Refusal(404, _OVER)
