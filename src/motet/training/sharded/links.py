"""How a group reaches one of its ranks: a process that it starts, or one that has connected."""

from __future__ import annotations

import contextlib
import select
import socket

from motet.channel import END_SECONDS, ChildProcess, ProcessStreams
from motet.training.sharded.messages import Leave


class Connected(ProcessStreams):
    """A rank that somebody else has started, perhaps on another machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(connection.makefile("rb"), connection.makefile("wb"))

    def how_it_ended(self) -> str:
        """Nobody here can know."""
        return "it hung up; its last words are where its launcher writes them"

    def kill(self) -> None:
        """Hang up: it ends at once."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # what was not sent yet goes nowhere
            self.out.close()
        self._connection.close()

    def close(self) -> None:
        """Let it leave, and hang up where it does not."""
        with contextlib.suppress(OSError, ValueError):  # it has hung up itself
            self.send(Leave())
            hung_up = select.poll()
            hung_up.register(self._connection, getattr(select, "POLLRDHUP", 0))
            hung_up.poll(1000 * END_SECONDS)
        self.kill()


Link = ChildProcess | Connected
