"""A server that Motet starts: on a free port, with its output in a log, restarted when it dies.

It runs under a guard, a small process that ends the server and all its children when the guard's input ends. So nothing
is left behind, even if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet.core.errors import EngineError
from motet.process.child import ChildProcess, guard
from motet.process.ending import how_it_ended

_END_SECONDS = 15.0
_TAIL_BYTES = 2**16
"""Part of the log that is read for the reason of an end: servers write a line for each request."""
_STARTS_IN_VAIN = 3
"""Starts in a row without an answer after which a server is given up."""


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One server process and its guard."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command, self._env, self._log = list(command), dict(env), log
        self._process: ChildProcess | None = None
        self.answered = False
        """Whether it has answered since its last start; set by whoever asks it."""
        self._in_vain = 0
        self._swept = self._stopped = False
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether the server is running."""
        return self._process is not None and self._status() is None

    @property
    def pid(self) -> int:
        """Process id of the guard, which leads the server's process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def hopeless(self) -> bool:
        """Whether it ended repeatedly without ever answering."""
        return self._in_vain >= _STARTS_IN_VAIN

    @property
    def ending(self) -> str:
        """How it ended, and the last lines of its output."""
        status = None if self._process is None else self._status()
        status = status if status is None or status <= 128 else 128 - status  # as its guard reports a signal
        how = how_it_ended(status, stopped=self._stopped)
        lines: list[str] = []
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines()[-200:] if line.strip()]
        last = [line for line in lines if "rror" in line][-1:] or lines[-1:]
        return f"{how}; {' '.join(last)[:300]}; full output in {self._log}"

    def start(self) -> None:
        """Start or restart it.

        Raises:
            EngineError: its program cannot be run, or it ends after every start.
        """
        if self._process is not None:
            self.close()
            self._in_vain = 0 if self.answered else self._in_vain + 1
            if self.hopeless:
                raise EngineError(self.ending)
        self.starts += 1
        self.answered = False
        try:
            self._process = ChildProcess(guard("run", *self._command), self._log, quiet=True, env=self._env)
        except OSError as error:
            raise EngineError(f"the server's guard cannot be started (log: {self._log}): {error}") from error
        self._swept = self._stopped = False

    def close(self) -> None:
        """End the server and wait for its exit."""
        process = self._process
        if process is None:
            return
        self._stopped = self._stopped or process.poll() is None
        process.hang_up(_END_SECONDS + 5)
        self._status()

    def _status(self) -> int | None:
        """Exit status of the guard, if it has ended.

        Kills the rest of its process group at that moment, before the group's id can be reused.
        """
        assert self._process is not None
        status = self._process.poll()
        if status is not None and not self._swept:
            self._swept = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return status
