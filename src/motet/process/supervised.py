"""A process that is started again by its small parent when it dies or does not answer.

The parent forks, so that a child has what the parent has opened and imported: a child that is started again takes
connections at once. The parent also owns processes that work on while it starts another child, and connects them with it.
All of them end with the parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from socket import recv_fds, send_fds, socket, socketpair
from typing import Any, NoReturn

from motet.process import wall
from motet.process.ending import how_it_ended
from motet.process.heartbeat import BEAT_SECONDS, SILENT, Pulse, Restarts

_UNJUDGED = 255
"""Said while the loop is not judged: the child starts, or stops."""
_STOPS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_REQUEST = 2**14
"""Bytes of a request to the parent: a word and a path."""


class Heart:
    """The child's side."""

    def __init__(self, out: int, parent: socket, *, first: bool) -> None:
        """`out` is a pipe to the parent, `parent` takes requests; `first` if no child has served before."""
        self._out, self._parent, self.first = out, parent, first
        self._lock = threading.Lock()
        self.turn = Pulse(self._say).turn

    def _say(self, still: int | None) -> None:
        try:
            os.write(self._out, bytes([_UNJUDGED if still is None else min(still, _UNJUDGED - 1)]))
        except OSError:  # the parent is gone
            os._exit(1)

    def connect(self, log: Path) -> socket:
        """Connect to the owned process that prints to this log; the parent starts it if it does not run.

        Raises:
            OSError: it cannot be started.
        """
        answer, numbers = self._ask(b"connect", log)
        if not numbers:
            raise OSError(answer)
        os.set_inheritable(numbers[0], False)
        return socket(fileno=numbers[0])

    def status(self, log: Path) -> int | None:
        """Exit status of the owned process that printed to this log; None while it runs."""
        answer, _ = self._ask(b"status", log)
        return int(answer) if answer else None

    def kill(self, log: Path) -> int | None:
        """Kill an owned process with its group, unless it has ended; returns its `status`."""
        answer, _ = self._ask(b"kill", log)
        return int(answer) if answer else None

    def _ask(self, word: bytes, log: Path) -> tuple[str, list[int]]:
        with self._lock:
            self._parent.sendall(word + b" " + os.fsencode(log))
            answer, numbers, _, _ = recv_fds(self._parent, _LONGEST_REQUEST, 1)
        return answer.decode().strip(), numbers


class _Process:
    """One that the parent owns."""

    def __init__(self, pid: int, channel: socket) -> None:
        """`channel` brings it a connection to each child."""
        self.pid, self.channel = pid, channel
        self.status: int | None = None


class Owned:
    """Processes that the parent owns beside its child, by the log that each prints to.

    The standard input of each is a socket that brings it a connection to each child in turn, and ends with the parent.
    """

    def __init__(self, command: Callable[[str], list[str]]) -> None:
        """`command` starts the process that prints to a log."""
        self._command, self._processes = command, dict[str, _Process]()

    def begin(self, log: str) -> _Process:
        """Start the process that prints to this log, unless it runs. Raises OSError if it cannot be started."""
        process = self._processes.get(log)
        if process is None or process.status is not None:
            process = self._processes[log] = self._start(log)
        return process

    def answer(self, child: socket) -> bool:
        """Handle one request of the child; returns False if it is gone."""
        try:
            word, _, path = child.recv(_LONGEST_REQUEST).partition(b" ")
            log = os.fsdecode(path)
            match word:
                case b"":
                    return False
                case b"connect":
                    self._connect(child, log)
                case _:
                    status = self._kill(log) if word == b"kill" else self._processes[log].status
                    child.sendall(b" " if status is None else b"%d" % status)
        except OSError:  # it died before it read an answer
            return False
        return True

    def note(self, pid: int, status: int) -> None:
        """Note the exit status of a process, if it is an owned one."""
        for process in self._processes.values():
            if process.pid == pid:
                process.status = status
                process.channel.close()

    def release(self) -> None:
        """Close the parent's descriptors in its child."""
        for process in self._processes.values():
            process.channel.close()

    def _connect(self, child: socket, log: str) -> None:
        try:
            process, (ours, theirs) = self.begin(log), socketpair()
        except OSError as error:
            child.sendall(str(error).encode("utf-8", "replace"))
            return
        with ours, theirs:
            with contextlib.suppress(OSError):  # it ends just now, which the child sees
                send_fds(process.channel, [b" "], [theirs.fileno()])
            send_fds(child, [b" "], [ours.fileno()])

    def _kill(self, log: str) -> int | None:
        process = self._processes[log]
        if process.status is None:
            with contextlib.suppress(ProcessLookupError):  # it has just been started
                os.killpg(process.pid, signal.SIGKILL)  # its own session, so its pid names its group
        return process.status

    def _start(self, log: str) -> _Process:
        command, parent, (ours, theirs) = self._command(log), os.getpid(), socketpair()
        with theirs, open(log, "ab") as out:
            pid = os.fork()
            if pid == 0:
                try:
                    os.setsid()  # Ctrl-C comes from the parent's child, as a message
                    wall.end_with(parent)
                    for number, stream in enumerate((theirs.fileno(), out.fileno(), out.fileno())):
                        os.dup2(stream, number)
                    os.execv(command[0], command)
                finally:
                    os._exit(127)
        return _Process(pid, ours)


