"""Limits on what a connection may send before its key is known: the lines of a head, the chunks of a body, trailers.

Each costs far more time than its bytes suggest. Whoever exceeds a limit gets an error, and the connection closes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl

MOST_HEAD, MOST_LINES = 2**14, 100
"""Bytes and lines of the head of a request."""
FREE_CHUNKS, CHUNK = 256, 256
"""Chunks of a body of any size, and the bytes that each further one must have on average."""
MOST_PART = 2**11
"""Bytes of a chunk's header, or of the trailers of a body."""
_BLANK = re.compile(rb"\n\r?\n")
_LENGTH, _CODING = b"content-length", b"transfer-encoding"


@dataclass
class Handled:
    """What the event loop has handled of all connections."""

    reads: int = 0
    """Pieces read."""
    bytes: int = 0
    events: int = 0
    """Events of requests, each of which takes about 20 µs: heads, chunks and ends, and looks for them."""


class Parser(h11.Connection):
    """The server's end of a connection, within the limits. A head is parsed when it is whole."""

    def __init__(self, handled: Handled | None = None) -> None:
        super().__init__(h11.SERVER, MOST_PART)
        self.handled = handled or Handled()
        self._head = bytearray()
        self.wrong: h11.RemoteProtocolError | None = None
        """The limit that was exceeded."""
        self._chunks = self._bytes = self.events = 0
        self.chunked = False
        """Whether a body arrives in chunks."""

    def receive_data(self, data: bytes) -> None:
        """Take a part of a request."""
        if self.their_state is not h11.IDLE:
            super().receive_data(data)
            return
        begin = max(0, len(self._head) - 2)
        self._head += data
        end = _BLANK.search(self._head, begin)
        size = len(self._head) if end is None else end.start()
        if size > MOST_HEAD or self._head.count(b"\n", 0, size) > MOST_LINES:
            most = f"more than {MOST_LINES} lines, or {MOST_HEAD} bytes"
            self.wrong = h11.RemoteProtocolError(f"the head of a request has {most}", 431)
        elif end is not None or self._head[0] < 0x21:  # as in the first bytes of TLS, which has no lines
            whole, self._head = bytes(self._head), bytearray()
            super().receive_data(whole)

    def next_event(self) -> Any:
        """The next event, as of `h11`.

        Raises:
            h11.RemoteProtocolError: the request is not valid, or exceeds a limit.
        """
        if self.wrong is not None:
            raise self.wrong
        event = super().next_event()
        self.handled.events += 1
        self.events += 1
        if type(event) is h11.Data:
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK:
                words = f"after {FREE_CHUNKS} chunks, a body needs {CHUNK} bytes for each; send larger ones"
                self.wrong = h11.RemoteProtocolError(words, 413)
        elif type(event) is h11.Request:
            names = {name for name, _ in event.headers}
            self._chunks = self._bytes = 0
            self.chunked = _CODING in names
            if self.chunked and _LENGTH in names:  # a proxy may read the other one
                self.wrong = h11.RemoteProtocolError(
                    "a request has a content-length and a transfer-encoding; send one", 400
                )
        if self.wrong is not None:
            raise self.wrong
        return event

    def start_next_cycle(self) -> None:
        """Expect another request."""
        super().start_next_cycle()
        if rest := self.trailing_data[0]:  # its head is checked as that of the first
            self._receive_buffer = type(self._receive_buffer)()
            self.receive_data(rest)


class Flow(FlowControl):  # type: ignore[misc,unused-ignore]
    """Whether a connection is read: not while its body waits to be taken, and not while it is held."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.held = False

    def hold(self) -> None:
        """Read nothing until `release`."""
        self.held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """End `hold`."""
        self.held = False
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        """Read again, unless it is held."""
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()
