"""What a key opened ends with it: streams, long polls, leases, samples and links, on every route."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

import httpx2
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import update

import motet
from motet.config import RewardConfig
from motet.core.errors import ServiceError
from motet.environments.episode_messages import AskEpisode, BeginEpisode, OfferEpisode
from motet.service import depends
from motet.service.app import ROUTES
from motet.service.database.tables import Key, now
from motet.service.http.opened import EndsWithKey, KeyWatch
from motet.service.tinker.futures import Futures
from motet.service.tinker.parts import PREFIX
from motet.service.workers.agents import AgentWorkers
from motet.service.workers.rewards import RewardWorkers
from tests.support.house import House
from tests.support.service_run import Json, tiny
from tests.support.tinker_requests import made, saved
from tests.support.waiting import PATIENCE, wait_until

WITHOUT = {"/healthz", "/readyz", "/metrics", "/", f"{PREFIX}/healthz"}
"""Routes without a key, or with one of their own, that answer at once."""
SIGN_IN = {"/login", "/login/callback", "/v1/login", "/v1/login/key", "/v1/login/device", "/v1/login/device/key"}
LINKED = {f"{PREFIX}/downloads/{{token}}"}
"""Seconds within which everything has to end; a busy machine answers late."""


class Engine:
    """A host that never answers."""

    def __init__(self) -> None:
        self.begun: list[BeginEpisode] = []

    def send(self, *messages: BeginEpisode) -> None:
        """Keep them."""
        self.begun += messages

    async def ask(self, question: AskEpisode, /) -> AsyncGenerator[Any, None]:
        """Wait for ever."""
        await asyncio.Event().wait()
        yield None


class Someone:
    """A key of the tenant `us`, and what it opens."""

    def __init__(self, house: House, name: str, expires: float | None = None) -> None:
        self.house = house
        self.key, self.text = house.store.tenants.create_key("us", name, "member", expires)
        house.keys[name] = self.text
        self.bearer = {"Authorization": f"Bearer {self.text}"}

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """An answer to them."""
        return self.house.ask(method, path, self.key.name, **request)

    def revoke(self) -> float:
        """End the key; a moment before it ended."""
        now = time.monotonic()
        assert self.house.store.tenants.revoke_key(self.key.id)
        return now


@pytest.fixture
def someone(house: House, request: pytest.FixtureRequest) -> Someone:
    """One with a key that nothing else uses."""
    return Someone(house, f"{request.node.name}-{time.time_ns()}")


class Held(threading.Thread):
    """A request that is not answered while its key is good, and what it came to."""

    def __init__(self, house: House, someone: Someone, method: str, path: str, **request: Any) -> None:
        super().__init__()
        self.begun, self.status, self.text, self.ended = threading.Event(), 0, "", 0.0
        request["headers"] = {**someone.bearer, **request.get("headers", {})}
        self._url = str(house.http.base_url)
        self._asked: Any = (method, path, request)
        self.start()

    def run(self) -> None:
        """Ask, and read all of the answer."""
        method, path, request = self._asked
        with (
            httpx2.Client(base_url=self._url, timeout=PATIENCE, trust_env=False) as http,
            http.stream(method, path, **request) as answer,
        ):
            self.status = answer.status_code
            for piece in answer.iter_text():
                self.begun.set()
                self.text += piece
        self.ended = time.monotonic()


def key_watch(house: House) -> KeyWatch:
    """What looks at the keys of open requests."""
    kinds: Any = house.app.user_middleware
    (watch,) = (one.kwargs["watch"] for one in kinds if one.cls is EndsWithKey)
    return cast(KeyWatch, watch)


def job_of(house: House, name: str, **fields: Any) -> str:
    """A job of theirs that waits."""
    answer = house.ask("POST", "/v1/jobs", json={**tiny(f"{name}-{time.time_ns()}"), **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def offered(house: House, job: str) -> None:
    """An episode for an agent."""
    workers, loop = house.part(AgentWorkers), house.app.state.loop
    run = workers.run(Engine(), OfferEpisode(time.time_ns(), job, {}, {}, 0, 600.0))
    asyncio.run_coroutine_threadsafe(run, loop)
    wait_until(lambda: workers.asked(job))


def event_stream(house: House, someone: Someone) -> Held:
    """The events of a job."""
    return Held(house, someone, "GET", f"/v1/jobs/{job_of(house, 'watched')}/events/stream")


def all_events(house: House, someone: Someone) -> Held:
    """The events of all."""
    return Held(house, someone, "GET", "/v1/events/stream")


def scoring(house: House, someone: Someone) -> Held:
    """Work for a reward worker, of which there is none."""
    job = job_of(house, "scored", reward="worker")
    return Held(house, someone, "POST", f"/v1/jobs/{job}/work/rewards/lease", json={"worker": "w", "wait_seconds": 25})


def episodes(house: House, someone: Someone) -> Held:
    """Episodes for an agent worker, of which there is none."""
    job = job_of(house, "played", environment="agent")
    return Held(house, someone, "POST", f"/v1/jobs/{job}/work/episodes/lease", json={"worker": "w", "wait_seconds": 25})


def agents_question(house: House, someone: Someone) -> Held:
    """What an agent asks, under the key of its episode."""
    job = job_of(house, "asked", environment="agent")
    offered(house, job)
    leased = someone.ask("POST", f"/v1/jobs/{job}/work/episodes/lease", json={"worker": "w", "wait_seconds": 5}).json()
    one: Json = leased["units"][0]
    return Held(house, someone, "POST", f"{one['path']}/chat/completions", json={}, headers={"x-api-key": one["key"]})


def future(house: House, someone: Someone) -> Held:
    """What becomes of a command of a model."""
    model = made(house)
    return Held(house, someone, "POST", f"{PREFIX}/retrieve_future", json={"request_id": f"{model}/0"})


def sample(house: House, someone: Someone) -> Held:
    """What becomes of a sample."""
    session = someone.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    name = asked_for(someone, session)
    return Held(house, someone, "POST", f"{PREFIX}/retrieve_future", json={"request_id": name})


def asked_for(someone: Someone, session: str) -> str:
    """A sample of the base, which waits for the engine."""
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    live = someone.ask("POST", f"{PREFIX}/create_sampling_session", json=body).json()["sampling_session_id"]
    wanted = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {}, "sampling_session_id": live}
    return str(someone.ask("POST", f"{PREFIX}/asample", json=wanted).json()["request_id"])


HOLDING = {
    "/v1/jobs/{job}/events/stream": event_stream,
    "/v1/events/stream": all_events,
    "/v1/jobs/{job}/work/{kind}/lease": scoring,
    "/v1/jobs/{job}/work/{kind}/lease#episodes": episodes,
    "/episodes/{episode}/v1/chat/completions": agents_question,
    f"{PREFIX}/retrieve_future": future,
    f"{PREFIX}/asample": sample,
}
"""Routes that hold a request open without an engine's help; with one, completions do (test_service_hostile.py)."""