def supervised(
    say: Callable[[str], object],
    what: str,
    prepare: Callable[[], object],
    listening: Iterable[socket] = (),
    owned: Owned | None = None,
) -> Heart:
    """Fork a child and return in it, each time that one dies. The parent does not return: it exits as the last child did.

    Args:
        say: tells an operator about deaths of the process.
        what: the process, for a person.
        prepare: called in the parent once the first child serves; imports what the next one needs.
        listening: sockets for children; the parent closes its own when it is asked to stop.
        owned: what it owns beside the child.
    """
    restarts, served = Restarts(), False
    owned = owned or Owned(lambda log: [])
    with _Stops(listening) as stops:
        while True:
            child = _Child.fork(stops, owned, first=not served)
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
            for listener in self._listening:
                listener.close()

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

    def __init__(self, pid: int, pipe: int, asks: socket, owned: Owned) -> None:
        self._pid, self._pipe, self._asks, self._owned = pid, pipe, asks, owned
        self.served, self.began = False, time.monotonic()
        self.status = 0
        """Its exit status; negative for the signal that ended it."""

    @classmethod
    def fork(cls, stops: _Stops, owned: Owned, *, first: bool) -> _Child | Heart:
        """Start a child, which gets the `Heart`."""
        sys.stdout.flush()
        sys.stderr.flush()
        (pipe, out), (asks, theirs) = os.pipe(), socketpair()
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # one that comes meanwhile is heard once, by the parent
        pid = os.fork()
        if pid == 0:
            stops.__exit__()
            os.close(pipe)
            asks.close()
            owned.release()
            os.setsid()  # Ctrl-C comes from the parent, once
            wall.end_with(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            return Heart(out, theirs, first=first)
        os.close(out)
        theirs.close()
        stops.child = pid
        stops.pass_on(*stops.asked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        return cls(pid, pipe, asks, owned)

    def watch(self, prepare: Callable[[], object], *, prepared: bool) -> str:
        """Wait for its end, and answer its requests; kill it if it does not answer. Returns why it was killed."""
        silent, why = 0, ""
        while not self._ended():
            ready = select.select([self._pipe, asks := self._asks.fileno()], [], [], BEAT_SECONDS)[0]
            if asks in ready and self._owned.answer(self._asks):
                continue
            if not ready:
                silent += 1
                still = 0
            else:
                beats = os.read(self._pipe, 4096) if self._pipe in ready else b""
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
        self._asks.close()
        return why

    def _ended(self) -> bool:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # also what a child left, in a container
            status = os.waitstatus_to_exitcode(ended[1])
            if ended[0] == self._pid:
                self.status = status
                return True
            self._owned.note(ended[0], status)
        return False
