"""The connection to the service. If the service dies, the host keeps working, and the next service takes it over.

The host listens on a Unix socket. The connecting service sends one half of a token, the host the other. Messages that a
service must store (`KEPT`) are sent again to the next one, until they are confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from motet.core.checksums import replace_file
from motet.core.errors import DiskFull
from motet.hosts import messages as m
from motet.process.channel import Alive, ChannelMessage, decode, encode

KEPT = (m.JobChanged, m.JobStepped, m.JobWorked, m.UsageWindow)
"""Messages that wait until the service has written them down (`EventKept`)."""
MOST_KEPT = 2**26
"""Bytes of messages that wait for a service; with more of them the host saves its jobs and ends."""
_FIRST_SECONDS = 60.0
"""For the first process to connect."""
_LOOK_SECONDS = 0.5
_TOKEN_SECONDS = 5.0
_STOP_SECONDS = 120.0
"""Time for jobs to finish their step and save when no service connects."""


class Gone(ChannelMessage, frozen=True):
    """The process of the service is gone; the next one sends its `StartHost`."""


class ServiceLine:
    """The processes of a service, one after another. Threads may share it."""

    def __init__(
        self, listening: socket.socket, token: str, say: Callable[[str], object], end: Callable[[], object], usage: Path
    ) -> None:
        """`say` writes a line for an operator; `end` ends the process at once.

        `usage` is written at the end if no service has stored all device usage.
        """
        self._listening, self._token, self._say, self._end, self._usage = listening, token, say, end, usage
        listening.listen()  # again: a service finds this process's id by it
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        """The service that receives messages."""
        self._next: socket.socket | None = None
        """The service that receives messages after `resume`."""
        self._kept = deque[bytes]()
        self._waiting = 0
        """Bytes of kept messages."""
        self._start: m.StartHost | None = None
        self._first = queue.SimpleQueue[m.StartHost]()
        self._early: list[m.ToHost | Gone | None] = []
        self._deliver: Callable[[m.ToHost | Gone | None], object] | None = None
        self._ending = False
        self._replaced = False
        """Whether the service does not take this host over: it hears only what it must store."""
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
        """Send kept messages to the service whose `StartHost` has arrived, and all later messages too."""
        with self._lock:
            if self._next is not None:
                self._peer, self._next = self._next, None
                self._write(b"".join(self._kept))

    def send(self, message: ChannelMessage) -> None:
        """Send a message. Without a service, a `KEPT` message waits for the next one; others are dropped.

        Raises:
            EngineError: it is too long; nothing was sent.
        """
        line = encode(message)
        with self._lock:
            if isinstance(message, KEPT):
                self._kept.append(line)
                self._waiting += len(line)
            if self._peer is not None and (not self._replaced or isinstance(message, (*KEPT, m.Stopped, Alive))):
                self._write(line)
            alone = self._peer is None
        if alone and isinstance(message, m.Stopped | m.HostFailed):
            self._leave_usage()
        if alone and isinstance(message, m.Stopped):
            self._pass_on(None)

    def _write(self, lines: bytes) -> None:
        try:
            assert self._peer is not None
            self._peer.sendall(lines)
        except OSError:  # the reader sees it too
            self._peer = None

    def _leave_usage(self) -> None:
        with self._lock:
            kept = [line for line in self._kept if isinstance(decode(line, m.FromHost), m.UsageWindow)]
        try:
            if kept:
                replace_file(self._usage, b"".join(kept))
        except (OSError, DiskFull) as error:
            self._say(f"the device usage of {len(kept)} windows is lost: {error}")

    # --- in its own thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Listen to one process after another until the host is to end."""
        seconds = _FIRST_SECONDS
        while (connection := self._accepted(time.monotonic() + seconds)) is not None:
            with connection, contextlib.suppress(OSError, ValueError):
                self._hear(connection)
            with self._lock:
                self._peer = self._next = None
            if self._start is None:  # it was started for this service only
                self._end()
                return
            if self._ending:
                self._leave_usage()
                self._pass_on(None)
                return
            seconds = self._start.takeover_seconds
            self._say(f"the service is gone; jobs continue, and the next service has {seconds:g} s to take them over")
            self._pass_on(Gone())
        self._give_up()

    def _accepted(self, deadline: float) -> socket.socket | None:
        """A connection with the token; None if none arrived in time."""
        while self._waiting <= MOST_KEPT and (left := deadline - time.monotonic()) > 0:
            try:
                self._listening.settimeout(min(left, _LOOK_SECONDS))
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:
                return None
            if self._knows_token(connection):
                connection.settimeout(None)
                return connection
            connection.close()
            self._say("somebody without the token was refused")
        return None

    def _knows_token(self, connection: socket.socket) -> bool:
        half = len(self._token) // 2
        connection.settimeout(_TOKEN_SECONDS)
        try:
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            given = b""
            while len(given) < half and (part := connection.recv(half - len(given))):
                given += part
            if uid != os.getuid() or not hmac.compare_digest(given, self._token[:half].encode()):
                return False
            connection.sendall(self._token[half:].encode())
        except OSError:
            return False
        return True

    def _hear(self, connection: socket.socket) -> None:
        """Take messages in until it hangs up."""
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
                        if self._peer is self._next is None:  # a service that has no use for this host
                            self._hand_over(connection)
                        self._stop()
                    case _:
                        self._pass_on(message)

    def _begin(self, connection: socket.socket, start: m.StartHost) -> None:
        if self._start is None:
            with self._lock:
                self._start, self._peer = start, connection
            self._first.put(start)
        elif _alike(start, self._start) and not self._ending:
            self._say("another process of the service has taken over")
            with self._lock:
                self._next = connection
            self._pass_on(start)
        else:
            differs = [name for name in start.__struct_fields__ if getattr(start, name) != getattr(self._start, name)]
            reason = (
                f"the engine of the service before differs in {', '.join(differs) or 'time'}: it saves its jobs and ends, and "
                "another is started"
            )
            self._say(reason)
            self._hand_over(connection, m.HostFailed(reason))
            self._stop()

    def _hand_over(self, connection: socket.socket, *messages: ChannelMessage) -> None:
        with self._lock:
            self._peer, self._replaced = connection, True
            self._write(b"".join((*self._kept, *map(encode, messages))))

    def _stop(self) -> None:
        self._ending = True
        if self._deliver is None:  # nothing is to be saved yet
            self._end()
        self._pass_on(m.Stop())

    def _give_up(self) -> None:
        """Let jobs save, and end."""
        self._say("no service came: the engine saves its jobs and ends")
        self._listening.close()
        if self._start is None:
            self._end()
        self._stop()
        time.sleep(_STOP_SECONDS)
        self._leave_usage()
        self._end()

    def _pass_on(self, message: m.ToHost | Gone | None) -> None:
        with self._lock:
            if self._deliver is None:
                self._early.append(message)
            else:
                self._deliver(message)


def _alike(start: m.StartHost, before: m.StartHost) -> bool:
    """Whether a host that was started so serves this start too; jobs that have begun keep its kernels in any case."""
    kept = start.own is not None and start.own.kept
    return (structs.replace(start, own=before.own) if kept else start) == before
