"""What a stranger's connection may cost the event loop: events are counted, and each kind is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import inspect
import itertools
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import pytest
from bench.loop import MOST_COLLECTION, MOST_SECONDS, MOST_SHARE, measured
from bench.turns import TURNS
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy import event
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from motet.config.service import HttpConfig, RateConfig
from motet.core.errors import ConfigError
from motet.core.json_text import rough_size
from motet.service.app import ROUTES
from motet.service.database.tables import StoredFile
from motet.service.http.auth import FEW_BYTES
from motet.service.http.bodies import MOST_GRADIENT, MOST_PROMPT, _Body
from motet.service.http.connections import BYTES_OF_A_REQUEST, EVENTS_OF_A_REQUEST, MOST_UNREAD, QUEUE, Connections
from motet.service.http.forms import FormReader
from motet.service.http.json_size import BYTES_OF_A_REQUEST as JSON_OF_A_REQUEST
from motet.service.http.json_size import (
    CONTAINERS_OF_A_REQUEST,
    MOST_VALUES_OF_NOBODY,
    TEXTS_OF_A_REQUEST,
    VALUES_OF_A_REQUEST,
)
from motet.service.http.parsing import CHUNK, FREE_CHUNKS, MOST_HEAD, MOST_LINES, Parser
from motet.service.routing import TenantRoute, _Request
from motet.service.schemas import MOST_SUBMITTED
from motet.service.tinker.wire import CONTENT_TYPE
from motet.service.workers.rewards import key_of
from tests.support import inside
from tests.support.house import House, open_house, statements
from tests.support.loop_turns import connected, requests_of_all, rest_of, turns_of
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE, wait_until

HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = 10**6
JSON = {"content-type": "application/json"}


def events_of(text: bytes, piece: int = 2**16) -> tuple[int, h11.RemoteProtocolError | None]:
    """Events of one request whose bytes come in pieces, and why it was refused."""
    parser = Parser()
    try:
        for place in range(0, len(text), piece):
            parser.receive_data(text[place : place + piece])
            while type(event := parser.next_event()) is not h11.EndOfMessage and not isinstance(event, type):
                pass
    except h11.RemoteProtocolError as error:
        return parser.handled.events, error
    return parser.handled.events, None


@pytest.mark.parametrize("size", [1, 15, CHUNK // 2])
def test_a_body_in_small_chunks_is_refused_after_a_few(size: int) -> None:
    events, wrong = events_of(CHUNKED + (b"%x\r\n%b\r\n" % (size, bytes(size))) * 100_000)
    assert wrong is not None
    assert wrong.error_status_hint == 413
    assert f"{CHUNK} bytes" in str(wrong)
    assert events < FREE_CHUNKS * CHUNK / (CHUNK - size) + 10


def test_a_body_in_few_chunks_or_in_large_ones_is_read() -> None:
    for size, times in ((1, FREE_CHUNKS), (CHUNK, 10_000)):
        events, wrong = events_of(CHUNKED + (b"%x\r\n%b\r\n" % (size, bytes(size))) * times + b"0\r\n\r\n")
        assert wrong is None
        assert events >= times


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"a:\r\n" * (MOST_LINES + 1) + b"\r\n",
        HEAD + b"a:\r\n" * ENDLESS,
        HEAD + b"a: " + b"x" * ENDLESS,
        b"GET /" + b"x" * MOST_HEAD + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        CHUNKED + b"1;" + b"x" * ENDLESS,
        CHUNKED + b"0\r\n" + b"a:\r\n" * ENDLESS,
        CHUNKED + b"0\r\n" + b"a: " + b"x" * ENDLESS,
    ],
    ids=["lines", "endless lines", "a line", "an address", "an extension", "trailers", "a trailer"],
)
@pytest.mark.parametrize("piece", [1, 700, 2**11])
def test_what_is_around_a_body_is_short(text: bytes, piece: int) -> None:
    read = (MOST_HEAD + 2**12) // piece * piece
    events, wrong = events_of(text[:read], piece)
    assert wrong is not None
    assert wrong.error_status_hint in (400, 431)
    assert events <= 2 * (read // piece + 1) + 5


def test_a_length_and_chunks_together_are_refused() -> None:
    _, wrong = events_of(HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert wrong is not None
    assert wrong.error_status_hint == 400


def test_a_refused_request_is_told_why_and_its_connection_closes(house: House) -> None:
    both = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    for text in (HEAD + both, HEAD + b"a:\r\n" * (MOST_LINES + 1) + b"\r\n"):
        with connected(house) as one:
            one.sendall(text)
            head, _, body = rest_of(one).partition(b"\r\n\r\n")
            assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
            assert b"connection: close" in head
            assert "a request" in json.loads(body)["error"]["message"]


def test_small_pieces_are_read_together(house: House) -> None:
    """A head in pieces of one byte: the connection is read a few times, however often its client sends."""
    with connected(house) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        text = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\na: " + b"x" * 4000 + b"\r\nConnection: close\r\n\r\n"
        reads = house.connections.handled.reads
        for place in range(len(text)):
            one.send(text[place : place + 1])
        assert rest_of(one).startswith(b"HTTP/1.1 200 ")
        assert house.connections.handled.reads - reads < len(text) / 10


def test_requests_behind_one_another_are_answered_in_turn(house: House) -> None:
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    with connected(house) as one:
        one.sendall((ask + b"\r\n") * 20 + ask + b"Connection: close\r\n\r\n")
        assert rest_of(one).count(b"HTTP/1.1 200 ") == 21
    with connected(house) as one:  # its limits hold for those behind the first, too
        one.sendall(ask + b"\r\n" + ask + b"a:\r\n" * (MOST_LINES + 1) + b"\r\n")
        assert rest_of(one).count(b"HTTP/1.1 200 ") == 1


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A service that waits long for the rest of a request."""
    waits = HttpConfig(body_seconds=1800)
    with open_house(tmp_path_factory.mktemp("patient"), http=waits) as found:
        yield found


