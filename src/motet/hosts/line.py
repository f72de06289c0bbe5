"""The connection to the service. While its HTTP process is away, the host works on.

The parent of both sends a connection to each HTTP process in turn over this process's standard input. Messages that a
service must store (`KEPT`) are sent again to the next one, until they are confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from motet.core.errors import EngineError
from motet.hosts import messages as m
from motet.process.channel import ChannelMessage, Parent, decode, encode

KEPT = (m.JobChanged, m.JobStepped, m.JobWorked, m.UsageWindow)
"""Messages that wait until the service has written them down (`EventKept`)."""
MOST_KEPT = 2**26
"""Bytes of messages that wait for an HTTP process; a host with more of them ends."""


class Gone(ChannelMessage, frozen=True):
    """The HTTP process is gone; the next one sends its `StartHost`."""


class ServiceLine:
    """The HTTP processes of a service, one after another. Threads may share it."""

    def __init__(self, parent: socket.socket, say: Callable[[str], object], end: Callable[[], object]) -> None:
        """`parent` brings connections; `say` writes a line for an operator; `end` ends the process at once."""
        self._parent, self._say, self._end = parent, say, end
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        """The HTTP process that receives messages."""
        self._next: socket.socket | None = None
        """The HTTP process that receives messages after `resume`."""
        self._kept = deque[bytes]()
        self._waiting = 0
        """Bytes of kept messages."""
        self._started = self._ending = False
        self._first = queue.SimpleQueue[m.StartHost]()
        self._early: list[m.ToHost | Gone | None] = []
        self._deliver: Callable[[m.ToHost | Gone | None], object] | None = None
        threading.Thread(target=self._serve, name="motet-service", daemon=True).start()

    # --- for the host -------------------------------------------------------------------------------------------------

    def first(self) -> m.StartHost:
        """Wait for the first message."""
        return self._first.get()

    def queue(self) -> asyncio.Queue[m.ToHost | Gone | None]:
        """Messages as they come; None when the host is to end."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[m.ToHost | Gone | None]()

        def deliver(message: m.ToHost | Gone | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(messages.put_nowait, message)

        with self._lock:
            for message in self._early:
                messages.put_nowait(message)
            self._deliver = deliver
        return messages

    def resume(self) -> None:
        """Send kept messages to the HTTP process whose `StartHost` has arrived, and all later messages too."""
        with self._lock:
            if self._next is not None:
                self._peer, self._next = self._next, None
                self._write(b"".join(self._kept))

    def send(self, message: ChannelMessage) -> None:
        """Send a message. Without an HTTP process, a `KEPT` message waits for the next one; others are dropped.

        Raises:
            EngineError: it is too long; nothing was sent.
        """
        line = encode(message)
        with self._lock:
            if isinstance(message, KEPT):
                self._kept.append(line)
                self._waiting += len(line)
            if self._peer is not None:
                self._write(line)
            full = self._peer is None and self._waiting > MOST_KEPT
        if full:
            self._say(
                f"the service is away, and {MOST_KEPT >> 20} MB of events wait: jobs go on from their last commits"
            )
            self._end()

    def _write(self, lines: bytes) -> None:
        try:
            assert self._peer is not None
            self._peer.sendall(lines)
        except OSError:  # the reader sees it too
            self._peer = None

    # --- in its own thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Hear one HTTP process after another until the host is to end."""
        while (connection := self._received()) is not None:
            with connection, contextlib.suppress(OSError, ValueError):
                self._hear(connection)
            with self._lock:
                self._peer = self._next = None
            if self._ending:
                self._pass_on(None)
                return
            self._say("the HTTP process is gone; jobs go on")
            self._pass_on(Gone())
        self._end()  # the parent is gone

    def _received(self) -> socket.socket | None:
        """The connection to the next HTTP process; None if the parent is gone."""
        numbers = list[int]()
        with contextlib.suppress(OSError):
            _, numbers, _, _ = socket.recv_fds(self._parent, 1, 1)
        return socket.socket(fileno=numbers[0]) if numbers else None

    def _hear(self, connection: socket.socket) -> None:
        """Take messages in until it hangs up."""
        connection.set_inheritable(False)
        with connection.makefile("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # it was killed while it wrote
                    return
                match message := decode(line, m.ToHost):
                    case m.EventKept():
                        with self._lock:
                            self._waiting -= len(self._kept.popleft()) if self._kept else 0
                    case m.StartHost():
                        self._begin(connection, message)
                    case m.Stop():
                        self._ending = True
                        if self._deliver is None:  # nothing is to be saved yet
                            self._end()
                        self._pass_on(message)
                    case _:
                        self._pass_on(message)

    def _begin(self, connection: socket.socket, start: m.StartHost) -> None:
        if self._started:
            with self._lock:
                self._next = connection
            self._pass_on(start)
        else:
            self._started, self._peer = True, connection
            self._first.put(start)

    def _pass_on(self, message: m.ToHost | Gone | None) -> None:
        with self._lock:
            if self._deliver is None:
                self._early.append(message)
            else:
                self._deliver(message)


class Outbox:
    """Sends messages in order, in a thread: the event loop neither encodes them nor waits for who reads them."""

    def __init__(self, parent: Parent[m.ToHost] | ServiceLine) -> None:
        self._parent, self._thread = parent, ThreadPoolExecutor(1, "motet-sending")

    def __call__(self, *messages: m.FromHost) -> Future[None]:
        """Send messages; the result comes when all are sent, an `EngineError` if one is too long."""
        return self._thread.submit(self._write, messages)

    def resume(self) -> None:
        """Send what follows to the HTTP process whose `StartHost` has arrived, after what it must store."""
        self._thread.submit(self._parent.resume)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._thread.shutdown()

    def _write(self, messages: Sequence[m.FromHost]) -> None:
        for message in messages:
            try:
                self._parent.send(message)
            except EngineError as error:
                if not isinstance(message, m.Answer):
                    raise
                self._parent.send(m.QuestionRefused(message.key, str(error)))
