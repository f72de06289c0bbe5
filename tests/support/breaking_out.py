"""What a hostile answer makes the process that scores it do. A module of its own, so that reward processes import little."""

from __future__ import annotations

import os
import pathlib
import resource
import socket
import subprocess


def obey(problem, completion):
    """Do what the completion says: `VERB ARGUMENT`."""
    verb, _, argument = completion.partition(" ")
    done = {
        "read": lambda: pathlib.Path(argument).read_bytes(),
        "write": lambda: pathlib.Path(argument).write_text("was here"),
        "truncate": lambda: os.close(os.open(argument, os.O_RDONLY | os.O_TRUNC)),
        "remove": lambda: os.remove(argument),
        "connect": lambda: socket.create_connection(("127.0.0.1", int(argument)), 5).close(),
        "run": lambda: subprocess.run(["touch", argument], check=True),
        "fork": lambda: os.fork() or os._exit(0),
        "kill": lambda: os.kill(int(argument), 0),
        "starve": lambda: resource.prlimit(int(argument), resource.RLIMIT_NOFILE, (1, 1)),
        "environment": lambda: os.environ[argument],
        "flood": _flood,
        "lie": lambda: _lie(argument),
    }[verb]
    done()
    return 1.0


def _flood():
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        try:
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (OSError, ValueError):
            continue
    bytearray(8 << 30)


LIES = {
    "two": b'{"type": "Scores", "call": 1, "values": [9.0, 9.0], "errors": ["", ""], "failed": false}\n',
    "infinite": b'{"type": "Scores", "call": 1, "values": [Infinity], "errors": [""], "failed": false}\n',
    "another": b'{"type": "RewardsLoaded", "call": 1, "together": [true], "sees_all": [true]}\n',
    "deep": b"[" * 200_000 + b"\n",
    "early": b'{"type": "Scores", "call": 2, "values": [9.0], "errors": [""], "failed": false}\n',
}
"""Replies to the first request, about one completion."""


def _lie(which):
    """Answer in the process's name, and leave nothing behind that could answer again."""
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, LIES[which])
        except OSError:
            continue


_SENT = "import fcntl, os, signal, socket, struct\nPID, SIGNAL = {pid}, {signal}\nr, w = os.pipe()\n"
_BY_INPUT = "fcntl.fcntl({0}, fcntl.F_SETSIG, SIGNAL); fcntl.fcntl({0}, fcntl.F_SETFL, fcntl.FASYNC); "
SIGNALS = {
    "F_SETOWN": _SENT + "fcntl.fcntl(r, fcntl.F_SETOWN, PID); " + _BY_INPUT.format("r") + "os.write(w, b'x')",
    "F_SETOWN_EX": _SENT + "fcntl.fcntl(r, 15, struct.pack('2i', 1, PID)); " + _BY_INPUT.format("r") + "os.write(w, b'x')",
    "FIOSETOWN": _SENT + "a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', PID)); "
    + _BY_INPUT.format("a.fileno()") + "b.send(b'x')",
    "SIOCSPGRP": _SENT + "a, b = socket.socketpair(); fcntl.ioctl(a, 0x8902, struct.pack('i', PID)); "
    + _BY_INPUT.format("a.fileno()") + "b.send(b'x')",
    "lease": _SENT + "open('leased', 'w').close(); f = os.open('leased', os.O_RDONLY); fcntl.fcntl(f, fcntl.F_SETOWN, PID); "
    "fcntl.fcntl(f, fcntl.F_SETSIG, SIGNAL); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK); "
    "os.open('leased', os.O_WRONLY | os.O_NONBLOCK)",
    "kill": _SENT + "os.kill(PID, SIGNAL)",
    "queue": _SENT + "import ctypes; assert not ctypes.CDLL(None).sigqueue(PID, SIGNAL, ctypes.c_void_p())",
}  # fmt: skip
"""Python that sends another process a signal; `pid` and `signal` are to be filled in."""
