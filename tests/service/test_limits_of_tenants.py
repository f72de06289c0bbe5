"""A limit is a tenant's: more keys, new keys and the keys of episodes give nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

from sqlalchemy import select

from motet.config.service import HttpConfig, RateConfig
from motet.environments.episode_messages import AskEpisode, EpisodeAnswered, EpisodeEnded, OfferEpisode
from motet.runtime.device_usage import COMPLETIONS
from motet.service.answers import Asks
from motet.service.database.tables import ScoringUnit
from motet.service.workers.agents import OfferedEpisode
from motet.service.workers.attached import MOST_LEASED
from tests.support import inside
from tests.support.house import House, open_house
from tests.support.scripted_service import scripted_service
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE, wait_until


class Engine:
    """Answers an agent with this text; never if it is empty."""

    def __init__(self, answer: str = "") -> None:
        self._answer = answer

    def send(self, *messages: object) -> None:
        """Hear that an agent takes an episode."""

    async def ask(self, question: AskEpisode, /) -> AsyncGenerator[EpisodeAnswered, None]:
        """Answer, or wait."""
        if not self._answer:
            await asyncio.Event().wait()
        yield EpisodeAnswered(question.key, 200, self._answer, "text/plain")


class Counting(Engine):
    """Sees what is open while it answers."""

    def __init__(self, asks: Asks) -> None:
        super().__init__("done")
        self._asks, self.seen = asks, list[dict[str, int]]()

    async def ask(self, question: AskEpisode, /) -> AsyncGenerator[EpisodeAnswered, None]:
        """Answer."""
        self.seen.append(dict(self._asks._open))
        async for answer in super().ask(question):
            yield answer


def test_what_a_call_of_an_episode_may_sample_counts_against_the_day(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        job = house.ask("POST", "/v1/jobs", json={**tiny("asks"), "environment": "agent"}).json()["id"]
        tenant = house.store.tenants.made("us").id
        tokens = house.ask("GET", f"/v1/jobs/{job}").json()["spec"]["sampling"]["max_tokens"]
        engine = Counting(house.service.asks)
        run = house.service.agent_workers.run(engine, OfferEpisode(0, job, {}, {}, 0, 600.0))
        asyncio.run_coroutine_threadsafe(run, house.app.state.loop)
        answer = house.ask("POST", f"/v1/jobs/{job}/work/episodes/lease", json={"worker": "w", "most": 1})
        (leased,) = answer.json()["units"]
        house.keys["episode"] = leased["key"]
        for path in ("models", "chat/completions"):
            house.ask("GET" if path == "models" else "POST", f"{leased['path']}/{path}", "episode").raise_for_status()
        assert engine.seen == [{"": 0}, {"": 0, tenant: tokens}]
        assert not house.service.asks._open.total()


def more_keys(house: House, number: int) -> list[str]:
    """Names of further keys of the tenant `us`: the first ones are new, the last one is rotated."""
    tenants = house.store.tenants
    made = [tenants.create_key("us", f"more-{n}", "member") for n in range(number)]
    rotated = tenants.rotate_key(made[-1][0].id)
    assert rotated is not None
    house.keys.update({f"more-{n}": text for n, (_, text) in enumerate([*made[:-1], rotated])})
    return [f"more-{n}" for n in range(number)]


def episode(house: House, answer: str = "") -> str:
    """The address of a leased episode of `us`, whose model answers this."""
    who, workers = house.store.tenants.who(house.keys["ours"]), house.service.agent_workers
    assert who is not None
    offer = OfferEpisode(0, house.job["id"], {}, {}, 0, 600.0)
    ended = asyncio.Future[EpisodeEnded](loop=house.app.state.loop)
    workers._open["ep-1"] = OfferedEpisode(
        Engine(answer), offer, ended, "ep-1", "ek-1", "w", who.key_id, who.tenant_id, leased_until=1e12, deadline=1e12
    )
    house.keys["episode"] = "ek-1"
    return "/episodes/ep-1/v1/chat/completions"


def test_the_keys_of_a_tenant_share_its_rate(tmp_path: Path) -> None:
    with open_house(tmp_path, rate=RateConfig(requests_per_second=0.001, burst=6)) as house:
        keys = more_keys(house, 6)
        said = [house.ask("GET", "/v1/jobs", key).status_code for key in keys]
        assert said == [200] * 4 + [429] * 2, "two were used to set the house up"
        assert "of all keys of a tenant together" in house.refused(429, "GET", "/v1/jobs")["message"]
        assert house.ask("GET", "/v1/jobs", "theirs").status_code == 200


def test_the_keys_of_a_tenant_share_its_open_requests_and_streams(tmp_path: Path) -> None:
    http = HttpConfig(requests_per_tenant=4, streams_per_tenant=3, body_seconds=600)
    with open_house(tmp_path, http=http) as house, contextlib.ExitStack() as stack:
        keys = more_keys(house, 6)
        for key in keys[:3]:
            stack.enter_context(_unread(house, "/v1/jobs", key, 9))
        chat = episode(house)
        stack.enter_context(_unread(house, chat, "episode", 9))
        wait_until(lambda: max(inside.requests(house).values(), default=0) == 4)
        assert {house.ask("GET", "/v1/jobs", key).status_code for key in (*keys, "ours")} == {429}
        assert house.refused(429, "POST", chat, "episode", content=b"{}")["message"].startswith(
            "4 requests of this tenant"
        )
        assert house.ask("GET", "/v1/jobs", "theirs").status_code == 200
        for key in keys[:3]:
            headers = {"Authorization": f"Bearer {house.keys[key]}"}
            stream = stack.enter_context(house.http.stream("GET", "/v1/events/stream", headers=headers))
            assert stream.status_code == 200
        assert {house.ask("GET", "/v1/events/stream", key).status_code for key in (*keys, "ours")} == {429}


def test_what_keys_and_episodes_send_takes_memory_of_one_tenant(tmp_path: Path) -> None:
    http = HttpConfig(open_mb=64, open_mb_per_tenant=3, body_seconds=600)
    with open_house(tmp_path, http=http) as house, contextlib.ExitStack() as stack:
        chat, keys = episode(house), more_keys(house, 2)
        us = house.store.tenants.made("us").id
        for key, path in (("ours", "/v1/jobs"), (keys[0], "/v1/jobs"), (keys[1], "/v1/jobs"), ("episode", chat)):
            stack.enter_context(_unread(house, path, key, 2**17, b"x" * 90_000))
        wait_until(lambda: inside.taken(house.service.open_bytes)[us] > 2.5 * 2**20)
        assert set(inside.taken(house.service.open_bytes)) <= {us, ""}
        large = {"messages": [{"role": "user", "content": "x" * 2**17}]}
        for key, path in (("ours", "/v1/jobs"), ("episode", chat)):
            assert "your open requests" in house.refused(429, "POST", path, key, json=large)["message"]
        assert house.ask("POST", "/v1/jobs", "theirs", json=large).status_code == 400


def test_what_keys_and_episodes_are_answered_takes_memory_of_one_tenant(tmp_path: Path) -> None:
    """As long as it is not read: each key has one answer here that fills every buffer on its way."""
    size = 12 * 2**20
    with (
        open_house(tmp_path, http=HttpConfig(open_mb=96, open_mb_per_tenant=64)) as house,
        contextlib.ExitStack() as stack,
    ):
        chat, keys = episode(house, "x" * size), more_keys(house, 2)
        us, taken = house.store.tenants.made("us").id, inside.taken(house.service.open_answers)
        long_job(house, size)
        for key in ("ours", *keys):
            stack.enter_context(_unread(house, "/v1/jobs/ended", key, 0, b"", "GET"))
        stack.enter_context(_unread(house, chat, "episode", 2, b"{}"))
        wait_until(lambda: sum(taken.values()) > 4 * size)
        assert set(taken) == {us}
        long_job(house, 2 * size)
        assert "your open requests" in house.refused(429, "GET", "/v1/jobs/ended")["message"]
        assert house.ask("GET", "/v1/jobs", "theirs").status_code == 200


def test_room_for_work_is_taken_before_it_is_leased(tmp_path: Path) -> None:
    """Whoever does not read its leases gets no more of them, nor other answers; nobody else's work is touched."""
    with (
        open_house(tmp_path, http=HttpConfig(open_mb=96, open_mb_per_tenant=40)) as house,
        contextlib.ExitStack() as stack,
    ):
        us, taken = house.store.tenants.made("us").id, inside.taken(house.service.open_answers)
        job = house.ask("POST", "/v1/jobs", json={**tiny("scored"), "reward": "worker"}).json()["id"]
        units, asked = house.service.reward_workers.units, {"worker": "w", "most": 1, "wait_seconds": 0}
        for number in range(4):
            units.ask(job, f"{number}", 0, {"problem": {"id": number}, "completions": ["x" * 12 * 2**20]})
        path, content = f"/v1/jobs/{job}/work/rewards/lease", json.dumps(asked).encode()
        for number in (1, 2):
            stack.enter_context(_unread(house, path, "ours", len(content), content))
            wait_until(lambda number=number: sum(house.store.scalars(select(ScoringUnit.handed_out))) == number)  # type: ignore[misc]
        assert taken[us] == 2 * MOST_LEASED
        assert "your open requests" in house.refused(429, "POST", path, json=asked)["message"]
        assert sorted(house.store.scalars(select(ScoringUnit.handed_out))) == [0, 0, 1, 1]
        stack.enter_context(_unread(house, "/v1/jobs/scored", "ours", 0, b"", "GET"))
        assert house.ask("POST", path.replace(job, "ended"), json=asked).status_code == 200, "which has no work"
        house.service.open_answers.take(us, 40 * 2**20, always=True)
        assert "unread answers" in house.refused(429, "POST", "/v1/keys", json={"name": "a"})["message"]
        house.service.open_answers.take("others", 96 * 2**20, always=True)
        made = house.ask("POST", "/v1/jobs", "theirs", json={**tiny("theirs"), "reward": "worker"})
        assert made.status_code == 201, "they read theirs"
        leased = house.ask("POST", f"/v1/jobs/{made.json()['id']}/work/rewards/lease", "theirs", json=asked)
        assert leased.status_code == 200, "one answer of each tenant has room"