@pytest.mark.parametrize("place", ["head", "body", "chunks"])
def test_a_connection_rests_after_each_small_piece_beyond_a_few(patient: House, place: str) -> None:
    """A piece is sent when the one before was read; between the two, the connection is held, and others are answered."""
    connections, n_pieces, arrived = patient.connections, 40, list[int]()
    head = HEAD + f"Authorization: Bearer {patient.keys['ours']}\r\nConnection: close\r\n".encode()
    begin, piece, end = {
        "head": (head + b"a: ", b"x", b"\r\nContent-Length: 0\r\n\r\n"),
        "body": (head + b"Content-Length: %d\r\n\r\n" % (n_pieces + 1), b" ", b"x"),
        "chunks": (head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % n_pieces, b" ", b"\r\n0\r\n\r\n"),
    }[place]
    with (
        connected(patient) as one,
        turns_of(patient.app.state.loop, lambda: inside.held_connections(connections)) as held,
    ):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, text in enumerate((begin, *[piece] * n_pieces, end)):
            arrived.append(connections.handled.bytes + len(text))
            one.sendall(text)
            wait_until(lambda: connections.handled.bytes >= arrived[-1])
            if number == n_pieces:
                with connected(patient) as other:
                    other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    assert rest_of(other).startswith(b"HTTP/1.1 200 ")
        assert rest_of(one).startswith(b"HTTP/1.1 422 ")
    rests = sum(after > before for before, after in itertools.pairwise(held))
    assert n_pieces / 2 < rests <= n_pieces + 1


def test_large_pieces_that_arrive_together_are_handled_in_many_turns(house: House) -> None:
    """Connections are opened in peace, and all bodies come in one moment: others are answered between them."""
    size, handled, begins = 2**16, house.connections.handled, threading.Event()
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size
    with turns_of(house.app.state.loop, lambda: handled.bytes) as seen, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(house)) for _ in range(40)]
        wait_until(lambda: inside.open_connections(house.connections) >= len(lines))
        house.app.state.loop.call_soon_threadsafe(begins.wait)
        before = handled.bytes
        for line in lines:
            line.sendall(head + b" " * size)
        begins.set()
        for line in lines:
            assert rest_of(line).startswith(b"HTTP/1.1 4")
    assert handled.bytes - before == len(lines) * (len(head) + size)
    most = max(after - before for before, after in itertools.pairwise(seen))
    assert size < most <= 2**17 + 2**18, "what a turn handles, and the piece that was too much"


