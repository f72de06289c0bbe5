"""Agent workers of tenants: the episodes that wait for them, and what agents ask and return.

An episode lives as long as the engine that offers it: it is in memory, here and there. Each time that it is leased it begins
anew under another name and another key, so that nothing that an earlier agent says counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from motet.agents import episode_messages as m
from motet.agents.messages import LATE
from motet.service.database.store import Store
from motet.service.errors import Refusal
from motet.service.events import EventBus
from motet.service.workers.attached import AttachedWorkers, Gone

KEY_PREFIX = "ek-"
"""Of the keys of episodes."""
MOST_OPEN = 256
"""Episodes that one API key may have open."""
MOST_LOST = 3
"""How often an episode is handed out again whose worker was not heard of any more."""
_REMEMBERED = 10_000
_GRACE_SECONDS = 15.0
"""What a worker has to hand in what it knows of an agent whose time is up."""
_OVER = "there is no such episode, or it is over: its lease has ended, or its reward is in"


class AgentHost(Protocol):
    """The host that offers an episode."""

    def send(self, *messages: m.BeginEpisode) -> None:
        """Say that an agent takes it."""
        ...

    def ask(self, question: m.AskEpisode, /) -> AsyncGenerator[Any, None]:
        """What an agent is answered, and that this is all; as `Host.ask`."""
        ...


@dataclass(eq=False)
class OfferedEpisode:
    """An episode that the engine offers, and who has it now."""

    host: AgentHost
    offer: m.OfferEpisode
    ended: asyncio.Future[m.EpisodeEnded]
    name: str = ""
    """Of this lease; empty while nobody has it."""
    key: str = ""
    worker: str = ""
    owner: str = ""
    """The API key under which it was leased, by its id."""
    leased_until: float = 0.0
    """On the monotonic clock, as is `deadline`."""
    deadline: float = 0.0
    calls: int = 0
    """Of the agent, under way."""
    handed_out: int = 0
    lost: int = 0


class AgentWorkers(AttachedWorkers):
    """The episodes that wait for agents or have one, of all jobs. Lives in one event loop."""

    kind, phase = "episodes", "waits for an agent worker"

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float) -> None:
        """`lease_seconds`: how long an episode of which nobody says anything more is its worker's."""
        super().__init__(store, bus, lease_seconds)
        self._waiting: defaultdict[str, list[OfferedEpisode]] = defaultdict(list)
        """By job, in the order in which they were offered."""
        self._open: dict[str, OfferedEpisode] = {}
        """Those that are leased, by name."""
        self._settled: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        """Names of the last ones whose agents have returned, by job, as long as that lives."""

    # --- the engine's side ------------------------------------------------------------------------------------------------

    async def run(self, host: AgentHost, offer: m.OfferEpisode) -> m.EpisodeEnded:
        """What comes of an episode, once an agent has ended it."""
        if self._closing:
            return m.EpisodeEnded(offer.episode, away=True)
        self._begin_to_look()
        one = OfferedEpisode(host, offer, asyncio.get_running_loop().create_future())
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
        """Let a job rest that waits for agents."""
        for one in self._waiting.get(job_id, ()):
            self._end(one, m.EpisodeEnded(0, away=True))

    def ended(self, job_id: str) -> None:
        """Forget a job that has ended; those that wait for its episodes are woken. From any thread."""
        self._settled.pop(job_id, None)
        self._publish(job_id)

    # --- leases -----------------------------------------------------------------------------------------------------------

    async def lease(
        self, job_id: str, worker: str, owner: str, most: int, seconds: float, gone: Gone
    ) -> list[OfferedEpisode]:
        """Episodes for a worker, or none when none comes in some seconds. `owner` is its API key, by its id."""

        async def take() -> list[OfferedEpisode]:
            return self._lease(job_id, worker, owner, most)

        return await self._taken(job_id, worker, seconds if most else 0.0, gone, take)

    def _lease(self, job_id: str, worker: str, owner: str, most: int) -> list[OfferedEpisode]:
        until = time.monotonic() + self.lease_seconds
        room = min(most, MOST_OPEN - sum(one.owner == owner for one in self._open.values()))
        free = [one for one in self._waiting.get(job_id, ()) if not one.name and not one.ended.done()][: max(0, room)]
        for one in free:
            one.name, one.key = f"ep-{secrets.token_hex(8)}", f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
            one.worker, one.owner, one.calls = worker, owner, 0
            one.leased_until, one.deadline = until, time.monotonic() + one.offer.seconds
            one.handed_out += 1
            self._open[one.name] = one
            one.host.send(m.BeginEpisode(one.offer.episode, one.name))
        return free

    def renew(self, job_id: str, worker: str, holds: Collection[str] | None) -> None:
        """Hear that a worker goes on with what it holds, and let others have what it holds no more; None is all."""
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
        """The names of the episodes that a worker has."""
        return [one.name for one in self._held(job_id, worker)]

    def _held(self, job_id: str, worker: str) -> list[OfferedEpisode]:
        return [one for one in self._waiting.get(job_id, ()) if one.name and one.worker == worker]

    def leave(self, job_id: str, worker: str) -> None:
        """A worker that goes: others can have what it held at once."""
        self._seen[job_id].pop(worker, None)
        for one in self._held(job_id, worker):
            self._free(one)
        self._publish(job_id)

    def settle(self, job_id: str, name: str, result: m.EpisodeEnded) -> str:
        """Take what came of an episode: `counted`, or `known` where it has come before, or `unknown`."""
        one = self._open.get(name)
        if one is None or one.offer.job != job_id:
            return "known" if name in self._settled.get(job_id, ()) else "unknown"
        self._settled[job_id].append(name)
        self._end(one, result)
        return "counted"

    def keys(self) -> set[str]:
        """The API keys under which episodes are leased, by their ids."""
        return {one.owner for one in self._open.values()}

    async def end(self, keys: Collection[str]) -> None:
        """Let others have what was leased under these keys."""
        for one in [one for one in self._open.values() if one.owner in keys]:
            self._seen[one.offer.job].pop(one.worker, None)
            self._free(one)
            self._publish(one.offer.job)

    def look(self) -> None:
        """Take episodes from workers that are not heard of any more, and end those whose time is up."""
        now = time.monotonic()
        for one in list(self._open.values()):
            if now > one.deadline + _GRACE_SECONDS:
                self._end(one, m.EpisodeEnded(0, error=LATE, late=True))
            elif not one.calls and now > one.leased_until:
                self._lose(one)

    def _lose(self, one: OfferedEpisode) -> None:
        one.lost += 1
        if one.lost > MOST_LOST:
            error = f"was lost {one.lost} times: nothing was heard of its worker for {self.lease_seconds:g} s"
            self._end(one, m.EpisodeEnded(0, error=error, late=True))
            return
        self._free(one)
        self._publish(one.offer.job)

    def _end(self, one: OfferedEpisode, result: m.EpisodeEnded) -> None:
        self._free(one)
        if not one.ended.done():
            one.ended.set_result(replace(result, episode=one.offer.episode))

    def _free(self, one: OfferedEpisode) -> None:
        """Its name and its key are those of no episode any more."""
        self._open.pop(one.name, None)
        one.name = one.key = one.worker = ""

    # --- what agents ask --------------------------------------------------------------------------------------------------

    def owner(self, name: str, key: str) -> str:
        """Whose worker has an episode, where the key is that of the episode; else empty."""
        one = self._open.get(name)
        return one.owner if one is not None and secrets.compare_digest(key.encode(), one.key.encode()) else ""

    async def answer(self, name: str, key: str, question: m.AskEpisode) -> m.EpisodeAnswered:
        """What an agent is answered.

        Raises:
            Refusal: there is no such episode any more, or the key is another's.
            EngineError: the engine cannot answer.
        """
        one = self._open.get(name)
        if one is None:
            raise Refusal(404, _OVER)
        if not self.owner(name, key):
            raise Refusal(401, "the key is not that of this episode")
        one.calls += 1
        try:
            async with contextlib.aclosing(one.host.ask(question)) as answers:
                async for answer in answers:
                    if isinstance(answer, m.EpisodeAnswered):
                        return answer
        finally:
            if one.name == name:  # another lease counts its own
                one.calls -= 1
                one.leased_until = max(one.leased_until, time.monotonic() + self.lease_seconds)
        raise Refusal(404, _OVER)