def routes() -> Iterator[APIRoute]:
    """All but those that show what is nobody's."""
    for route in (one for module in ROUTES for one in module.router.routes):
        if isinstance(route, APIRoute) and route.path not in WITHOUT and not route.path.startswith("/dashboard"):
            yield route


def test_every_route_is_watched_under_the_key_that_it_is_asked_with() -> None:
    """The part that looks at keys notes whose a request is, so whatever a route holds open is broken off."""
    seen = set()
    for route in routes():
        asked = {route.dependant.call} | {one.call for one in _all(route.dependant)}
        seen.add(route.path)
        if not route.path.startswith("/episodes/") and route.path not in LINKED | SIGN_IN:
            assert depends.principal in asked, route.path
    assert {path.partition("#")[0] for path in HOLDING} <= seen
    assert len(seen) > 60


def _all(dependant: Any) -> Iterator[Any]:
    for one in dependant.dependencies:
        yield one
        yield from _all(one)


def test_what_a_key_opened_ends_with_it_and_with_no_other(house: House, someone: Someone) -> None:
    other = Someone(house, f"other-{time.time_ns()}")
    theirs = all_events(house, other)
    held = {path: hold(house, someone) for path, hold in HOLDING.items()}
    watch = key_watch(house)
    wait_until(lambda: sum(one.key == someone.key.id for one in watch._requests) == len(held))
    assert all(one.begun.wait(PATIENCE) for path, one in held.items() if "stream" in path)
    assert {path: one.text for path, one in held.items() if not one.is_alive()} == {}
    ended = someone.revoke()
    for path, one in held.items():
        one.join(PATIENCE)
        assert (one.ended - ended >= 0, path) == (True, path)
        assert ("revoked or has expired" in one.text, path) == (True, path)
        assert one.status == (200 if "stream" in path else 401), path
        if "stream" in path:
            assert 'event: error\ndata: {"error": {"message": ' in one.text
    assert theirs.is_alive()
    other.revoke()
    theirs.join(PATIENCE)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/jobs"])