def test_a_piece_that_fails_holds_up_no_other() -> None:
    class Line:
        """A connection whose pieces fail; it is its own flow."""

        held = given_up = False

        @property
        def flow(self) -> Any:
            return self

        def hold(self) -> None:
            self.held = True

        def release(self) -> None:
            self.held = False

        def handle(self, _: bytes) -> None:
            raise RuntimeError("a fault")

        def give_up(self) -> None:
            self.given_up = True

    async def put_off() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        connections, lines = Connections(HttpConfig(), 1024, lambda *_: True), list[Any](Line() for _ in range(8))
        assert not connections.puts_off(lines[0], bytes(2**18))
        assert all(connections.puts_off(one, bytes(2**17)) for one in lines)
        async with asyncio.timeout(PATIENCE):
            while any(one.held for one in lines):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not connections.puts_off(lines[0], bytes(2**17)), "a later turn has room again"
        return lines

    assert all(one.given_up for one in asyncio.run(put_off()))


def test_few_connections_are_accepted_in_a_turn() -> None:
    made = 0

    class Counted(asyncio.Protocol):
        def connection_made(self, _: asyncio.BaseTransport) -> None:
            nonlocal made
            made += 1

    async def serve() -> list[int]:
        loop, backlog = asyncio.get_running_loop(), Connections(HttpConfig(), 2**16, lambda *_: True).backlog
        with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
            async with await loop.create_server(Counted, sock=listening, backlog=backlog):
                listening.listen(QUEUE)
                for _ in range(100):
                    stack.enter_context(socket.create_connection(listening.getsockname()))
                with turns_of(loop, lambda: made) as seen:
                    while made < 100:
                        await asyncio.sleep(0)
        return seen

    seen = asyncio.run(serve())
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 8


# --- before a body is read, and what it may cost ------------------------------------------------------------------------------


def form(boundary: bytes, *parts: tuple[bytes, bytes]) -> bytes:
    """A form of (description, content)."""
    head = b"Content-Disposition: form-data; "
    return b"".join(b"--%b\r\n%b%b\r\n\r\n%b\r\n" % (boundary, head, what, text) for what, text in parts) + (
        b"--%b--\r\n" % boundary
    )


FILE = b'name="file"; filename="rows.jsonl"\r\nContent-Type: application/jsonl'


@pytest.mark.parametrize("piece", [1, 3, 64, 2**16])
def test_a_form_is_the_same_in_pieces_of_any_size(piece: int) -> None:
    content = b"\r\n--\r\n--bound\r\n-" * 50 + b"\r\n"
    whole = form(b"boundary", (b'name="purpose"', b"fine-tune"), (FILE, content), (b'name="empty"', b""))
    reader = FormReader(b"boundary")
    for place in range(0, len(whole), piece):
        reader.add(whole[place : place + piece])
    found = reader.form()
    file = found["file"]
    assert isinstance(file, UploadFile)
    assert (file.filename, file.size, file.file.read()) == ("rows.jsonl", len(content), content)
    assert (found["purpose"], found["empty"]) == ("fine-tune", "")
    reader.close()


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        (form(b"B", (FILE, b"\r\n--Bx" * 100)), "boundary"),
        (form(b"B", (FILE, b"x"))[:-6], "ends before"),
        (form(b"B", (FILE, b"x"), (FILE, b"y")), "Too many files"),
        (form(b"B", *[(b'name="a"', b"")] * 17), "Too many fields"),
        (form(b"B", (b'name="a"', b"x" * 5000)), "maximum size"),
        (form(b"B", (b"x" * 5000, b"")), "before its content"),
        (form(b"B", (b"", b"")), "no name"),
        (b"", "ends before"),
    ],
)
def test_a_form_that_is_none_is_refused(whole: bytes, words: str) -> None:
    reader = FormReader(b"B")

    def read() -> FormData:
        reader.add(whole)
        return reader.form()

    with contextlib.closing(reader), pytest.raises(HTTPException, match=words):
        read()


def test_a_rate_is_looked_at_before_a_body(tmp_path: Path) -> None:
    """Whoever asks too often is told so without a byte of the body, which is never sent."""
    with open_house(tmp_path, rate=RateConfig(requests_per_second=0.01, burst=10)) as house:
        while house.ask("GET", "/v1/me").status_code == 200:
            pass
        for path in (
            "/v1/submissions",
            "/v1/jobs/ended/work/rewards/results",
            "/tinker/api/v1/forward_backward",
            "/v1/files",
        ):
            for key, status in (("ours", b"429"), ("wrong", b"401")):
                with connected(house) as one:
                    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {house.keys[key]}\r\n"
                    one.sendall(f"{head}Content-Length: 70000\r\nContent-Type: application/json\r\n\r\n".encode())
                    assert one.recv(12) == b"HTTP/1.1 " + status