def test_whoever_asks_an_adapter_that_another_tenant_shares_pays(tmp_path: Path) -> None:
    """The tokens, the turns and the memory of its answer, which fills every buffer on its way."""
    with scripted_service(tmp_path) as (house, engine):
        them = house.store.tenants.made("them").id
        house.ask("POST", "/v1/shares", json={"name": "job", "tenant": "them"})
        engine.texts, engine.step = ["x" * 12_000], 20_000
        chat = {"model": "us/job", "messages": [{"role": "user", "content": "x"}], "n": 16, "logprobs": True}
        content, taken = json.dumps({**chat, "max_tokens": 13_000}).encode(), inside.taken(house.service.open_answers)
        with _unread(house, "/v1/chat/completions", "theirs", len(content), content):
            wait_until(lambda: bool(taken))
            assert set(taken) == {them}
        assert {(one.job, one.tenant) for one in engine.requests} == {(f"{COMPLETIONS}{them}", them)}


def test_a_key_that_has_ended_counts_for_its_address(tmp_path: Path) -> None:
    with (
        open_house(tmp_path, http=HttpConfig(requests_per_tenant=2, body_seconds=600)) as house,
        contextlib.ExitStack() as stack,
    ):
        tenants = house.store.tenants
        key, house.keys["left"] = tenants.create_key("us", "left", "member")
        assert house.ask("GET", "/v1/jobs", "left").status_code == 200
        tenants.revoke_key(key.id)
        assert house.ask("GET", "/v1/jobs", "left").status_code == 401
        for _ in range(2):
            stack.enter_context(_unread(house, "/v1/login/device/key", "left", 9))
        wait_until(lambda: inside.requests(house)["from 127.0.0.1"] == 2)
        assert house.ask("GET", "/v1/jobs").status_code == 200


def long_job(house: House, size: int) -> None:
    """Let `us` have a job of so many bytes."""
    spec = house.service.store.job_by_id(house.job["id"]).spec  # type: ignore[union-attr]
    house.store.change_job(house.job["id"], spec={**spec, "environment": {"args": {"text": "x" * size}}})


def _unread(
    house: House, path: str, key: str, length: int, content: bytes = b"x", method: str = "POST"
) -> socket.socket:
    """A connection that sends a request, or a part of it, and reads nothing."""
    own = f"Host: localhost\r\nAuthorization: Bearer {house.keys[key]}\r\nContent-Type: application/json"
    head = f"{method} {path} HTTP/1.1\r\n{own}\r\nContent-Length: {length}"
    assert house.http.base_url.port is not None
    one = socket.create_connection(("127.0.0.1", house.http.base_url.port), timeout=PATIENCE)
    one.sendall(f"{head}\r\n\r\n".encode() + content)
    return one