def test_a_body_that_is_being_sent_ends_with_its_key(house: House, someone: Someone, path: str) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {someone.text}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n--b\r\n\r\n"
    )
    address, room = (house.http.base_url.host, house.http.base_url.port or 80), house.service.open_bytes
    with socket.create_connection(address, timeout=PATIENCE) as line:
        line.sendall(head.encode())
        wait_until(lambda: room._total > 0)
        someone.revoke()
        said = b""
        while b"revoked or has expired" not in said:
            said += (more := line.recv(4096))
            assert more, said
    wait_until(lambda: room._total == 0)


def test_a_key_that_expires_ends_what_it_opened_too(house: House) -> None:
    someone = Someone(house, "brief", expires=now() + 3600)
    held = all_events(house, someone)
    assert held.begun.wait(PATIENCE)
    with house.store.transaction() as session:
        session.execute(update(Key).where(Key.id == someone.key.id).values(expires=now()))
    held.join(PATIENCE)
    assert held.status == 200
    assert "revoked or has expired" in held.text


def test_a_client_that_follows_a_job_hears_that_its_key_ended(house: House, someone: Someone) -> None:
    job = job_of(house, "followed")
    with motet.Client(str(house.http.base_url), someone.text) as client:
        events = client.events(job, follow=True)
        assert next(events).kind == "state"
        someone.revoke()
        with pytest.raises(ServiceError, match="revoked or has expired"):
            next(events)


def test_leases_of_a_key_are_anothers_as_soon_as_it_ends(house: House, someone: Someone) -> None:
    """Also those that nobody asks anything about, and their keys open nothing any more."""
    job = job_of(house, "leased", environment="agent")
    offered(house, job)
    lease = {"worker": "w", "wait_seconds": 5}
    (one,) = someone.ask("POST", f"/v1/jobs/{job}/work/episodes/lease", json=lease).json()["units"]
    scored, workers = job_of(house, "units", reward="worker"), house.part(RewardWorkers)
    stored = house.store.job_by_id(scored)
    assert stored is not None
    asking = workers.ask(stored, RewardConfig(name="worker"), {"id": 0}, ["x"])
    asked = asyncio.run_coroutine_threadsafe(asking, house.app.state.loop)
    wait_until(lambda: workers.asked(scored))
    wait_until(lambda: bool(someone.ask("POST", f"/v1/jobs/{scored}/work/rewards/lease", json=lease).json()["units"]))
    someone.revoke()
    again = {"worker": "v", "wait_seconds": 10}
    assert house.ask("POST", f"/v1/jobs/{job}/work/episodes/lease", json=again).json()["units"]
    assert house.ask("POST", f"/v1/jobs/{scored}/work/rewards/lease", json=again).json()["units"]
    old = house.http.post(f"{one['path']}/chat/completions", headers={"x-api-key": one["key"]}, json={})
    assert old.status_code == 404
    asked.cancel()


def test_samples_of_a_key_are_cancelled_when_it_ends(house: House, someone: Someone) -> None:
    session = someone.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    name = asked_for(someone, session)
    futures = house.part(Futures)
    assert someone.key.id in futures.keys()  # noqa: SIM118 - it is no mapping
    someone.revoke()
    wait_until(lambda: someone.key.id not in futures.keys())  # noqa: SIM118
    house.refused(410, "POST", f"{PREFIX}/retrieve_future", json={"request_id": name})


def test_a_link_to_a_file_ends_with_the_key_that_asked_for_it(house: House, someone: Someone) -> None:
    model = made(house)
    saved(house, model)
    path = f"{PREFIX}/training_runs/{model}/checkpoints/weights/w/external_weights_urls"
    (url,) = someone.ask("GET", path).json()["urls"].values()
    assert house.http.get(url).status_code == 200
    someone.revoke()
    assert house.http.get(url).status_code == 403


def test_whoever_replaces_or_ends_its_own_key_gets_the_answer(house: House, someone: Someone) -> None:
    """Also where the keys are looked at between the change and its answer, here as often as they can be."""
    watch = key_watch(house)

    async def look() -> None:
        while True:
            await watch.check()
            await asyncio.sleep(0.0)

    looking = asyncio.run_coroutine_threadsafe(look(), house.app.state.loop)
    try:
        key, text = someone.key.id, someone.text
        for _ in range(20):
            answer = house.http.post(f"/v1/keys/{key}/rotate", headers={"Authorization": f"Bearer {text}"})
            assert answer.status_code == 201, answer.text
            key, text = answer.json()["id"], answer.json()["key"]
        assert house.http.delete(f"/v1/keys/{key}", headers={"Authorization": f"Bearer {text}"}).status_code == 204
        assert not looking.done()
    finally:
        looking.cancel()
