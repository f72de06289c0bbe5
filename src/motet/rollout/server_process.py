"""A server that Motet starts: on a free port, its output in a log, started again when it dies, ended by its own id.

It runs under a guard, a small process that ends the server and all its children when its own input does: nothing is left
behind, also when this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet.errors import EngineError

_END_SECONDS = 15.0
_STARTS_IN_VAIN = 3
"""In a row, without an answer between them, after which a server is given up."""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One server process and its guard."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Nothing is started yet."""
        self._command, self._env, self._log = list(command), dict(env), log
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        self._in_vain = 0
        self._swept = False
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._status() is None

    @property
    def pid(self) -> int:
        """Of the guard, which leads the server's process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def hopeless(self) -> bool:
        """Whether it ended again and again before it had answered once."""
        return self._in_vain >= _STARTS_IN_VAIN

    def answered(self) -> None:
        """It answered somebody since its last start."""
        self._answered = True

    @property
    def ending(self) -> str:
        """How it ended, and the last lines that it wrote."""
        status = None if self._process is None else self._status()
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
        last = [line for line in lines if "rror" in line][-1:] or lines[-1:]
        return f"exit status {status}; {' '.join(last)[:300]}; all it wrote is in {self._log}"

    def start(self) -> None:
        """Start it, or start it again.

        Raises:
            EngineError: its program cannot be run, or it ends whenever it is started.
        """
        if self._process is not None:
            self._reap()
            self._in_vain = 0 if self._answered else self._in_vain + 1
            if self.hopeless:
                raise EngineError(self.ending)
        self.starts += 1
        self._answered = False
        guard = Path(__file__).with_name("server_guard.py")
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(guard), *self._command],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise EngineError(f"the server's guard cannot be started, its log is to be {self._log}: {error}") from error
        self._swept = False

    def close(self) -> None:
        """End it, and wait until it has."""
        self._reap()

    def _reap(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(_END_SECONDS + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._status()

    def _status(self) -> int | None:
        """Exit status of the guard, if it has ended.

        What is left of its group ends at that moment and not later, when the group's number may be somebody else's.
        """
        assert self._process is not None
        status = self._process.poll()
        if status is not None and not self._swept:
            self._swept = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return status
