"""Tries to break out of the wall: `python -m motet.process.breaking_out` prints what a process behind it could do all the same.

Each attempt is possible without the wall, on any machine and for any user, and does no harm to the other process: signals are
SIGCONT, or number 0, which is not sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import termios
from collections.abc import Callable, Mapping

from motet.core.errors import WallError
from motet.process import importable, wall
from motet.process.system_calls import numbers_of

_FIOSETOWN, _SIOCSPGRP, _FIOASYNC = 0x8901, 0x8902, 0x5452
_F_SETOWN_EX, _OF_PROCESS, _DN_ACCESS, _IPC_INFO = 15, 1, 1, 3
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_QUEUED = -1
_CAPABILITIES = 0x20080522


class _Outside:
    """Another process, and descriptors that a process may have from before."""

    def __init__(self) -> None:
        self.process, self.group = os.getppid(), os.getpgid(os.getppid())
        self.place = os.open("/", os.O_RDONLY)
        with tempfile.NamedTemporaryFile() as file:
            self.file = os.open(file.name, os.O_RDONLY)
        self.pipe, self.socket = os.pipe(), socket.socketpair()
        self.terminal = self.pipe[0]
        with contextlib.suppress(OSError):  # a container may have none
            self.terminal = os.openpty()[1]
        self._library = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: object) -> None:
        """A system call."""
        (number,) = numbers_of([name])
        if self._library.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def signal_by_pipe(self, command: int, owner: int | bytes) -> None:
        """Make the other process the owner of a pipe, and signal it by writing."""
        reader, writer = self.pipe
        fcntl.fcntl(reader, command, owner)
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | fcntl.FASYNC)
        os.write(writer, b"x")

    def own_socket(self, request: int) -> None:
        """Make the other process the owner of a socket."""
        fcntl.ioctl(self.socket[0], request, struct.pack("i", self.process))


def _set_aside(gigabytes: int) -> None:
    """Raise the memory limit as far as possible, then allocate more than that."""
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, limits)
    bytearray(gigabytes << 30)


def attempts() -> Mapping[str, Callable[[], object]]:
    """The attempts, in words that fit before `was possible`. All but those in `wall.NEVER_HELD` must fail behind the wall."""
    there = _Outside()
    return {**_on_files(there), **_on_signals(there), **_on_processes(there), "taking memory": lambda: _set_aside(8)}


def _on_files(there: _Outside) -> dict[str, Callable[[], object]]:
    return {
        "reading a file": lambda: open("/etc/passwd", "rb").close(),
        "listing a directory": lambda: os.listdir("/"),
        "reading another process": lambda: open(f"/proc/{there.process}/environ", "rb").close(),
        "writing a file": lambda: open(f"{tempfile.gettempdir()}/motet-wall-{os.getpid()}", "wb").close(),
        "changing a file's mode": lambda: os.chmod(__file__, os.stat(__file__).st_mode),
        "watching files": lambda: there.call("inotify_init1", 0),
        "opening a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "opening a local socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "changing the terminal": lambda: fcntl.ioctl(there.terminal, termios.TIOCSWINSZ, bytes(8)),
        "filling others' pipes": lambda: fcntl.fcntl(there.pipe[1], fcntl.F_SETPIPE_SZ, 1 << 16),
        "reading others' semaphores": lambda: there.call("semctl", 0, 0, _IPC_INFO, ctypes.create_string_buffer(256)),
        "reading others' shared memory": lambda: there.call("shmctl", 0, _IPC_INFO, ctypes.create_string_buffer(256)),
    }  # fmt: skip


def _on_signals(there: _Outside) -> dict[str, Callable[[], object]]:
    other, reader = there.process, there.pipe[0]
    queued = struct.pack("3i116x", 0, 0, _QUEUED)
    return {
        "signalling a process": lambda: os.kill(other, 0),
        "signalling a group": lambda: os.killpg(there.group, 0),
        "signalling every process": lambda: os.kill(-1, 0),
        "signalling a thread": lambda: there.call("tgkill", other, other, 0),
        "signalling any thread": lambda: there.call("tkill", other, 0),
        "queueing a signal": lambda: there.call("rt_sigqueueinfo", other, 0, queued),
        "signalling by a descriptor": lambda: os.pidfd_open(other),
        "signalling by a pipe": lambda: there.signal_by_pipe(fcntl.F_SETOWN, other),
        "signalling by a pipe's thread": lambda: there.signal_by_pipe(
            _F_SETOWN_EX, struct.pack("2i", _OF_PROCESS, other)
        ),
        "signalling by a socket": lambda: there.own_socket(_FIOSETOWN),
        "signalling by a socket's group": lambda: there.own_socket(_SIOCSPGRP),
        "signalling by a lease": lambda: fcntl.fcntl(there.file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "signalling by a directory": lambda: fcntl.fcntl(there.place, fcntl.F_NOTIFY, _DN_ACCESS),
        "signalling by input (O_ASYNC)": lambda: fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.FASYNC),
        "signalling by input (FIOASYNC)": lambda: fcntl.ioctl(reader, _FIOASYNC, struct.pack("i", 1)),
        "choosing a signal": lambda: fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGCONT),
    }


def _on_processes(there: _Outside) -> dict[str, Callable[[], object]]:
    other = there.process
    pointers = [ctypes.create_string_buffer(64) for _ in range(2)]
    capabilities = struct.pack("Ii", _CAPABILITIES, other)
    clock = ~other << 3 | 2
    return {
        "starting a process": os.fork,
        "running a program": lambda: os.execv("/bin/true", ["true"]),
        "leaving its session": os.setsid,
        "joining another group": lambda: os.setpgid(0, there.group),
        "outliving its parent": lambda: there.call("prctl", _PR_SET_PDEATHSIG, 0, 0, 0, 0),
        "hiding from its parent": lambda: there.call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0),
        "limiting a process": lambda: resource.prlimit(other, resource.RLIMIT_CORE),
        "finding a process by its group": lambda: os.getpgid(other),
        "finding a process by its session": lambda: os.getsid(other),
        "finding a process by its priority": lambda: os.getpriority(os.PRIO_PROCESS, other),
        "finding a process by its processors": lambda: os.sched_getaffinity(other),
        "finding a process by its scheduling": lambda: os.sched_getscheduler(other),
        "finding a process by its disk priority": lambda: there.call("ioprio_get", 1, other),
        "finding a process by its locks": lambda: there.call("get_robust_list", other, *pointers),
        "finding a process by its capabilities": lambda: there.call("capget", capabilities, pointers[0]),
        "finding a process by its clock": lambda: there.call("clock_gettime", clock, pointers[0]),
        "finding a process by a socket": lambda: there.socket[0].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12),
        "seeing that a process exists": lambda: os.stat(f"/proc/{other}"),
    }


def outcomes() -> dict[str, str]:
    """Go behind the wall and try everything: for each attempt `held`, or what happened instead.

    Raises WallError if there is no wall here.
    """
    every = attempts()
    wall.enter(memory_mb=1024)
    return {what: outcome_of(attempt, wall.NEVER_HELD.get(what, "was possible")) for what, attempt in every.items()}


def outcome_of(attempt: Callable[[], object], done: str) -> str:
    """`held`, `done`, or why else the attempt failed."""
    try:
        attempt()
    except (PermissionError, FileNotFoundError, MemoryError):
        return "held"
    except OSError as error:
        return "held" if error.errno == errno.ENOSYS else f"failed for another reason: {error}"
    return done


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else sys.path
    left_out = importable.of_python(sys.path).left_out
    try:
        found = outcomes()
    except WallError as error:
        found = {"the wall": str(error)}
    json.dump({"outcomes": found, "left_out": left_out}, sys.stdout)