def test_a_body_of_many_values_counts_as_many_requests(tmp_path: Path) -> None:
    with open_house(tmp_path, rate=RateConfig(requests_per_second=0.01, burst=40)) as house:
        scores = {"results": [{"id": f"unit-{one}", "scores": [0.5] * 125} for one in range(250)]}
        assert house.ask("POST", "/v1/jobs/ended/work/rewards/results", json=scores).status_code == 200
        statuses = [house.ask("GET", "/v1/me").status_code for _ in range(40)]
        assert 0 < statuses.count(200) < 40 - 31_250 / VALUES_OF_A_REQUEST
        assert house.ask("GET", "/v1/me", "theirs").status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "counts_as"),
    [
        ("/v1/check", b'{"text": "' + b"x" * 10**6 + b'"}', 10**6 / JSON_OF_A_REQUEST),
        ("/tinker/api/v1/forward_backward", b"\xff" * 2**23, 2**23 / BYTES_OF_A_REQUEST),
        ("/tinker/api/v1/forward_backward", b"\xff" * (MOST_GRADIENT + 1), 2**25 / BYTES_OF_A_REQUEST),
        ("/v1/check", b'{"a": [' + b"{}," * 8000 + b"{}]}", 8000 / CONTAINERS_OF_A_REQUEST),
        ("/v1/check", b'{"a": [' + b'"",' * 16_000 + b'""]}', 16_000 / TEXTS_OF_A_REQUEST),
        ("/v1/check", b"x" * 2**23, MOST_PROMPT / BYTES_OF_A_REQUEST),
    ],
    ids=["JSON", "a gradient", "one that is too large", "containers", "texts", "JSON that is too large"],
)
def test_a_body_of_a_size_counts_as_many_requests(tmp_path: Path, path: str, content: bytes, counts_as: float) -> None:
    kind = CONTENT_TYPE if path.endswith("/forward_backward") else "application/json"
    with open_house(tmp_path, rate=RateConfig(requests_per_second=0.01, burst=50)) as house:
        house.ask("POST", path, content=content, headers={"content-type": kind})
        statuses = [house.ask("GET", "/v1/me").status_code for _ in range(50)]
        assert 0 < statuses.count(200) <= 50 - counts_as + 1


def refused(house: House, path: str, key: str, coding: str, size: int) -> tuple[bytes, int]:
    """The answer to a request whose body is refused, and how many bytes of it could be sent, in pieces of 64 KB."""
    piece = bytes(2**16)
    bearer = f"Authorization: Bearer {house.keys[key]}\r\n" if house.keys[key] else ""
    length = f"Content-Length: {size}" if coding == "length" else "Transfer-Encoding: chunked"
    if coding == "chunks":
        piece = b"%x\r\n%b\r\n" % (len(piece), piece)
    with connected(house) as one:
        one.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{bearer}{length}\r\n\r\n".encode())
        start, sent = one.recv(12), 0
        with contextlib.suppress(ConnectionError):
            while sent < size:
                one.sendall(piece)
                sent += 2**16
        return start, sent


