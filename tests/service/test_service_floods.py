"""Many requests at the same moment, and floods of refused ones: a turn of the loop does little, and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from motet.config.service import HttpConfig, RateConfig
from motet.service.events import EventBus
from motet.service.http.auth import _REFUSALS, bearer
from motet.service.http.bodies import MOST_FIELDS, Bodies
from motet.service.http.connections import _LEAST_ROOM, _ROOM_OF_A_TURN
from motet.service.http.opened import KeyWatch, opened_by
from motet.service.turns import Floods, Turns
from tests.support import inside
from tests.support.counting import calls
from tests.support.house import House, open_house
from tests.support.loop_turns import connected, requests_of_all, rest_of, turns_of
from tests.support.waiting import wait_until

FEW = RateConfig(requests_per_second=1e-6, burst=10)
REFUSALS = _REFUSALS * FEW.burst


def ask(house: House, path: str = "/v1/me", key: str = "none", *more: str, method: str = "GET") -> bytes:
    """A request without its last line break."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *more]
    return "\r\n".join(
        [*lines, *([f"Authorization: Bearer {house.keys[key]}"] if house.keys[key] else []), ""]
    ).encode()


def send_all(lines: list[socket.socket], text: bytes) -> None:
    for line in lines:
        line.sendall(text)


def most_in_a_turn(seen: list[int]) -> int:
    """How much a figure rose between two turns."""
    return max(after - before for before, after in itertools.pairwise(seen))


async def gone_through(turns: Turns, many: int, cancelled: int = 0) -> list[int]:
    """How many had gone through at each turn of the loop."""
    done, seen = 0, [0]

    async def go() -> None:
        nonlocal done
        await turns.enter()
        done += 1

    tasks = [asyncio.create_task(go()) for _ in range(many)]
    await asyncio.sleep(0)
    for one in tasks[-cancelled:] if cancelled else ():
        one.cancel()
    while not all(one.done() for one in tasks):
        seen.append(done)
        await asyncio.sleep(0)
    return [*seen, done]


def test_few_go_through_in_one_turn_and_all_in_the_end() -> None:
    turns = Turns(4)
    seen = asyncio.run(gone_through(turns, 50))
    assert seen[-1] == 50
    assert most_in_a_turn(seen) <= 2 * 4, "those that had room, and those that waited"
    assert asyncio.run(gone_through(Turns(4), 50, cancelled=20))[-1] == 30


def test_few_of_many_that_wait_for_an_event_go_on_in_one_turn() -> None:
    async def wake() -> list[int]:
        bus, done, seen = EventBus(), 0, list[int]()

        async def wait() -> None:
            nonlocal done
            await bus.wait(bus.next("a job"), 3600)
            done += 1

        tasks = [asyncio.create_task(wait()) for _ in range(1000)]
        await asyncio.sleep(0)
        bus.publish("a job")
        while not all(one.done() for one in tasks):
            seen.append(done)
            await asyncio.sleep(0)
        return [*seen, done]

    assert most_in_a_turn(asyncio.run(wake())) <= 64


def test_few_answers_that_are_ready_together_are_sent_in_one_turn(house: House) -> None:
    kept = vars(house.bodies)

    async def send_all_at_once() -> list[int]:
        ready, sent, seen = asyncio.Event(), 0, list[int]()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await ready.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def send(message: Message) -> None:
            nonlocal sent
            sent += message["type"] == "http.response.start"

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        parts = ("config", "room", "answers", "refusal", "access", "positions", "stopping")
        bodies = Bodies(app, uploads={}, **{name: kept[f"_{name}"] for name in parts})
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "client": ("::1", 1)}
        tasks = [asyncio.create_task(bodies({**scope}, receive, send)) for _ in range(60)]
        await asyncio.sleep(0)
        ready.set()
        while not all(one.done() for one in tasks):
            seen.append(sent)
            await asyncio.sleep(0)
        return [*seen, sent]

    seen = asyncio.run(send_all_at_once())
    assert seen[-1] == 60
    assert most_in_a_turn(seen) <= 2 * 8


def test_few_requests_of_a_key_that_ended_end_in_one_turn(house: House) -> None:
    tenants = house.store.tenants
    key, _ = tenants.create_key("us", "short", "member", None)
    tenants.revoke_key(key.id)

    async def end() -> list[int]:
        watch, ended, seen = KeyWatch(tenants, ()), 0, list[int]()

        async def request() -> None:
            nonlocal ended
            scope = {"type": "http"}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as cut:
                    with watch.open(scope, cut):
                        opened_by(Request(scope), key.id)
                        await asyncio.Event().wait()
            ended += 1

        tasks = [asyncio.create_task(request()) for _ in range(200)]
        await asyncio.sleep(0)
        checked = asyncio.create_task(watch.check())
        while not all(one.done() for one in tasks):
            seen.append(ended)
            await asyncio.sleep(0)
        await checked
        watch.close()
        return [*seen, ended]

    assert most_in_a_turn(asyncio.run(end())) <= 2 * 8


