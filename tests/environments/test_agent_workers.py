"""Episodes that wait for agents of a tenant's: who has them, for how long, and what ends them; without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from motet.config import EnvironmentConfig
from motet.config.service import ANY_SIZE
from motet.core.errors import ScorerAway
from motet.core.types import Problem, Rollout
from motet.environments.episode import GroupContext
from motet.environments.episode_messages import AskEpisode, BeginEpisode, EpisodeAnswered, EpisodeEnded, OfferEpisode
from motet.environments.remote_agents import AgentsElsewhere, EpisodesElsewhere
from motet.hosts import messages as cluster
from motet.hosts.host_link import HostHandlers, HostLink
from motet.process import isolated_calls
from motet.process.channel import ChannelMessage, Child, decode, encode
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.errors import Refusal
from motet.service.events import EventBus
from motet.service.schemas.workers import LeaseRequest
from motet.service.workers.agents import MOST_LOST, MOST_OPEN, AgentWorkers
from motet.service.workers.attached import MOST_LEASED
from tests.support import inside
from tests.support.captured import none_scored
from tests.support.house import open_house
from tests.support.openai_requests import hostile
from tests.support.scripted_model import CHAT, Script
from tests.support.sending import sending
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE, until

LEASE = 3600.0
"""Seconds; a test ends leases itself."""


class Engine:
    """A host that answers when it is let, and keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[BeginEpisode] = []
        self.may_answer = asyncio.Event()

    def send(self, *messages: BeginEpisode) -> None:
        """Keep them."""
        self.sent += messages

    async def ask(self, question: AskEpisode, /) -> AsyncGenerator[EpisodeAnswered, None]:
        """Answer with what was asked."""
        await self.may_answer.wait()
        yield EpisodeAnswered(question.key, 200, question.body, "text/plain")


class Stumbles(AgentWorkers):
    """Its first check fails."""

    looks = 0

    def check(self) -> None:
        """Fail once."""
        self.looks += 1
        if self.looks == 1:
            raise KeyError("w")
        super().check()


class Raced(dict[str, float]):
    """What is deleted by somebody else as soon as it was looked at."""

    def items(self) -> Any:
        """All that there was."""
        found = list(super().items())
        self.clear()
        return found


class Bench:
    """Workers, an engine, and the episodes that it offers."""

    def __init__(self, workers: AgentWorkers) -> None:
        self.workers, self.engine = workers, Engine()
        self.offers: list[asyncio.Task[EpisodeEnded]] = []

    async def offer(self, n: int = 1, seconds: float = PATIENCE, row: str = "") -> None:
        """More episodes of the job."""
        for _ in range(n):
            one = OfferEpisode(len(self.offers), "job", {"metadata": {"text": row}}, {}, 0, seconds)
            self.offers.append(asyncio.create_task(self.workers.run(self.engine, one)))
        await asyncio.sleep(0)

    def end_leases(self) -> None:
        """All workers have been silent for too long."""
        for one in self.workers._open.values():
            one.leased_until = 0.0
        for seen in inside.attached(self.workers).values():
            seen.update(dict.fromkeys(seen, -1e9))

    async def lease(self, worker: str = "w", most: int = 1, owner: str = "key") -> list[str]:
        """The names of what a worker gets."""
        return [one["id"] for one in await self.taken(worker, most, owner)]

    async def taken(
        self, worker: str = "w", most: int = 1, owner: str = "key", tenant: str = "us"
    ) -> list[dict[str, Any]]:
        """What a worker gets."""
        job = StoredJob(id="job", tenant_id=tenant, spec={"sampling": {"max_tokens": 9}}, state="running")
        asked = LeaseRequest.model_construct(worker=worker, most=most, wait_seconds=0.0, holds=None)
        return await self.workers.lease(job, asked, owner, here, lambda: lambda: None)


async def here() -> bool:
    """Nobody has hung up."""
    return False


def bench(tmp_path: Path, work: Callable[[Bench], Awaitable[None]], kind: type[AgentWorkers] = AgentWorkers) -> None:
    """Run some work on a bench."""

    async def run() -> None:
        store = Store(f"sqlite:///{tmp_path / 'motet.db'}")
        one = Bench(kind(store, EventBus(), LEASE))
        try:
            async with asyncio.timeout(PATIENCE):
                await work(one)
        finally:
            one.workers.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(*one.offers)
            store.close()

    asyncio.run(run())


