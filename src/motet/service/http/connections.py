"""Limits on connections: their number, in total and per address, and the time and the pieces to send a request in.

At the limit, the oldest connection with an incomplete request is closed for a new one. A connection that sends small
pieces is read seldom, so that what arrives meanwhile is read together.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from motet.config.service import HttpConfig
from motet.service.errors import error_body
from motet.service.http.log_limits import NO_FILES, Seldom
from motet.service.http.parsing import Flow, Handled, Parser

_log = logging.getLogger(__name__)
_MOST_FILES = 2**16
_SHARE = 0.75
"""Share of open files for connections; the rest is for the database, uploads and other processes."""
_AT_ONCE = 4
"""Connections accepted in one turn of the event loop; each takes about 0.1 ms."""
QUEUE = 2048
"""Connections that wait in the kernel to be accepted."""
_BODY_BYTES_PER_SECOND = 16 * 2**10
_SMALL, _FREE_READS = 4096, 16
"""Bytes of a small piece, and how many of them a request may have before its connection is read seldom."""
_REST_SECONDS, _READS_PER_SECOND = 0.02, 1000.0
"""Shortest time between two reads of small pieces, and the most of these reads of all connections together."""
_LEAST_ROOM, _ROOM_OF_A_TURN = 2**15, 2**17
"""How many bytes a small piece counts as, and how many are handled in one turn of the event loop."""
_SLICE = 2048
"""Bytes of chunks, heads and trailers that are parsed at once."""
BYTES_OF_A_REQUEST = 2**20
"""Bytes of a body that count as one request, if it is no JSON: they take 2 ms of the event loop."""
EVENTS_OF_A_REQUEST = 512
"""Events of a request's parts that count as one more request: they take 3 ms."""
_LEAST_CHARGE = 0.25
IDLE_SECONDS = 75
"""How long a connection is kept without a request: longer than clients keep one, lest it close under a request."""
MOST_UNREAD = 64 * 2**20
"""Bytes that a connection may send of a body that was refused."""
GONE = "motet.gone"
"""In the state of a request: an event that is set when its connection has ended."""


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as allowed; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


