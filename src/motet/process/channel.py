"""A typed channel to a child process: tagged structs, one line of JSON each, over its standard input and output.

The parent uses `Child` in an event loop or `ThreadChild` in threads; the child uses `Parent`. A child exits when its
input ends, as it does when the parent is killed. Dataclasses and numpy arrays may be fields. Floats are preserved bit
for bit, including NaN, and texts may contain invalid UTF-8.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Generic, TypeVar, get_args

import msgspec
import numpy as np

from motet.core.errors import EngineError
from motet.process import importable, wall
from motet.process.child import ChildPipes, ChildProcess

_log = logging.getLogger(__name__)

LONGEST_LINE = 2**26
"""Longest line in bytes that a reader in an event loop takes; readers in threads take any."""
END_SECONDS = 5.0
"""Time that a process gets to exit before it is killed."""


class ChannelMessage(msgspec.Struct, frozen=True, tag=True):
    """Base class of all messages; a message's tag is its class name."""


class ProcessFault(ChannelMessage, frozen=True):
    """The last message of a process that cannot go on: why. Not an answer to a call, and not the fault of one."""

    error: str


class Alive(ChannelMessage, frozen=True):
    """A sign of life, once a second (`motet.process.heartbeat`)."""

    loop: int
    """Seconds for which the event loop has not turned; 0 while the process starts or stops."""
    device: int
    """Seconds for which the current turn of the device has used neither processor nor disk."""
    job: str = ""
    """Whose turn the event loop does not end, or else the device works on; empty if that is not known."""


Received = TypeVar("Received")


def encode(message: ChannelMessage, longest: int | None = LONGEST_LINE) -> bytes:
    """Encode a message as one line, of at most `longest` bytes. Raises EngineError if it is too long for the reader."""
    line = json.dumps(msgspec.to_builtins(message, enc_hook=_plain), separators=(",", ":")).encode() + b"\n"
    if longest is not None and len(line) > longest:
        raise EngineError(f"{-(-len(line) // 2**20)} MB; the limit is {longest >> 20} MB")
    return line


def decode(line: bytes, kinds: Any) -> Any:
    """Decode a line; `kinds` is the union of the expected messages. Raises ValueError if the line is none of them."""
    return msgspec.convert(json.loads(line), kinds, dec_hook=_array)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # numbers as text would take a second of the event loops for the scores of a long prompt
        return value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()
    raise NotImplementedError(f"{type(value).__name__} is no field of a message")


def _array(kind: Any, value: Any) -> Any:
    """Convert to an array of the annotated dtype, such as `NDArray[np.float32]`."""
    (wanted,) = get_args(get_args(kind)[1])
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).astype(wanted)