@pytest.mark.parametrize(
    ("path", "key", "coding", "status"),
    [
        ("/v1/jobs", "none", "chunks", b"401"),
        ("/v1/nothing", "ours", "chunks", b"404"),
        ("/v1/check", "ours", "length", b"413"),
    ],
)
def test_what_arrives_after_an_answer_is_charged_and_read_slowly(
    tmp_path: Path, path: str, key: str, coding: str, status: bytes
) -> None:
    """Also if it has no end: a connection sends a part of it, then it is closed."""
    rate = RateConfig(requests_per_second=1e-6, burst=1000)
    with open_house(tmp_path, rate=rate) as house:
        connections, counted = house.connections, requests_of_all(house)
        with turns_of(house.app.state.loop, lambda: inside.held_connections(connections)) as held:
            before = connections.handled.bytes
            start, sent = refused(house, path, key, coding, 2 * MOST_UNREAD)
            assert start == b"HTTP/1.1 " + status
            read = connections.handled.bytes - before
        assert sent < 2 * MOST_UNREAD - 2**20, "more waits in buffers"
        assert read <= MOST_UNREAD + 2**18 + 2**10
        assert requests_of_all(house) - counted >= read / BYTES_OF_A_REQUEST - 1
        rests = sum(after > before for before, after in itertools.pairwise(held))
        assert rests >= MOST_UNREAD / 2**18 - 1, "one for each piece that is read"
        assert house.ask("GET", "/v1/me", "theirs").status_code == 200


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/nothing", "/tinker/api/v1/forward_backward"])
@pytest.mark.parametrize("key", ["none", "ours"])
def test_small_chunks_are_charged_beside_their_bytes(tmp_path: Path, path: str, key: str) -> None:
    n_chunks = 3000
    body = (b"%x\r\n%b\r\n" % (CHUNK, b" " * CHUNK)) * n_chunks + b"0\r\n\r\n"
    with open_house(tmp_path, rate=RateConfig(requests_per_second=1e-6, burst=1000)) as house:
        counted = requests_of_all(house)
        bearer = f"Authorization: Bearer {house.keys[key]}\r\n" if house.keys[key] else ""
        with connected(house) as one:
            one.sendall(
                f"POST {path} HTTP/1.1\r\nHost: x\r\n{bearer}Transfer-Encoding: chunked\r\n\r\n".encode() + body
            )
            assert one.recv(10) == b"HTTP/1.1 4"
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            rest_of(one)  # when the body is read
        assert requests_of_all(house) - counted >= n_chunks / EVENTS_OF_A_REQUEST


@pytest.mark.parametrize("path", ["/v1/keys", "/v1/shares", "/tinker/api/v1/create_session"])
def test_thousands_of_faults_of_a_body_are_one_error(house: House, path: str) -> None:
    """To name them took a hundred times as long as to find them."""
    for many in ({f"{number}": "" for number in range(8_000)}, {"scope": ["x"] * 16_000, "tags": [1] * 16_000}):
        answer = house.ask("POST", path, json=many)
        assert answer.status_code in (400, 422)
        assert len(answer.content) < 1000
    assert "fields or values are unknown" in house.ask("POST", path, json={f"{one}": 1 for one in range(16_000)}).text
    assert "fields or values are unknown" not in house.ask("POST", path, json={"unknown": 1, "other": 1}).text


def test_a_right_is_looked_at_before_a_body_is_parsed(house: House) -> None:
    for key, status in (("none", 401), ("wrong", 401), ("ours", 403)):
        house.refused(
            status, "PUT", "/v1/tenants/us/limits", key, content=b"{", headers={"content-type": "application/json"}
        )


def test_values_of_a_stranger_are_few(house: House) -> None:
    body = json.dumps({"jobs": [0.5] * (MOST_VALUES_OF_NOBODY + 1)})
    head = {"content-type": "application/json"}
    for key in ("none", "wrong"):
        house.refused(401, "POST", "/v1/submissions", key, content=body, headers=head)


def test_many_jobs_with_many_texts_each_are_read(house: House) -> None:
    """As many as a submission may have, of 60 texts and nine lists: the second name is refused, when all have been read."""
    jobs = [{"job": {"name": "same", "lora": [[]] * 7, "x": ["text"] * 56}} for _ in range(MOST_SUBMITTED)]
    assert house.ask("POST", "/v1/submissions", json={"jobs": jobs}).status_code == 400


def test_a_long_body_with_half_a_character_is_refused_by_its_reason(house: House) -> None:
    """A long history of an agent, with an emoji that was cut, which no tokenizer reads."""
    body = json.dumps({"model": "nothing", "messages": [{"role": "user", "content": "\ud83d"}] * 1500})
    answers = [house.ask("POST", "/v1/chat/completions", content=one, headers=JSON) for one in (body, body[:-1])]
    assert [answer.status_code for answer in answers] == [400, 400], answers[0].text
    assert "half of a surrogate pair" in answers[0].text


