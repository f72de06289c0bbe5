"""Links from a group to its ranks: to a process that it starts, or to one that has connected."""

from __future__ import annotations

import contextlib
import select
import socket

from motet.process.channel import END_SECONDS, ChildProcess, ProcessStreams
from motet.training.sharded.messages import Leave


class Connected(ProcessStreams):
    """A rank that was started elsewhere, perhaps on another machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(connection.makefile("rb"), connection.makefile("wb"))

    def how_it_ended(self) -> str:
        """The reason is known only to the launcher."""
        return "it disconnected; see the output of its launcher"

    def kill(self) -> None:
        """Disconnect; the rank then exits at once."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # unsent data is discarded
            self.out.close()
        self._connection.close()

    def close(self) -> None:
        """Ask it to leave, and disconnect after a time limit."""
        with contextlib.suppress(OSError, ValueError):  # it has disconnected itself
            self.send(Leave())
            hung_up = select.poll()
            hung_up.register(self._connection, getattr(select, "POLLRDHUP", 0))
            hung_up.poll(1000 * END_SECONDS)
        self.kill()


Link = ChildProcess | Connected
