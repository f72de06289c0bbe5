"""Connections to a service in this process, the turns of its loop, and the requests that it counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from motet.service.http.auth import RateLimit
from tests.support.house import House
from tests.support.waiting import PATIENCE


def connected(house: House) -> socket.socket:
    """A connection to the service."""
    assert house.http.base_url.port is not None
    return socket.create_connection(("127.0.0.1", house.http.base_url.port), timeout=PATIENCE)


def rest_of(one: socket.socket) -> bytes:
    """What the service sends until it closes."""
    return b"".join(iter(lambda: one.recv(2**16), b""))


@contextlib.contextmanager
def turns_of(loop: asyncio.AbstractEventLoop, look: Callable[[], int]) -> Iterator[list[int]]:
    """What is seen at each turn of a loop, while the block runs."""
    seen, over = list[int](), threading.Event()

    def turn() -> None:
        seen.append(look())
        if not over.is_set():
            loop.call_soon(turn)

    loop.call_soon_threadsafe(turn)
    try:
        yield seen
    finally:
        over.set()


def requests_of_all(house: House, only: str = "") -> float:
    """The requests that were counted, of all or of one bucket, and not given back by time."""
    rate = next(one for one in vars(house.service.access).values() if isinstance(one, RateLimit))
    assert rate._config is not None
    return sum(rate._config.burst - left for whose, (left, _) in rate._buckets.items() if whose == (only or whose))