@pytest.mark.parametrize("key", ["new", "wrong"])
def test_a_key_that_is_not_known_is_looked_up_at_the_cost_of_its_address(tmp_path: Path, key: str) -> None:
    rate = RateConfig(requests_per_second=0.01, burst=10)
    with open_house(tmp_path, rate=rate) as house:
        with statements() as asked:
            for number in range(20):
                text = f"mk-{number}"
                if key == "new":
                    _, text = house.store.tenants.create_key(f"tenant-{number}", "a", "member", None)
                house.keys["one"] = text
                status = house.ask("GET", "/v1/me", "one").status_code
                assert status == (200 if key == "new" else 401 if number < 10 else 429)
        if key == "wrong":
            assert sum("keys.digest = " in one for one in asked) == 10
        else:
            house.refused(401, "GET", "/v1/me", "wrong")


def test_a_lease_costs_one_request_whatever_it_holds(tmp_path: Path) -> None:
    with open_house(tmp_path, rate=RateConfig(requests_per_second=0.01, burst=20)) as house:
        job = house.ask("POST", "/v1/jobs", json={**tiny("scored"), "reward": "worker"}).json()["id"]
        work = {"reward": {"args": {}}, "problem": {"text": "x" * 2**23}, "completions": ["a"]}
        house.service.reward_workers.units.ask(job, key_of(work), 0, work)
        lease = {"worker": "w", "wait_seconds": 0}
        answer = house.ask("POST", f"/v1/jobs/{job}/work/rewards/lease", json=lease)
        assert len(answer.content) > 2**23
        assert house.ask("GET", "/v1/me").status_code == 200


def test_every_route_reads_its_body_within_limits(house: House) -> None:
    routes = [route for module in ROUTES for route in module.router.routes]
    own = [one for one in house.app.routes if isinstance(one, APIRoute)]
    assert [one for one in (*routes, *own) if not isinstance(one, TenantRoute)] == []


def test_only_dependencies_that_ask_the_database_take_a_thread(house: House) -> None:
    def below(one: Dependant) -> Iterator[Any]:
        yield one.call
        for other in one.dependencies:
            yield from below(other)

    routes = [route for module in ROUTES for route in module.router.routes]
    found = {call for route in routes for one in route.dependant.dependencies for call in below(one)}
    threads = sorted(f"{one.__module__}.{one.__name__}" for one in found if not inspect.iscoroutinefunction(one))
    assert [name.removeprefix("motet.service.") for name in threads] == [
        "depends._named_job", "routes.files._named_file", "routes.fine_tuning._named", "routes.health.metrics_access",
        "tinker.runs._named",
    ]  # fmt: skip


def test_the_document_is_made_once(house: House) -> None:
    first = house.http.get("/openapi.json")
    house.app.openapi_schema = {"made": "again"}
    assert house.http.get("/openapi.json").content == first.content


def test_every_route_is_handled_in_few_events(tmp_path: Path) -> None:
    """What the loop handles for a request does not depend on how its client cuts it."""
    body, cut = b'{"a": "' + b"x" * 8000 + b'"}', b""
    for place in range(0, len(body), 64):
        cut += b"%x\r\n%b\r\n" % (len(part := body[place : place + 64]), part)
    routes = [f"{min(route.methods)} {route.path}" for module in ROUTES for route in module.router.routes]
    with open_house(tmp_path, rate=RateConfig(requests_per_second=None)) as house:
        seen = house.connections.handled
        for method, _, path in (route.partition(" ") for route in sorted(routes, key="DELETE /v1/login".__eq__)):
            if path.endswith("/stream"):
                continue
            head = f"{method} {re.sub(r'{[^}]*}', 'x', path)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Authorization: Bearer {house.keys['theirs']}\r\nContent-Type: application/json\r\n"
            whole = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + cut + b"0\r\n\r\n"
            before = dataclasses.replace(seen)
            with connected(house) as one:
                one.sendall(whole)
                assert rest_of(one).startswith(b"HTTP/1.1 ")
            assert seen.bytes - before.bytes <= len(whole), path
            assert seen.reads - before.reads <= 16, path
            assert seen.events - before.events <= len(body) // 64 + 20, path


# --- reads that take long -----------------------------------------------------------------------------------------------------


