"""Tells which system calls processes behind the wall make that their filter does not know, each once.

The kernel hands such calls to a listener (SECCOMP_RET_USER_NOTIF): one thread for all processes that this one starts. It lets
each fail with ENOSYS, and stops to listen to a process after a few. Without a listener the kernel lets them fail so itself.
A signal to the process may come first: its call then fails with EINTR.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTENER = "MOTET_WALL_LISTENER"
"""The environment variable with the abstract address of the listener; without it nothing is told."""
_log = logging.getLogger(__name__)
_MOST = 16
"""Calls of a process that cost this thread time."""
_LONGEST = 100
"""Bytes of a process's name."""
_SECONDS = 1.0
"""A process waits so long for a listener that takes nothing."""
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND."""
_CALL, _REPLY = struct.Struct("=QIIi60x"), struct.Struct("=QqiI")
"""struct seccomp_notif, of which the id and the call's number are read, and struct seccomp_notif_resp."""


def address() -> str:
    """Of this process's listener; empty where there can be none, as behind the wall."""
    try:
        return _listener(os.getpid()).address if sys.platform == "linux" else ""
    except OSError:
        return ""


@functools.cache
def _listener(process: int) -> _Listener:  # a fork has no thread
    return _Listener()


class _Listener:
    def __init__(self) -> None:
        self.address = f"motet-wall-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)
        self._heard: dict[int, tuple[str, int]] = {}
        """By file descriptor: the name of a process, and how many of its calls were answered."""
        self._told = set[int]()
        threading.Thread(target=self._listen, name="motet-wall-listener", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                for file, events in self._poll.poll():
                    if file == self._socket.fileno():
                        self._take()
                    elif not events & select.EPOLLIN or not self._answer(file):
                        self._leave(file)
        finally:  # or processes would wait for this thread for ever
            self._socket.close()
            for file in self._heard:
                os.close(file)

    def _take(self) -> None:
        """A process's name and the file descriptor of its calls. Whatever else is sent is closed."""
        try:
            name, files, _, _ = socket.recv_fds(self._socket, _LONGEST, 1)
        except OSError:  # as when this process has no descriptor left
            return
        for file in files:
            self._heard[file] = name.decode("utf-8", "replace"), 0
            try:
                self._poll.register(file, select.EPOLLIN)
            except OSError:
                self._leave(file)

    def _answer(self, file: int) -> bool:
        """Tell of one call, then let it fail; whether more are listened to."""
        given = bytearray(_CALL.size)
        name, answered = self._heard[file]
        self._heard[file] = name, answered + 1
        try:
            fcntl.ioctl(file, _RECEIVE, given)
            id_, _, _, number = _CALL.unpack(given)
            if number not in self._told:
                self._told.add(number)
                _log.warning(
                    "%s, behind the wall, made an unknown system call, which fails: %s; "
                    "most libraries do without it, and where one does not, report this line",
                    name,
                    named(number),
                )
            fcntl.ioctl(file, _ANSWER, _REPLY.pack(id_, 0, -errno.ENOSYS, 0))
        except OSError as error:
            if error.errno != errno.ENOENT:  # with that, a signal came first, or ended it
                return False
        return answered + 1 < _MOST

    def _leave(self, file: int) -> None:
        del self._heard[file]
        with contextlib.suppress(OSError):
            self._poll.unregister(file)
        os.close(file)


def named(number: int) -> str:
    """The number of a call, and its name where libseccomp knows it."""
    from pyseccomp import resolve_syscall, system_arch

    try:
        name = resolve_syscall(system_arch(), number)
        return f"{number} ({name.decode() if isinstance(name, bytes) else name})"
    except (ValueError, OSError):
        return str(number)


@contextlib.contextmanager
def reached() -> Iterator[socket.socket | None]:
    """The way to the listener, which the environment names; before Landlock closes it. None if there is no listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.settimeout(_SECONDS)
        try:
            there.connect(f"\0{os.environ[LISTENER]}")
        except (KeyError, OSError):
            there.close()
        yield there if there.fileno() >= 0 else None


def hand_over(calls: Iterable[int], there: socket.socket, *, logged: bool) -> bool:
    """Let the listener answer these calls, for good; False if the kernel has no listeners.

    `logged`: the kernel's log has them too.
    """
    import pyseccomp

    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.ALLOW)  # the other filter refuses these
    rules.set_attr(pyseccomp.Attr.CTL_LOG, logged)
    try:
        for number in calls:
            rules.add_rule(pyseccomp.NOTIFY, number)
        rules.load()
    except OSError:
        return False
    file = pyseccomp._libseccomp.seccomp_notify_fd(rules._filter)
    with contextlib.suppress(OSError):  # then the kernel answers
        socket.send_fds(there, [os.fsencode(Path(sys.argv[0]).stem)[:_LONGEST]], [file])
    os.close(file)
    return True