class Connections:
    """The open connections of a server. Use in one event loop."""

    def __init__(self, config: HttpConfig, files: int, charge: Callable[[Scope, float], bool]) -> None:
        """`files` is the process's limit of open files; `charge` is that of `Access`."""
        self.config, self.charge = config, charge
        self.most = min(config.connections or files, int(files * _SHARE))
        self.backlog = max(1, min(_AT_ONCE, (files - self.most) // 2))
        """Connections accepted at once."""
        self._of_address = Counter[str]()
        self._half = OrderedDict[_Guarded, None]()
        """Connections with incomplete requests, oldest first."""
        self._half_of_address: dict[str, OrderedDict[_Guarded, None]] = {}
        self._open = 0
        self.handled = Handled()
        self._held = 0
        """Connections that are not read for a moment."""
        self._room = _ROOM_OF_A_TURN
        """Bytes that this turn of the event loop has room for."""
        self._put_off = deque[tuple[_Guarded, bytes]]()
        """Pieces for later turns. Their connections are not read."""
        for name, kinds in (
            ("asyncio", (NO_FILES, "socket.send() raised")),
            ("uvicorn.error", ("Invalid HTTP", "Unsupported upgrade")),
        ):
            logging.getLogger(name).addFilter(Seldom(*kinds))
        _log.addFilter(Seldom("connections are refused"))

    def protocol(self, *args: Any, **options: Any) -> asyncio.Protocol:
        """Create the protocol of a new connection."""
        return _Guarded(self, *args, **options)

    def enter(self, one: _Guarded) -> bool:
        """Count a connection, closing another one if needed; False if there is no room."""
        address, most = one.address, self.config.connections_per_address
        if (
            most is not None
            and self._of_address[address] >= most
            and not self._drop(self._half_of_address.get(address))
        ):
            _log.warning("connections are refused: %s has %d open, the most for one address", address, most)
            return False
        if self._open >= self.most and not self._drop(self._half):
            _log.warning("connections are refused: %d are open, the most of this service", self._open)
            return False
        self._open += 1
        self._of_address[address] += 1
        return True

    def leave(self, one: _Guarded) -> None:
        """Remove a counted connection."""
        self.settle(one)
        self._open -= 1
        self._of_address[one.address] -= 1
        if not self._of_address[one.address]:
            del self._of_address[one.address]

    def await_request(self, one: _Guarded) -> None:
        """Mark a connection as waiting for a request."""
        self._half.setdefault(one)
        self._half_of_address.setdefault(one.address, OrderedDict()).setdefault(one)

    def settle(self, one: _Guarded) -> None:
        """Mark a connection's request as complete."""
        if self._half.pop(one, one) is None:
            of_address = self._half_of_address[one.address]
            del of_address[one]
            if not of_address:
                del self._half_of_address[one.address]

    def rest(self, one: _Guarded) -> None:
        """Read a connection again later: the later, the more of them rest."""
        self._held += 1
        one.flow.hold()
        asyncio.get_running_loop().call_later(max(_REST_SECONDS, self._held / _READS_PER_SECOND), self._rested, one)

    def puts_off(self, one: _Guarded, data: bytes) -> bool:
        """Whether a piece is handled in a later turn of the event loop, because this one has no room."""
        if self._room == _ROOM_OF_A_TURN:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._room > 0:
            self._room -= max(len(data), _LEAST_ROOM)
            return False
        one.flow.hold()
        self._put_off.append((one, data))
        return True

    def _turn(self) -> None:
        self._room = _ROOM_OF_A_TURN
        if self._put_off:  # before anything can fail
            asyncio.get_running_loop().call_soon(self._turn)
        while self._put_off and self._room > 0:
            one, data = self._put_off.popleft()
            self._room -= max(len(data), _LEAST_ROOM)
            one.flow.release()
            try:
                one.handle(data)
            except Exception:  # as asyncio does where a piece is handled at once
                one.give_up()
                raise

    def _rested(self, one: _Guarded) -> None:
        self._held -= 1
        one.flow.release()

    def _drop(self, half: OrderedDict[_Guarded, None] | None) -> bool:
        if not half:
            return False
        next(iter(half)).give_up()
        return True


class _Guarded(H11Protocol):  # type: ignore[misc,unused-ignore]
    """One connection, with limits on the time and the pieces of a request's head and body."""

    cycle: Any
    """None before the first request."""
    flow: Flow

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gone = asyncio.Event()
        self.app_state = {**self.app_state, GONE: self._gone}
        self._all, self._config = connections, connections.config
        self.timeout_keep_alive = IDLE_SECONDS
        self.address = ""
        self._counted = False
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        """Ends the connection if its client takes nothing of an answer."""
        self._state = ""
        self._since, self._received = 0.0, 0
        self.conn = self._parser = Parser(connections.handled)
        self._small = 0
        """Small pieces of the request so far."""
        self._owed = 0.0
        """Requests that were not charged yet, for bytes that no route reads."""
        self._paid = 0
        """Events that were charged."""
        self._unread = 0
        """Bytes of a body that arrived after its answer."""

    def connection_made(self, transport: Any) -> None:
        """Count the connection, or refuse it."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.address = network_of(transport.get_extra_info("peername"))
        self._counted = self._all.enter(self)
        if not self._counted:
            self._close(503)
            return
        self._look(begun=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._gone.set()
        self._stop()
        self._go_on_writing()
        super().connection_lost(exc)
        self._uncount()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        if not self._all.puts_off(self, data):
            self.handle(data)

    def handle(self, data: bytes) -> None:
        """Handle a part of a request in this turn of the event loop."""
        if not self._counted or self.transport.is_closing():
            return
        self._all.handled.reads += 1
        self._all.handled.bytes += len(data)
        self._received += len(data)
        cycle, done = self.cycle, 0
        answered = self._parser.our_state is h11.DONE and self._parser.their_state is h11.SEND_BODY
        while done < len(data) and not self.transport.is_closing():
            plain = self._parser.their_state is h11.SEND_BODY and not self._parser.chunked
            end = len(data) if plain else done + _SLICE
            super().data_received(data[done:end])
            done = end
        if answered:
            self._owed += len(data) / BYTES_OF_A_REQUEST
            self._unread += len(data)
            if self._unread > MOST_UNREAD:
                self.transport.close()
        self._pay(cycle or self.cycle)
        if self.transport.is_closing():
            return
        self._look(begun=True)
        if self._state == "nothing":
            self._small = 0
        elif answered or len(data) < _SMALL:
            self._small += 1
            if (answered or self._small > _FREE_READS) and not self.flow.held:
                self._all.rest(self)

    def _pay(self, cycle: Any) -> None:
        """Charge the request of a cycle, if it is known whose it is."""
        owed = self._owed + (self._parser.events - self._paid) / EVENTS_OF_A_REQUEST
        if owed > _LEAST_CHARGE and cycle is not None and self._all.charge(cycle.scope, owed):
            self._owed, self._paid = 0.0, self._parser.events

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser refuses."""
        self._stop()
        wrong = self._parser.wrong
        self._close(400 if wrong is None else wrong.error_status_hint, msg if wrong is None else str(wrong))

    def _should_upgrade(self) -> bool:
        return False

    def on_response_complete(self) -> None:
        """Wait for another request."""
        self._owed += len(self.cycle.body) / BYTES_OF_A_REQUEST
        self._pay(self.cycle)
        self._owed, self._paid, self._unread = 0.0, self._parser.events, 0
        super().on_response_complete()
        if self._counted:
            self._look(begun=False)

    def pause_writing(self) -> None:
        """Wait for the client to take more, not for ever."""
        super().pause_writing()
        seconds = self._config.body_seconds + self.transport.get_write_buffer_size() / _BODY_BYTES_PER_SECOND
        self._stuck = self.loop.call_later(seconds, self.give_up)

    def resume_writing(self) -> None:
        """The client has taken more."""
        super().resume_writing()
        self._go_on_writing()

    def _go_on_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def give_up(self) -> None:
        """Close it: for another one, or because its client takes nothing of an answer."""
        self._stop()
        self._uncount()
        self.transport.abort()

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._all.leave(self)

    def _look(self, *, begun: bool) -> None:
        """Start or stop the timer; `begun`: part of the head has arrived, or is required."""
        state = self._what_is_awaited()
        if state == "nothing":
            self._stop()
            self._all.settle(self)
        else:
            self._all.await_request(self)
            if state != self._state or (self._timer is None and begun):
                self._stop()
                self._since, self._received = self.loop.time(), 0
                if begun or state == "body":  # otherwise the server's own timer for idle connections runs
                    seconds = self._config.body_seconds / (3 if state == "head" else 1)
                    self._timer = self.loop.call_later(seconds, self._late)
        self._state = state

    def _what_is_awaited(self) -> str:
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            return "head"
        return "body" if cycle.more_body else "nothing"

    def _late(self) -> None:
        self._timer = None
        if self._state == "body":
            paused = self.flow.read_paused  # the service is slower than the client
            left = self._since + self._config.body_seconds + self._received / _BODY_BYTES_PER_SECOND - self.loop.time()
            if paused or left > 0:
                self._timer = self.loop.call_later(self._config.body_seconds if paused else left, self._late)
                return
        self._close(408)

    def _close(self, status: int, words: str = "") -> None:
        if self.cycle is None or not self.cycle.response_started:
            body = bytes(error_body(status, words).body) if words else b""
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
            )
            kind = "content-type: application/json\r\n" if body else ""
            self.transport.write(f"{head}{kind}\r\n".encode() + body)
        self.transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def network_of(peer: Any) -> str:
    """The address of a peer; for IPv6 its network, because one machine has many addresses there."""
    try:
        address = ipaddress.ip_address(peer[0])
    except (TypeError, ValueError, IndexError):
        return ""
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False).network_address)