def test_reads_of_a_tenant_wait_for_each_other_and_nobody_elses_do(house: House) -> None:
    begun, over = threading.Event(), threading.Event()
    us = house.store.tenants.made("us").id

    def hold() -> None:
        begun.set()
        over.wait()

    house.service.answer_threads.begin(us, hold)
    assert begun.wait(PATIENCE)
    encode = house.service.encode_threads.answer
    for size in (0, FEW_BYTES + 1):  # of what a model has answered
        asyncio.run_coroutine_threadsafe(encode(us, size, dict), house.app.state.loop).result(PATIENCE)
    with ThreadPoolExecutor() as pool:
        own = pool.submit(house.ask, "GET", "/v1/jobs/ended/steps?points=5000")
        for path in ("/v1/jobs", "/v1/models", "/v1/files", "/tinker/api/v1/training_runs"):
            assert house.ask("GET", path, "theirs").status_code == 200
        assert house.ask("GET", "/readyz", "none").status_code == 503
        assert not own.done()
        over.set()
        assert own.result(PATIENCE).status_code == 200


def test_reads_of_many_tenants_hold_up_neither_chats_nor_a_health_check(house: House) -> None:
    begun, over = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        begun.release()
        over.wait()

    for number in range(threads := house.service.answer_threads._most):
        house.service.answer_threads.begin(f"tenant-{number}", hold)
    try:
        assert all(begun.acquire(timeout=PATIENCE) for _ in range(threads))
        assert house.ask("GET", "/readyz", "none").status_code == 503
        encoded = house.service.encode_threads.answer("us", FEW_BYTES + 1, dict)
        assert asyncio.run_coroutine_threadsafe(encoded, house.app.state.loop).result(PATIENCE).body == b"{}"
    finally:
        over.set()


def test_the_size_of_an_answer_is_counted_as_far_as_it_matters() -> None:
    assert 300 <= rough_size({"a": ["x" * 100] * 3, "b": {"c": None}}, FEW_BYTES) <= 400
    for large in ([0.5] * FEW_BYTES, {"a": ["x" * FEW_BYTES, "y"]}, [{"a": "x"}] * FEW_BYTES):
        assert rough_size(large, FEW_BYTES) > FEW_BYTES


def test_steps_are_read_from_the_database_once(house: House) -> None:
    path = "/v1/jobs/ended/steps?points=5000"
    before = house.ask("GET", path).json()
    house.recorder.record_step(house.job["id"], {"step": 2, "loss": float("nan"), "eval": {"reward": 1.0}, "more": "é"})
    for reads in (1, 0):
        with statements() as asked:
            now = house.ask("GET", path).json()
        assert sum("events.data" in one for one in asked) == reads
        assert now["data"] == [*before["data"], {"step": 2, "loss": None, "eval": {"reward": 1.0}, "more": "é"}]
        assert now["after"] > before["after"]
    assert house.ask("GET", f"{path}&field=eval").json()["data"][-1] == {"step": 2, "eval": {"reward": 1.0}}


ROW = {"name": "a", "type": "string_check", "operation": "eq", "reference": "{{item.a}}", "input": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/fine_tuning/alpha/graders/run", {"grader": ROW, "model_sample": "x", "item": {"a": [0.5] * 20_000}}),
        ("/v1/fine_tuning/alpha/graders/validate", {"grader": {**ROW, "reference": [""] * 20_000}}),
        ("/v1/chat/completions", {"model": "none", "messages": [], "tools": [{"a": [0.5] * 20_000}]}),
        ("/v1/chat/completions", {f"{one}": 0.5 for one in range(16_000)}),
    ],
    ids=["row", "grader", "tools", "fields"],
)
def test_the_loop_looks_at_many_values_at_once(house: House, path: str, body: Any) -> None:
    """Calls that its thread makes are counted: to look at each value of a request is a call or more for each."""
    loop, calls = house.app.state.loop, list[str]()

    def count(_: object, event: str, what: object) -> None:
        if "call" in event:
            calls.append(str(what))

    house.ask("POST", path, json=body)  # what is made once is made
    asyncio.run_coroutine_threadsafe(_profiled(count), loop).result()
    try:
        house.ask("POST", path, json=body)
    finally:
        asyncio.run_coroutine_threadsafe(_profiled(None), loop).result()
    assert 100 < len(calls) < 10_000


async def _profiled(count: Any) -> None:
    sys.setprofile(count)


