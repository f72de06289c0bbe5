"""What a stranger's connection may cost the event loop: events are counted, and each kind is bounded."""

from __future__ import annotations

import json
import socket

import h11
import pytest

from motet.service.http.parsing import CHUNK, FREE_CHUNKS, MOST_HEAD, MOST_LINES, Parser
from tests.support.house import House

HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = 10**6


def events_of(text: bytes, piece: int = 2**16) -> tuple[int, h11.RemoteProtocolError | None]:
    """Events of one request whose bytes come in pieces, and why it was refused."""
    parser = Parser()
    try:
        for place in range(0, len(text), piece):
            parser.receive_data(text[place : place + piece])
            while type(event := parser.next_event()) is not h11.EndOfMessage and not isinstance(event, type):
                pass
    except h11.RemoteProtocolError as error:
        return parser.events, error
    return parser.events, None


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


def connected(house: House) -> socket.socket:
    """A connection to the service."""
    assert house.http.base_url.port is not None
    return socket.create_connection(("127.0.0.1", house.http.base_url.port), timeout=30)


def rest_of(one: socket.socket) -> bytes:
    """What the service sends until it closes."""
    return b"".join(iter(lambda: one.recv(2**16), b""))


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
        reads = house.connections.reads
        for place in range(len(text)):
            one.send(text[place : place + 1])
        assert rest_of(one).startswith(b"HTTP/1.1 200 ")
        assert house.connections.reads - reads < len(text) / 10


def test_requests_behind_one_another_are_answered_in_turn(house: House) -> None:
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    with connected(house) as one:
        one.sendall((ask + b"\r\n") * 20 + ask + b"Connection: close\r\n\r\n")
        assert rest_of(one).count(b"HTTP/1.1 200 ") == 21
    with connected(house) as one:  # its limits hold for those behind the first, too
        one.sendall(ask + b"\r\n" + ask + b"a:\r\n" * (MOST_LINES + 1) + b"\r\n")
        assert rest_of(one).count(b"HTTP/1.1 200 ") == 1
