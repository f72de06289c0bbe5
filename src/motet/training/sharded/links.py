"""How a group reaches one of its ranks: a process that it starts, or one that has connected."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Protocol

from motet.channel import encode
from motet.training.sharded.messages import Leave

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_END_SECONDS = 5.0


class Link(Protocol):
    """A rank's two streams, and its end."""

    @property
    def lines(self) -> IO[bytes]:
        """What it sends."""

    @property
    def out(self) -> IO[bytes]:
        """What it is sent; it ends when this does."""

    def how_it_ended(self) -> str:
        """Wait for its end: `exit status 1`."""

    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:
        """Let it end, and wait for that."""


class OwnProcess:
    """A rank on this machine, started here."""

    def __init__(self, log: Path | None) -> None:
        """`log` is where its errors go; thrown away without one."""
        self._log = log
        with contextlib.ExitStack() as stack:
            stderr = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "motet.training.sharded.process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                env={**os.environ, "PYTHONPATH": _PACKAGE_ROOT}, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.out: IO[bytes] = self._process.stdin
        self.lines: IO[bytes] = self._process.stdout
        self.pid = self._process.pid

    def how_it_ended(self) -> str:
        """Its status, and where its errors are."""
        status = self._process.wait()
        what = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return what if self._log is None else f"{what}; its last words are in {self._log}"

    def kill(self) -> None:
        """By its id."""
        self._process.kill()

    def close(self) -> None:
        """Close its input, and kill it where it does not end."""
        with contextlib.suppress(OSError):
            self.out.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Connected:
    """A rank that somebody else has started, perhaps on another machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.out: IO[bytes] = connection.makefile("wb")
        self.lines: IO[bytes] = connection.makefile("rb")

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
            self.out.write(encode(Leave()))
            self.out.flush()
            hung_up = select.poll()
            hung_up.register(self._connection, getattr(select, "POLLRDHUP", 0))
            hung_up.poll(1000 * _END_SECONDS)
        self.kill()