@pytest.mark.parametrize(
    ("path", "request_", "elsewhere"),
    [
        (
            "/v1/files",
            {"files": {"file": ("rows.jsonl", b'{"prompt": "a", "answer": "b"}\n' * 200)}},
            "FormReader._body",
        ),
        ("/v1/submissions", {"json": {"jobs": [[0.5] * 10_000]}}, "JSONDecoder.decode"),
    ],
    ids=["form", "numbers"],
)
def test_what_takes_long_for_a_long_body_is_done_elsewhere(
    house: House, path: str, request_: Any, elsewhere: str
) -> None:
    """Forms are searched in threads, and many values are not read by Python's parser."""
    loop, called = house.app.state.loop, set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_qualname)

    asyncio.run_coroutine_threadsafe(_profiled(note), loop).result()
    try:
        house.ask("POST", path, **request_)
    finally:
        asyncio.run_coroutine_threadsafe(_profiled(None), loop).result()
    assert "_Body.receive" in called
    assert elsewhere not in called


@pytest.mark.parametrize("query", ["limit=1", "limit=1&after=many-60", "limit=1&after=many-60&order=asc"])
def test_a_page_of_files_reads_what_it_shows(house: House, query: str) -> None:
    row: Any = {"tenant_id": house.store.tenants.find("us").id, "filename": "rows.jsonl", "bytes": 1, "rows": 1}  # type: ignore[union-attr]
    many = [StoredFile(id=f"many-{n}", created=n, **row) for n in range(100)]
    read = list[StoredFile]()

    def listen(one: StoredFile, _: object) -> None:
        read.append(one)

    with house.store.transaction() as session:
        session.add_all(many)
    event.listen(StoredFile, "load", listen)
    try:
        assert len(house.ask("GET", f"/v1/files?{query}").json()["data"]) == 1
    finally:
        event.remove(StoredFile, "load", listen)
        for one in many:
            house.store.delete_file(one.id)
    assert len(read) < 20


def test_a_digest_of_work_is_that_of_its_whole_text() -> None:
    """Jobs that began before find their scores again."""
    texts = ["é\ud800", "", "x" * 3000]
    work = {
        "reward": {"args": {"b": 1, "a": None}},
        "problem": {"id": 3, "row": [{"z": 1.5}]},
        "completions": texts,
        "transcripts": [],
    }
    whole = json.dumps(work, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
    assert key_of(work) == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/jobs", {"content": b'{"a": "' + b"x" * 9000, "headers": {"content-type": "application/json"}}),
        ("/v1/jobs", {"json": {"name": "a", "odd": ["x"] * 99}}),
        ("/v1/jobs", {"content": b"[" * 1000, "headers": {"content-type": "application/json"}}),
        ("/v1/submissions", {"json": {"jobs": [{"job": {"name": "a", "steps": "x"}}] * 2}}),
        ("/v1/files", {"files": {"file": ("a.jsonl", b'{"a":' + b"x" * 9000)}}),
        ("/v1/nothing", {"content": b"x" * 9000}),
    ],
    ids=["broken", "fields", "nested", "several", "file", "nowhere"],
)
def test_a_refused_body_is_freed_without_a_collection_of_garbage(house: House, path: str, request_: Any) -> None:
    """A collection that frees many bodies holds up everybody."""

    def alive() -> list[str]:
        kept = (_Body, _Request, FormReader, ConfigError, RequestValidationError, json.JSONDecodeError)
        return [type(one).__name__ for one in gc.get_objects() if issubclass(type(one), kept)]  # `__class__` may warn

    gc.collect()
    gc.disable()
    try:
        before = len(alive())
        for _ in range(8):
            assert house.ask("POST", path, **request_).status_code in (400, 404, 422)
        wait_until(lambda: len(alive()) <= before + 1)  # each thread keeps what it did last until it rests
    finally:
        gc.enable()


@pytest.mark.soak
@pytest.mark.alone
def test_no_route_holds_the_loop(tmp_path: Path) -> None:
    """Each route with the dearest requests that it allows, with a key and without; `python -m bench.loop` prints them."""
    figures = measured(tmp_path)
    routes = {
        f"{method} {route.path}" for module in ROUTES for route in module.router.routes for method in route.methods
    }
    assert {one.route for one in figures} == routes
    slow = {f"{one.route}, {one.worst}": one.turn for one in figures if one.turn > MOST_SECONDS}
    assert slow == {}
    assert {one.route: one.share for one in figures if one.share > MOST_SHARE} == {}
    assert TURNS.longest_collection <= MOST_COLLECTION
