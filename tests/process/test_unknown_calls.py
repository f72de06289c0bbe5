"""Calls that the wall does not know fail, and the first of each is told; whatever a process does with that, no other waits."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.process import unknown_calls, wall

NO_CALL = errno.ENOSYS
ASKS = """
import ctypes, errno, json, os, signal, sys
from motet.process import wall
asked = json.loads(sys.argv[1])
call = ctypes.CDLL(None, use_errno=True).syscall

def files():
    found = 0
    for number in range(200):
        try:
            os.fstat(number)
            found += 1
        except OSError:
            pass
    return found

before = files()
wall.enter(1024, programs=asked.get("programs", False))
assert files() == before, "it holds what its calls are told by"
if "wait" in asked:
    print("behind", flush=True)
    sys.stdin.read()
if "signals" in asked:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
print(json.dumps([(call(number, 0, 0, 0, 0), ctypes.get_errno()) for number in asked["calls"]]))
"""


class Told:
    """A listener that has told nothing yet, or nobody, and what it tells."""

    def __init__(self, address: str, caplog: pytest.LogCaptureFixture) -> None:
        self.address, self._caplog = address, caplog

    @property
    def lines(self) -> list[str]:
        return self._caplog.messages

    @property
    def environment(self) -> dict[str, str]:
        return wall.environment(**{unknown_calls.LISTENER: self.address})

    def started(self, **asked: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ASKS, json.dumps(asked)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    def fail(self, **asked: Any) -> None:
        """A process of its own makes these calls, and all fail as on an older kernel."""
        with self.started(**asked) as process:
            out, _ = process.communicate()
        assert json.loads(out) == [[-1, NO_CALL]] * len(asked["calls"])


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    with caplog.at_level(logging.WARNING, unknown_calls.__name__):
        yield Told(unknown_calls._Listener().address, caplog)


@pytest.mark.parametrize("programs", [False, True])
def test_the_first_call_of_a_name_is_told_and_all_fail(told: Told, programs: bool) -> None:
    told.fail(calls=[470, 471, 470], programs=programs)
    told.fail(calls=[471], programs=programs)
    assert [re.findall(r"\d+", line) for line in told.lines] == [["470"], ["471"]]
    number, name = (425, "io_uring_setup") if programs else (239, "get_mempolicy")
    told.fail(calls=[number], programs=programs)
    assert told.lines[2:] == [
        f"-c, behind the wall, made an unknown system call, which fails: {number} ({name}); "
        "most libraries do without it, and where one does not, report this line"
    ]
    told.fail(calls=[435], programs=programs)
    assert len(told.lines) == 3, "the C library tries clone3 for each thread"


def test_of_one_process_few_calls_are_told(told: Told) -> None:
    """The others fail without this process, which a flood would cost time."""
    before = len(os.listdir("/proc/self/fd"))
    told.fail(calls=list(range(480, 590)))
    assert len(told.lines) == unknown_calls._MOST
    told.fail(calls=[590])
    assert "590" in told.lines[-1], "the next process is told"
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_signals_that_come_first_stop_nobody(told: Told) -> None:
    """They interrupt a call that waits to be told, as other calls that wait."""
    with told.started(calls=[470] * 12, signals=True) as process:
        told.fail(calls=[471])
        out, _ = process.communicate()
    assert {tuple(result) for result in json.loads(out)} <= {(-1, NO_CALL), (-1, errno.EINTR)}
    assert any("471" in line for line in told.lines)


def test_what_is_no_listener_is_closed_and_others_are_told(told: Told, tmp_path: Path) -> None:
    file, (reading, writing) = os.open(tmp_path, os.O_RDONLY), os.pipe()
    os.write(writing, b"x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.connect(f"\0{told.address}")
        for what in (file, reading):
            socket.send_fds(there, [b"\xff" * 500], [what])
        there.send(b"")
    for one in (file, reading, writing):
        os.close(one)
    told.fail(calls=[472])
    assert len(told.lines) == 1


PARENT = """
import subprocess, sys
from motet.process import wall
from motet.process.unknown_calls import LISTENER, address
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], env=wall.environment(**{LISTENER: address()}))
"""


def test_calls_fail_where_who_listened_is_gone(told: Told) -> None:
    asked = json.dumps({"calls": [470, 471], "wait": True})
    command = [sys.executable, "-c", PARENT, ASKS, asked]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "behind\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        out, _ = parent.communicate()
    assert json.loads(out) == [[-1, NO_CALL]] * 2
    assert not told.lines


@pytest.mark.parametrize("address", ["", "motet-wall-nobody"])
def test_calls_fail_where_nobody_listens(caplog: pytest.LogCaptureFixture, address: str) -> None:
    """As where a process is started by hand, and on a system without listeners."""
    Told(address, caplog).fail(calls=[470])
    assert not caplog.messages
