"""A process that is started again by its small parent when it dies or does not answer.

The parent forks, so that a child has what the parent has opened and imported: a child that is started again takes
connections at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from socket import socket
from typing import Any, NoReturn

from motet.process.alive import BEAT_SECONDS, SILENT, Pulse, Restarts
from motet.process.ending import how_it_ended

_UNJUDGED = 255
"""Said while the loop is not judged: the child starts, or stops."""
_STOPS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


class Heart:
    """The child's side."""

    def __init__(self, out: int, *, first: bool) -> None:
        """`out` is a pipe to the parent; `first` if no child has served before."""
        self._out, self.first = out, first
        self.turn = Pulse(self._say).turn

    def _say(self, still: int | None) -> None:
        try:
            os.write(self._out, bytes([_UNJUDGED if still is None else min(still, _UNJUDGED - 1)]))
        except OSError:  # the parent is gone
            os._exit(1)


def supervised(
    say: Callable[[str], object], what: str, prepare: Callable[[], object], listening: Iterable[socket] = ()
) -> Heart:
    """Fork a child and return in it, each time that one dies. The parent does not return: it exits as the last child did.

    Args:
        say: tells an operator about deaths of the process.
        what: the process, for a person.
        prepare: called in the parent once the first child serves; imports what the next one needs.
        listening: sockets for children; the parent closes its own when it is asked to stop.
    """
    restarts, served = Restarts(), False
    with _Stops(listening) as stops:
        while True:
            child = _Child.fork(stops, first=not served)
            if isinstance(child, Heart):
                return child
            ending = child.watch(prepare, prepared=served)
            served = served or child.served
            if stops.asked or not served or child.status == 0:
                if ending:
                    say(f"{what} {ending}")
                stops.leave(child.status)
            seconds = restarts.seconds_after(time.monotonic() - child.began)
            say(
                f"{what} {ending or how_it_ended(child.status)}: it is started again{f' in {seconds:g} s' if seconds else ''}"
            )
            stops.wait(seconds)


class _Stops:
    """Signals that ask the parent to stop: they go to the child, whose end is then the last."""

    def __init__(self, listening: Iterable[socket]) -> None:
        self._listening, self._before = tuple(listening), dict[signal.Signals, Any]()
        self.asked, self.child = list[int](), 0

    def __enter__(self) -> _Stops:
        self._before = {number: signal.signal(number, self._hear) for number in _STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: object) -> None:
        self.asked.append(number)
        self.pass_on(number)

    def pass_on(self, *numbers: int) -> None:
        """Send signals to the child; whoever connects from now on is refused."""
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                if self.child:
                    os.kill(self.child, number)
        if numbers:
            for one in self._listening:
                one.close()

    def wait(self, seconds: float) -> None:
        """Wait while there is no child; a signal ends this process at once."""
        self.child, until = 0, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.asked:
                self.leave(0)
            time.sleep(min(left, BEAT_SECONDS / 10))

    def leave(self, status: int) -> NoReturn:
        """End as the child did."""
        if status < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        sys.exit(status if status >= 0 else 128 - status)  # the first process of a container ignores its own signals


class _Child:
    """The parent's side of one child."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe
        self.served, self.began = False, time.monotonic()
        self.status = 0
        """Its exit status; negative for the signal that ended it."""

    @classmethod
    def fork(cls, stops: _Stops, *, first: bool) -> _Child | Heart:
        """Start a child, which gets the `Heart`."""
        sys.stdout.flush()
        sys.stderr.flush()
        pipe, out = os.pipe()
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # one that comes meanwhile is heard once, by the parent
        pid = os.fork()
        if pid == 0:
            stops.__exit__()
            os.close(pipe)
            os.setsid()  # Ctrl-C comes from the parent, once
            _end_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            return Heart(out, first=first)
        os.close(out)
        stops.child = pid
        stops.pass_on(*stops.asked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        return cls(pid, pipe)

    def watch(self, prepare: Callable[[], object], *, prepared: bool) -> str:
        """Wait for its end; kill it if it does not answer. Returns why it was killed."""
        silent, why = 0, ""
        while not self._ended():
            if not select.select([self._pipe], [], [], BEAT_SECONDS)[0]:
                silent += 1
                still = 0
            else:
                beats = os.read(self._pipe, 4096)
                if not beats:  # it is ending
                    time.sleep(BEAT_SECONDS / 100)
                    continue
                silent, still = 0, 0 if beats[-1] == _UNJUDGED else beats[-1]
                self.served = self.served or beats[-1] != _UNJUDGED
            if max(silent, still) >= SILENT and not why:
                why = f"did not answer for {SILENT} s and was ended"
                os.kill(self._pid, signal.SIGKILL)
            if self.served and not prepared:
                prepare()
                prepared = True
        os.close(self._pipe)
        return why

    def _ended(self) -> bool:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # also what a child left, in a container
            if ended[0] == self._pid:
                self.status = os.waitstatus_to_exitcode(ended[1])
                return True
        return False


def _end_with_parent(parent: int) -> None:
    """Be killed as soon as the parent is dead, whatever this process does then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