@pytest.mark.parametrize("key", ["none", "ours"])
def test_requests_that_come_at_the_same_moment_begin_in_many_turns(house: House, key: str) -> None:
    connections, n_lines = house.connections, 60
    text = ask(house, "/v1/me?" + "a&" * 500, key, "Connection: close") + b"\r\n"
    with turns_of(house.app.state.loop, lambda: connections.handled.reads) as seen, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(house)) for _ in range(n_lines)]
        wait_until(lambda: inside.open_connections(connections) >= len(lines))
        house.app.state.loop.call_soon_threadsafe(send_all, lines, text)  # between two turns
        for line in lines:
            assert rest_of(line).startswith(b"HTTP/1.1 ")
    assert sum(max(0, after - before) for before, after in itertools.pairwise(seen)) >= n_lines
    assert most_in_a_turn(seen) <= 2 * _ROOM_OF_A_TURN // _LEAST_ROOM


def use_up(house: House) -> None:
    assert house.ask("GET", "/v1/me", "theirs").status_code == 200  # it is in memory from here on
    for key in ("none", "ours"):
        while house.ask("GET", "/v1/me", key).status_code != 429:
            pass


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[House]:
    """A service whose tenants and addresses have used up their requests."""
    with open_house(tmp_path, rate=FEW) as found:
        use_up(found)
        yield found


def refusals(house: House, text: bytes, many: int) -> list[bytes]:
    """The heads of answers to so many requests, each on a connection of its own where the one before was closed."""
    heads, line = list[bytes](), connected(house)
    for _ in range(many):
        line.sendall(text)
        head = b""
        while b"\r\n\r\n" not in head:
            head += line.recv(1)
            assert head, "the connection has ended"
        heads.append(head.lower())
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while length:
            length -= len(line.recv(length))
        if b"connection: close" in heads[-1]:
            line.close()
            line = connected(house)
    line.close()
    return heads


def waits(house: House, text: bytes) -> bool:
    """Whether a request waits before it begins; it is answered in any case."""
    floods = inside.floods(house)
    with (
        turns_of(house.app.state.loop, lambda: sum(floods._waiting.values())) as waiting,
        connected(house) as line,
    ):
        line.sendall(text)
        assert rest_of(line).startswith(b"HTTP/1.1 ")
    return any(waiting)


@pytest.mark.parametrize("key", ["none", "ours"])
def test_requests_of_whoever_is_refused_too_often_wait_and_no_others(strict: House, key: str) -> None:
    """All have one address here, as behind a proxy or in an office. A key that is in memory does not wait."""
    text, floods = ask(strict, "/v1/me", key) + b"\r\n", inside.floods(strict)
    heads = refusals(strict, text, REFUSALS - 1)
    assert all(b" 429 " in head for head in heads)
    assert not floods._until
    last = ask(strict, "/v1/me", key, "Connection: close") + b"\r\n"

    def wait() -> bool:
        refusals(strict, text, 1)
        return waits(strict, last)

    wait_until(wait)  # a machine that is busy for longer than it lasts does not show it
    assert floods._until
    for path, other in (("/v1/me", "theirs"), ("/healthz", key)):
        assert not waits(strict, ask(strict, path, other, "Connection: close") + b"\r\n")
    assert not floods._waiting


def test_few_of_a_flood_begin_in_a_second_and_those_who_leave_do_not() -> None:
    async def flood() -> list[float]:
        floods, loop, ends = Floods(), asyncio.get_running_loop(), list[float]()
        floods.add("us")
        assert floods.floods("us")
        assert not floods.floods("them")
        gone = asyncio.Event()
        left = [asyncio.create_task(floods.wait("us", gone)) for _ in range(600)]
        await asyncio.sleep(0)
        begun = loop.time()

        async def stays() -> None:
            await floods.wait("us", asyncio.Event())
            ends.append(loop.time() - begun)

        stay = asyncio.create_task(stays())
        await asyncio.sleep(0)
        gone.set()
        await asyncio.gather(*left)
        assert floods._waiting == {"us": 1}
        await stay
        assert not floods._waiting
        return ends

    assert asyncio.run(flood())[0] >= 600 / 200


