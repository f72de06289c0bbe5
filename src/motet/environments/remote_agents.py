"""Agents that run on their owners' machines: episodes are offered to the service, which leases them to workers.

An engine has one `EpisodesElsewhere`, which exchanges messages with the service, and an `AgentsElsewhere` for each such
job.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from motet.config import EnvironmentConfig
from motet.core.errors import EngineError, ScorerAway
from motet.core.plain_json import as_json
from motet.core.types import Rollout
from motet.data.problems import RowTurns
from motet.environments import episode_messages as m
from motet.environments.agent_episode import AgentEpisode, rewarded
from motet.environments.episode import GroupContext, OwnEnvironment, judged
from motet.environments.served_episode import OVER, ServedEpisode, refusal
from motet.rewards.reward_answers import problem_as_given

_NOBODY = "no worker runs this job's agents"
_OFFERED = 64
"""Most episodes of a job that are written out and that no agent has taken."""


class _Offer:
    """An offered episode: its current name, and its result."""

    def __init__(self, offer: m.OfferEpisode, begin: Callable[[], AgentEpisode]) -> None:
        self.offer, self.begin = offer, begin
        self.ended: asyncio.Future[m.EpisodeEnded] = asyncio.get_running_loop().create_future()
        self.name = ""
        self.served: ServedEpisode | None = None


class EpisodesElsewhere:
    """Episodes that were offered and have not ended. Lives in one event loop."""

    def __init__(self, send: Callable[..., Future[None]], payer: Callable[[str], str] = str) -> None:
        """`send` sends a message to the service; the result is an `EngineError` if the message is too long.

        `payer` gives the tenant of a job.
        """
        self._send, self._payer = send, payer
        self._offers: dict[int, _Offer] = {}
        self._begun: dict[str, ServedEpisode] = {}
        self._numbers = itertools.count()

    async def run(
        self, offer: m.OfferEpisode, begin: Callable[[], AgentEpisode]
    ) -> tuple[AgentEpisode, m.EpisodeEnded]:
        """Offer an episode, and wait until an agent has ended it; `begin` creates it again for each lease.

        Raises ScorerAway if no agent worker is connected, and the job must stop.
        """
        number = next(self._numbers)
        episode = self._offers[number] = _Offer(msgspec.structs.replace(offer, episode=number), begin)
        try:
            await asyncio.wrap_future(self._send(episode.offer))
            ended = await episode.ended
        except EngineError as error:  # too long
            reason = f"the problem cannot be sent to the agent: {error}; leave large columns out of the data"
            ended = m.EpisodeEnded(number, error=reason)
        except asyncio.CancelledError:
            self._send(m.WithdrawEpisode(number))
            raise
        finally:
            del self._offers[number]
            self._close(episode)
        if ended.away:
            raise ScorerAway(_NOBODY)
        return episode.served.episode if episode.served is not None else begin(), ended

    def hear(self, message: m.BeginEpisode | m.EpisodeEnded) -> None:
        """Handle a message about an episode; ignored if the episode is no longer awaited."""
        episode = self._offers.get(message.episode)
        if episode is None or episode.ended.done():
            return
        if isinstance(message, m.EpisodeEnded):
            episode.ended.set_result(message)
            return
        self._close(episode)
        episode.name, episode.served = message.name, ServedEpisode(episode.begin(), self._payer(episode.offer.job))
        self._begun[episode.name] = episode.served

    @property
    def offered(self) -> bool:
        """Whether any episode is open."""
        return bool(self._offers)

    def begun(self, job: str) -> bool:
        """Whether an agent has taken an episode of a job that has not ended."""
        return any(served.episode.model == job for served in self._begun.values())

    def hang_up(self) -> None:
        """Drop the leases of a service that is gone."""
        for episode in self._offers.values():
            self._close(episode)
            episode.served = None if not episode.ended.done() else episode.served

    @property
    def pending(self) -> Iterator[m.OfferEpisode]:
        """Episodes that have not ended, for another service."""
        return (episode.offer for episode in self._offers.values() if not episode.ended.done())

    async def answer(self, asked: m.AskEpisode) -> m.EpisodeAnswered:
        """Answer an agent's request."""
        served = self._begun.get(asked.name)
        answer = refusal(404, OVER)
        if served is not None:
            answer = await served.answer(asked.route, asked.body.encode(), again=asked.again)
        return m.EpisodeAnswered(asked.key, answer.status, answer.body, answer.media_type)

    def _close(self, episode: _Offer) -> None:
        if episode.served is not None:
            self._begun.pop(episode.name, None)
            episode.served.close()


def _close(offered: contextlib.ExitStack, _: object) -> None:
    offered.close()


class AgentsElsewhere(OwnEnvironment):
    """Rollouts of one job whose agent runs elsewhere."""

    def __init__(self, job: str, config: EnvironmentConfig, episodes: EpisodesElsewhere) -> None:
        self._job, self._config, self._episodes = job, config, episodes
        self._waiting: set[asyncio.Task[Rollout]] = set()
        self._rows, self._room = RowTurns(), asyncio.Semaphore(_OFFERED)

    @property
    def waits(self) -> bool:
        """Whether no agent has taken one of its episodes."""
        return self.offers and not self._episodes.begun(self._job)

    @property
    def offers(self) -> bool:
        """Whether any of its episodes has not ended."""
        return bool(self._waiting)

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        """Run the rollouts of one group, each as one episode. Raises ScorerAway as `EpisodesElsewhere.run`."""
        given = functools.cache(lambda: as_json(problem_as_given(context.problem)))  # written once for the group
        tasks = list[asyncio.Task[Rollout]]()
        try:
            for index in range(context.group_size):
                await self._room.acquire()  # before its task begins: all tasks may end in one turn of the event loop
                (offered := contextlib.ExitStack()).callback(self._room.release)
                tasks.append(task := asyncio.create_task(self._run(context, index, given, offered)))
                task.add_done_callback(functools.partial(_close, offered))
                self._waiting.add(task)
            rollouts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._waiting.difference_update(tasks)
        return await judged(list(rollouts), context)

    async def _run(
        self, context: GroupContext, index: int, given: Callable[[], dict[str, Any]], offered: contextlib.ExitStack
    ) -> Rollout:
        """Run one episode; `offered` is closed as soon as an agent has taken it."""
        config = self._config

        def made() -> AgentEpisode:
            return AgentEpisode(context, index, self._job, config.max_turns, config.wall_seconds)

        def begin() -> AgentEpisode:
            offered.close()
            return made()

        try:
            problem, seed = await self._rows.run(self._job, given), made().seed
            offer = m.OfferEpisode(0, self._job, problem, config.args, seed, config.wall_seconds)
            episode, ended = await self._episodes.run(offer, begin)
        finally:
            await context.release(index)
        self.clock_limited = self.clock_limited or ended.late
        return rewarded(episode, ended.reward, ended.rewards, ended.error)