class Child(Generic[Received]):
    """The parent's end of the channel to a child process, for one event loop."""

    def __init__(
        self,
        kinds: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        end: Callable[[], Awaitable[None]],
        how: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        """`kinds` is the union of messages it may send; `end` kills it if it still runs, and waits for its exit.

        `how` waits for its exit too, and returns how it ended; it is given a hint, as in `ending`.
        """
        self._kinds, self._reader, self._writer, self._end, self._how = kinds, reader, writer, end, how
        self._said_all = False
        self.over_network = False
        """Whether its messages may stay away for a while although it works."""
        self.translate: Callable[[ChannelMessage], ChannelMessage] = lambda message: message
        """Replaces each message before it is sent."""

    @classmethod
    async def start(cls, module: str, kinds: Any, log: Path | None, **variables: str) -> Child[Received]:
        """Start `python -m module`; its standard error is appended to `log`, or inherited if None.

        The child gets this process's environment with these `variables`.
        """
        return cls.of(
            await ChildPipes.start(wall.command(module), log, {**os.environ, **variables}, LONGEST_LINE), kinds
        )

    @classmethod
    def of(cls, pipes: ChildPipes, kinds: Any) -> Child[Received]:
        """The channel to a process that was started for messages of at most `LONGEST_LINE` bytes."""
        hanging_up = asyncio.create_task(pipes.hang_up())

        async def end() -> None:
            await pipes.kill()
            hanging_up.cancel()

        return cls(kinds, pipes.output, pipes.input, end, pipes.how_it_ended)

    def send(self, message: ChannelMessage) -> None:
        """Send one message; does nothing if the process is gone."""
        if not self._said_all and not self._writer.is_closing():
            self._writer.write(encode(self.translate(message)))

    async def messages(self) -> AsyncIterator[Received]:
        """Yield its messages until it exits."""
        with contextlib.suppress(ConnectionError):
            async for line in self._reader:
                if line.endswith(b"\n"):  # else it was cut off when the process was killed
                    yield decode(line, self._kinds)

    def close_input(self) -> None:
        """End its input, so that the process exits; its last messages are still read."""
        if not self._said_all and not self._writer.is_closing():
            self._said_all = True
            with contextlib.suppress(OSError):  # it is gone, which its reader notices
                self._writer.write_eof()

    async def how_it_ended(self, hint: str = "") -> str:
        """How a process ended whose messages have ended (`motet.process.ending`); just `ended` if nobody here can know."""
        return "ended" if self._how is None else await self._how(hint)

    async def kill(self) -> None:
        """Kill the process if it still runs, with what it started, and wait for its exit."""
        self._writer.close()
        await self._end()


class ThreadChild:
    """The parent's end of the channel to a child process, for threads."""

    def __init__(self, lines: IO[bytes], out: IO[bytes]) -> None:
        """`lines` is its output, `out` its input."""
        self.lines, self.out = lines, out

    def send(self, message: ChannelMessage) -> None:
        """Send one message. No error if the process is gone: the reader notices that."""
        with contextlib.suppress(OSError, ValueError):
            self.out.write(encode(message, longest=None))
            self.out.flush()

    def kill(self) -> None:
        """End the process at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Close its output, once it is gone and nobody reads it."""
        self.lines.close()

    def messages(self, kinds: Any) -> Iterator[Any]:
        """Yield its messages until it is gone; `kinds` as in `decode`. A process that writes anything else is killed."""
        with contextlib.suppress(OSError):
            for line in self.lines:
                if not line.endswith(b"\n"):  # it was killed while it wrote
                    return
                try:
                    message = decode(line, kinds)
                except ValueError:  # a library may print while it is imported
                    _log.warning("a process printed %.200r where its messages are read, and was killed", line)
                    self.kill()
                    return
                yield message


class StartedChild(ChildProcess, ThreadChild):
    """A child process that was started here, with `python -m module`."""

    def __init__(self, module: str, log: Path | None, **variables: str) -> None:
        """`log` as in `ChildProcess`; `variables` are added to its environment."""
        environment = {**os.environ, **variables, "PYTHONPATH": importable.python_path()}
        ChildProcess.__init__(self, wall.command(module), log, env=environment)
        ThreadChild.__init__(self, self.stdout, self.stdin)


class Parent(Generic[Received]):
    """The child's end of the channel: its standard streams, or a connection. Any thread may send."""

    def __init__(self, kinds: Any, lines: BinaryIO | None = None, out: BinaryIO | None = None) -> None:
        """Redirect stdout to stderr, so that prints of libraries are not read as messages. `kinds` as in `decode`."""
        self.lines, self._kinds = lines or sys.stdin.buffer, kinds
        self._out: BinaryIO = out or os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()
        self.longest: int | None = LONGEST_LINE
        """Longest line in bytes that the parent reads; None if it reads in a thread."""

    @classmethod
    def at(cls, address: str, token: str, kinds: Any) -> Parent[Received]:
        """Connect to a parent that listens at `host:port`, perhaps on another machine; the first line is the token."""
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{token}\n".encode())
        return cls(kinds, connection.makefile("rb"), connection.makefile("wb"))

    def send(self, message: ChannelMessage) -> None:
        """Send one message. Raises EngineError if it is too long; nothing was sent."""
        line = encode(message, self.longest)
        with self._lock:
            self._out.write(line)
            self._out.flush()

    def first(self) -> Received | None:
        """Wait for one message; None if the input has ended."""
        line = self.lines.readline()
        message: Received | None = decode(line, self._kinds) if line else None
        return message

    def resume(self) -> None:
        """Do nothing: this class sends from the start (compare `motet.hosts.line`)."""

    def on_hang_up(self, call: Callable[[], object]) -> None:
        """Call a function in a separate thread as soon as the parent is gone, whatever this process is doing."""

        def watch() -> None:
            hung_up = select.poll()
            hung_up.register(self.lines.fileno(), getattr(select, "POLLRDHUP", 0))
            hung_up.poll()
            call()

        threading.Thread(target=watch, name="motet-parent", daemon=True).start()

    def queue(self) -> asyncio.Queue[Received | None]:
        """Incoming messages, read in a separate thread; None when the input ends."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[Received | None]()

        def read() -> None:
            try:
                for line in self.lines:
                    loop.call_soon_threadsafe(messages.put_nowait, decode(line, self._kinds))
            finally:  # also after an invalid message
                loop.call_soon_threadsafe(messages.put_nowait, None)

        threading.Thread(target=read, name="motet-messages", daemon=True).start()
        return messages