def test_an_episode_that_is_not_heard_of_is_handed_out_again_and_lost_too_often_it_fails(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer()
        names = []
        for _ in range(MOST_LOST + 1):
            names += await on.lease()
            assert await on.lease("v") == []  # it is somebody's
            on.end_leases()
            assert not on.offers[0].done()
            on.workers.check()
        assert len(set(names)) == MOST_LOST + 1
        assert [one.name for one in on.engine.sent] == names  # each begins it anew
        ended = await on.offers[0]
        assert (ended.episode, ended.late, "lost 4 times" in ended.error) == (0, True, True)
        assert on.workers.settle("job", names[-1], EpisodeEnded(0, 1.0)) == "unknown"

    bench(tmp_path, work)


def test_a_look_that_fails_is_not_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(on: Bench) -> None:
        await on.offer()
        (name,) = await on.lease()
        on.end_leases()
        await until(lambda: on.workers.held("job", "w") == [])
        assert await on.lease("v") != [name]

    bench(tmp_path, work, Stumbles)
    assert "could not be looked after" in caplog.text


def test_workers_may_be_forgotten_by_two_threads_at_once(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        inside.attached(on.workers)["job"] = Raced(gone=-1e9)
        assert on.workers.attached("job") == 0

    bench(tmp_path, work)


def test_a_worker_keeps_what_it_says_it_holds_and_nothing_else(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer(3)
        kept, dropped = await on.lease(most=2)
        for _ in range(3):
            on.end_leases()
            on.workers.renew("job", "w", [kept])
            on.workers.renew("job", "stranger", [dropped])
            on.workers.check()
        assert on.workers.held("job", "w") == [kept]
        assert len(await on.lease("v", 9)) == 2
        await on.workers.leave("job", "w")
        assert len(await on.lease("v", 9)) == 1

    bench(tmp_path, work)


def test_a_result_counts_once_for_the_job_and_the_lease_that_it_is_of(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer(2)
        await on.lease()
        (name,) = await on.lease()  # the second episode
        assert on.workers.settle("another", name, EpisodeEnded(0, 9.0)) == "unknown"
        said = [on.workers.settle("job", name, EpisodeEnded(0, reward)) for reward in (1.0, 2.0)]
        assert said == ["counted", "known"]
        ended = await on.offers[1]
        assert (ended.episode, ended.reward) == (1, 1.0)
        assert not on.offers[0].done()

    bench(tmp_path, work)


def test_one_answer_hands_out_rows_of_so_many_characters_and_at_least_one(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer(3, row="x" * (MOST_LEASED // 2 - 100))
        await on.offer(row="x" * (2 * MOST_LEASED))
        await on.offer(5)
        assert [len(await on.lease("w", 9)) for _ in range(4)] == [2, 1, 1, 5]

    bench(tmp_path, work)


def test_a_tenant_has_so_many_episodes_open_whatever_its_keys(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer(MOST_OPEN + 2)
        assert len(await on.lease("w", MOST_OPEN - 1)) == MOST_OPEN - 1
        assert len(await on.lease("v", 9)) == 1
        assert await on.lease("u", 9) == []
        assert await on.lease("u", 9, "another key") == []
        assert len(await on.taken("u", 9, tenant="them")) == 2

    bench(tmp_path, work)


def test_an_episode_whose_time_is_up_ends_whatever_its_worker_says(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer(seconds=-20.0)  # longer ago than a worker has to say so
        (name,) = await on.lease()
        on.workers.renew("job", "w", [name])
        on.workers.check()
        ended = await on.offers[0]
        assert (ended.late, "environment.wall_seconds" in ended.error) == (True, True)

    bench(tmp_path, work)


def test_what_the_model_is_asked_keeps_an_episode_and_needs_its_key(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer()
        (leased,) = await on.taken()
        name, key = leased["id"], leased["key"]
        one = on.workers._open[name]
        question = AskEpisode(name, "chat/completions", "words", again=False)
        for given in ("", "ek-other", key[:-1]):
            with pytest.raises(Refusal, match="not that of this episode"):
                await on.workers.answer(name, given, question)
        with pytest.raises(Refusal, match="no such episode"):
            await on.workers.answer("ep-other", key, question)
        answer = asyncio.create_task(on.workers.answer(name, key, question))
        await until(lambda: one.calls == 1)
        on.end_leases()
        on.workers.check()
        assert one.name == name  # it is being answered
        on.engine.may_answer.set()
        assert (await answer).body == "words"
        on.workers.check()
        assert one.name == name
        on.end_leases()
        on.workers.check()
        assert one.name == ""
        assert on.workers.leased(name, key) is None
        assert on.workers.leased("", "") is None

    bench(tmp_path, work)


def test_a_job_whose_episodes_nobody_takes_rests_when_it_is_to(tmp_path: Path) -> None:
    async def work(on: Bench) -> None:
        await on.offer()
        assert on.workers.waits("job")
        await on.lease("w", 0)
        assert not on.workers.waits("job")  # somebody is attached
        on.workers.rest("job", True)
        on.end_leases()
        ended = await on.offers[0]  # once that one is gone
        assert ended.away
        assert not on.workers.asked("job")

    bench(tmp_path, work)


OFFER = OfferEpisode(0, "job", {}, {}, 0, 60.0)


class Process:
    """A host's process that does what the test says: it has offered an episode, and dies when it is told to."""

    def __init__(self, *said: ChannelMessage) -> None:
        self.reader, self.sent = asyncio.StreamReader(), list[ChannelMessage]()
        self.reader.feed_data(b"".join(map(encode, said or (cluster.HostReady([]), OFFER))))

    def is_closing(self) -> bool:
        """Of its standard input."""
        return False

    def write(self, line: bytes) -> None:
        """Keep what it is sent."""
        self.sent.append(decode(line, cluster.ToHost))

    def close(self) -> None:
        """Nothing more is sent."""

    async def launched(self, start: cluster.StartHost, log: Path) -> Child[Any]:
        """As whoever starts processes hands it over."""
        writer: Any = self

        async def end() -> None:
            return None

        return Child(cluster.FromHost, self.reader, writer, end)


def test_what_an_engine_offered_ends_with_it_and_no_reward_of_it_reaches_the_next(tmp_path: Path) -> None:
    """Which counts its episodes from 0 again."""
    start = cluster.StartHost("small", str(tmp_path), {}, {}, {}, [], 1.0, ANY_SIZE)

    async def work(on: Bench) -> None:
        lives = [Process(), Process()]
        starting = iter(lives)
        host = HostLink(
            0, start, tmp_path / "log", ThreadPoolExecutor(1), lambda start, log: next(starting).launched(start, log)
        )
        host.start(
            HostHandlers(
                list,
                lambda _: None,
                lambda _: None,
                never,
                lambda *_: None,
                lambda *_: None,
                lambda _: None,
                on.workers.run,
            ),
            lambda *_: None,
        )
        try:
            await until(lambda: on.workers.asked("job"))
            (former,) = await on.taken()
            name, key = former["id"], former["key"]
            lives[0].reader.feed_eof()
            await until(lambda: host.starts == 2 and on.workers.asked("job"))
            assert on.workers.leased(name, key) is None
            assert on.workers.settle("job", name, EpisodeEnded(0, 9.0)) == "unknown"
            assert on.workers.held("job", "w") == []
            (again,) = await on.lease(most=MOST_OPEN)
            assert on.workers.settle("job", again, EpisodeEnded(0, 1.0)) == "counted"
            await until(lambda: any(isinstance(one, EpisodeEnded) for one in lives[1].sent))
            assert [one for one in lives[1].sent if isinstance(one, EpisodeEnded)] == [EpisodeEnded(0, 1.0)]
        finally:
            on.workers.close()
            await host.kill()

    bench(tmp_path, work)


async def never(request: cluster.ScoreRequest) -> cluster.ScoresAnswered:
    """Nothing is to be scored."""
    raise AssertionError(request)


def test_an_episodes_key_hands_no_reward_in_where_no_key_is_needed(tmp_path: Path) -> None:
    with open_house(tmp_path, open_to_all=True) as house:
        job = house.ask("POST", "/v1/jobs", "none", json={**tiny("open"), "environment": "agent"}).json()["id"]
        path, body = f"/v1/jobs/{job}/work/episodes/results", {"results": [{"id": "ep-1", "reward": 1.0}]}
        assert house.ask("POST", path, "none", json=body).json()["unknown"] == ["ep-1"]
        for header in ({"Authorization": "Bearer ek-x"}, {"x-api-key": "ek-x"}):
            answer = house.http.post(path, headers=header, json=body)
            assert (answer.status_code, "key of an episode" in answer.text) == (401, True)


# --- the engine's half ----------------------------------------------------------------------------------------------------


def test_an_episode_that_begins_again_has_nothing_of_what_was_said_before() -> None:
    sent: list[ChannelMessage] = []
    script = Script(lambda *_: "four")
    context = GroupContext(Problem(4, (), "4"), CHAT, 1, script, none_scored, judged=False)
    body = '{"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}'

    async def work() -> Rollout:
        episodes = EpisodesElsewhere(sending(sent.append))
        config = EnvironmentConfig(name="agent", max_turns=2, wall_seconds=60)
        group = asyncio.create_task(AgentsElsewhere("job", config, episodes).run_group(context))
        await until(lambda: bool(sent))
        (offer,) = sent
        assert isinstance(offer, OfferEpisode)
        assert not episodes.begun("job")
        answers = []
        for name in ("first", "second"):
            episodes.hear(BeginEpisode(offer.episode, name))
            answers.append(await episodes.answer(AskEpisode(name, "chat/completions", body, again=False)))
        assert [one.status for one in answers] == [200, 200]
        assert episodes.begun("job")
        late = await episodes.answer(AskEpisode("first", "chat/completions", body, again=False))
        assert late.status == 404
        episodes.hear(EpisodeEnded(offer.episode, 1.0))
        (rollout,) = await group
        assert not episodes.offered
        return rollout

    rollout = asyncio.run(work())
    assert [turn.text for turn in rollout.turns] == ["four"]
    assert (rollout.reward, rollout.error) == (1.0, "")


class CountedRow(dict[str, Any]):
    """A row that knows how often it was written."""

    written = 0

    def items(self) -> Any:
        type(self).written += 1
        return super().items()


def test_of_a_job_few_episodes_are_written_out_that_no_agent_has_taken() -> None:
    sent: list[ChannelMessage] = []
    problem = Problem(4, (), "4", CountedRow(numbers=[1, 2, 3]))
    context = GroupContext(problem, CHAT, 200, Script(lambda *_: "four"), none_scored, judged=False)
    config = EnvironmentConfig(name="agent", max_turns=2, wall_seconds=60)

    async def work() -> None:
        episodes = EpisodesElsewhere(sending(sent.append))
        agents, other = AgentsElsewhere("job", config, episodes), AgentsElsewhere("other", config, episodes)
        group = asyncio.create_task(agents.run_group(context))
        await until(lambda: len(sent) >= 64)
        assert len(asyncio.all_tasks()) < 80, "those that wait have no tasks, which would end in one turn"
        for taken in range(64, 201):
            assert len(sent) == min(taken, 200)
            offer = sent[taken - 64]
            assert isinstance(offer, OfferEpisode)
            episodes.hear(BeginEpisode(offer.episode, f"{offer.episode}"))
            if taken % 3:  # one that goes on makes room, too
                episodes.hear(EpisodeEnded(offer.episode, 1.0))
            wanted = min(taken + 1, 200)
            await until(lambda: len(sent) >= wanted)  # noqa: B023
        assert CountedRow.written == 1, "the row is written once for its group"
        two = asyncio.create_task(other.run_group(dataclasses.replace(context, group_size=2)))
        await until(lambda: len(sent) == 202)  # another job has room of its own
        for waiting in (group, two):
            waiting.cancel()
        await asyncio.gather(group, two, return_exceptions=True)
        assert not episodes.offered

    asyncio.run(work())


def test_an_episode_is_offered_to_the_next_service_and_begins_anew() -> None:
    sent: list[ChannelMessage] = []
    context = GroupContext(Problem(4, (), "4"), CHAT, 1, Script(lambda *_: "four"), none_scored, judged=False)
    body = '{"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}'

    async def work() -> None:
        episodes = EpisodesElsewhere(sending(sent.append))
        agents = AgentsElsewhere("job", EnvironmentConfig(name="agent", max_turns=2, wall_seconds=60), episodes)
        group = asyncio.create_task(agents.run_group(context))
        await until(lambda: bool(sent))
        (offer,) = sent
        assert isinstance(offer, OfferEpisode)
        episodes.hear(BeginEpisode(offer.episode, "first"))
        assert (await episodes.answer(AskEpisode("first", "chat/completions", body, again=False))).status == 200
        episodes.hang_up()
        assert not episodes.begun("job")
        assert list(episodes.pending) == [offer]
        assert (await episodes.answer(AskEpisode("first", "chat/completions", body, again=False))).status == 404
        episodes.hear(BeginEpisode(offer.episode, "second"))
        assert (await episodes.answer(AskEpisode("second", "chat/completions", body, again=False))).status == 200
        episodes.hear(EpisodeEnded(offer.episode, 1.0))
        (rollout,) = await group
        assert ([turn.text for turn in rollout.turns], rollout.reward) == (["four"], 1.0)
        assert not list(episodes.pending)
        waiting = asyncio.create_task(agents.run_group(context))
        await until(lambda: len(sent) == 2)
        episodes.hear(EpisodeEnded(1, away=True))
        with pytest.raises(ScorerAway):
            await waiting

    asyncio.run(work())


def test_schemas_of_all_agents_of_a_tenant_are_compiled_in_its_turns() -> None:
    sent: list[ChannelMessage] = []
    context = GroupContext(Problem(4, (), "4"), CHAT, 1, Script(lambda *_: "four"), none_scored, judged=False)
    config = EnvironmentConfig(name="agent", max_turns=2, wall_seconds=60)

    async def work() -> None:
        episodes = EpisodesElsewhere(sending(sent.append), lambda job: "us")
        groups = [asyncio.create_task(AgentsElsewhere(job, config, episodes).run_group(context)) for job in ("a", "b")]
        await until(lambda: len(sent) == 2)
        asked = []
        for offer in sent:
            assert isinstance(offer, OfferEpisode)
            episodes.hear(BeginEpisode(offer.episode, offer.job))
            schema = hostile(mark=f"agent {offer.job}")
            body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "response_format": schema}
            ask = AskEpisode(offer.job, "chat/completions", json.dumps(body), again=False)
            asked.append(asyncio.create_task(episodes.answer(ask)))
        await until(lambda: bool(isolated_calls.here()._busy and isolated_calls.here()._queues))
        assert (isolated_calls.here()._busy, set(isolated_calls.here()._queues)) == ({"us"}, {"us"})
        episodes.hang_up()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [404, 404]
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)

    asyncio.run(work())


def test_nothing_of_a_host_that_is_not_ready_is_leased(tmp_path: Path) -> None:
    """As of one that works since an earlier HTTP process, whose messages wait to be stored: agents would find nothing."""
    start = cluster.StartHost("small", str(tmp_path), {}, {}, {}, [], 1.0, ANY_SIZE)
    score = cluster.ScoreRequest(7, "job", {}, {}, [], [])
    scored = list[int]()

    async def scores(request: cluster.ScoreRequest) -> cluster.ScoresAnswered:
        scored.append(request.key)
        return cluster.ScoresAnswered(request.key, away=True)

    async def work(on: Bench) -> None:
        process = Process(OFFER, score, cluster.Progress({}, {"job": 1.0}))
        host = HostLink(0, start, tmp_path / "log", ThreadPoolExecutor(1), process.launched)
        host.start(HostHandlers(list, lambda _: None, score=scores, episode=on.workers.run), lambda *_: None)
        try:
            await until(lambda: host.device == {"job": 1.0})  # what came before is handled
            assert await on.lease(most=MOST_OPEN) == []
            assert not on.workers.asked("job")
            assert scored == []
            process.reader.feed_data(encode(cluster.HostReady([])))
            await until(lambda: on.workers.asked("job") and scored == [7])
            (name,) = await on.lease(most=MOST_OPEN)
            assert on.workers.settle("job", name, EpisodeEnded(0, 1.0)) == "counted"
        finally:
            on.workers.close()
            process.reader.feed_eof()
            await host.kill()

    bench(tmp_path, work)