def test_requests_without_a_place_are_counted_as_a_flood_too(tmp_path: Path) -> None:
    with open_house(tmp_path, http=HttpConfig(requests_per_tenant=1), rate=FEW) as house, connected(house) as open_one:
        open_one.sendall(ask(house, "/v1/jobs", "ours", "Content-Length: 9", method="POST") + b"\r\n")
        wait_until(lambda: any(inside.requests(house).values()))
        heads = refusals(house, ask(house, "/v1/me", "ours") + b"\r\n", REFUSALS + 1)
        assert all(b" 429 " in head for head in heads)
        assert inside.floods(house)._until
        assert house.ask("GET", "/v1/me", "theirs").status_code == 200


def test_the_body_of_a_refused_request_is_charged(strict: House) -> None:
    us = strict.store.tenants.tenant_of(strict.keys["ours"]) or ""
    counted = requests_of_all(strict, us)
    assert counted > 9
    with connected(strict) as line:
        line.sendall(ask(strict, "/v1/check", "ours", f"Content-Length: {2**22}", method="POST") + b"\r\n")
        assert line.recv(12) == b"HTTP/1.1 429"
        line.sendall(bytes(2**22) + ask(strict, "/healthz", "none", "Connection: close") + b"\r\n")
        rest_of(line)
    assert requests_of_all(strict, us) - counted >= 3.5


def test_when_to_try_again_counts_the_body_that_was_refused(strict: House) -> None:
    """It is charged: whoever came as soon as without it would be refused for ever."""
    waits = list[int]()
    for size in (0, 2**22):
        with connected(strict) as line:
            line.sendall(ask(strict, "/v1/check", "ours", f"Content-Length: {size}", method="POST") + b"\r\n")
            head = line.recv(2**10).lower()
            assert head.startswith(b"http/1.1 429")
            waits.append(int(head.split(b"retry-after: ")[1].split(b"\r\n")[0]))
    assert FEW.requests_per_second is not None
    assert waits[1] - waits[0] >= 4 / FEW.requests_per_second - 1


@pytest.mark.parametrize("path", ["/v1/jobs/%00", "/v1/jobs?after=%00", "/v1/me?" + "a&" * MOST_FIELDS])
def test_an_address_that_is_refused_is_counted_before(tmp_path: Path, path: str) -> None:
    with open_house(tmp_path, rate=RateConfig(requests_per_second=1e-6, burst=5)) as house:
        assert house.ask("GET", path).status_code == 422
        statuses = [house.ask("GET", path).status_code for _ in range(6)]
        assert statuses[-1] == 429
    with open_house(tmp_path / "more") as house:
        assert house.ask("GET", "/v1/me?" + "a&" * (MOST_FIELDS - 1)).status_code == 200


def test_several_ranges_of_a_file_are_the_whole_file(house: House) -> None:
    """A hundred of one byte took as long as hundreds of requests."""
    whole = house.ask("GET", f"/v1/files/{house.file['id']}/content")
    for ranges, status in (("bytes=0-3", 206), ("bytes=0-0,2-2,4-4", 200)):
        answer = house.ask("GET", f"/v1/files/{house.file['id']}/content", headers={"range": ranges})
        assert answer.status_code == status
        assert whole.content.startswith(answer.content)
        assert status == 206 or answer.content == whole.content


@pytest.mark.parametrize(
    ("cookies", "key"),
    [
        ("motet=mk-one", "mk-one"),
        ("a=b; motet=mk-one ; c=d", "mk-one"),
        ('a="\\073 motet=mk-two"; xmotet=mk-three;motet=mk-one', "mk-one"),
        ("xmotet=mk-two", ""),
        ("", ""),
    ],
)
def test_one_cookie_is_read_and_no_other(house: House, cookies: str, key: str) -> None:
    kept, house.app.state.session_cookie = house.app.state.session_cookie, "motet"
    try:
        headers = [(b"x-motet-page", b"1"), (b"cookie", cookies.encode())]
        with calls(own_thread=True) as counted:
            assert bearer(Request({"type": "http", "headers": headers, "app": house.app})) == key
        assert "cookie_parser" not in counted
    finally:
        house.app.state.session_cookie = kept


def test_an_answer_that_nobody_takes_ends_with_its_connection(tmp_path: Path) -> None:
    with open_house(tmp_path, http=HttpConfig(body_seconds=0.3)) as house, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        line.connect(("127.0.0.1", house.http.base_url.port or 0))
        house.http.close()
        wait_until(lambda: inside.open_connections(house.connections) == 1)
        line.sendall(ask(house, "/dashboard/plotly.js", "none") + b"\r\n")
        head, body = line.recv(2**10).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        wait_until(lambda: not inside.open_connections(house.connections))
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert len(body) + len(rest_of(line)) < size, "what was on its way"
