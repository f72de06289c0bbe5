"""Hosts on this machine that outlive the service: each has a socket and a token in a directory, for the next service."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

from motet.config.service import ServiceConfig
from motet.hosts import messages as m
from motet.hosts.host_link import HostChild, start_host
from motet.hosts.listener import TOKEN
from motet.process import wall
from motet.process.channel import LONGEST_LINE, Child, decode
from motet.process.ending import EXIT_SECONDS, how_it_ended

_log = logging.getLogger(__name__)
USAGE = ".usage"
"""Suffix of a file beside a host's socket with the device usage that no service has stored."""
_ANSWER_SECONDS = 10.0
"""For a process to show its half of the token, in a thread that does nothing else."""
_STOP_SECONDS = 120.0
_PACKAGES = ("motet", "torch", "transformers")
_VARIABLES = (
    "CUDA", "GOMP", "HF_", "HIP_", "KMP", "MKL", "MOTET_", "NCCL", "OMP", "PYTORCH", "TORCH", "TRANS", "TRITON",
)  # fmt: skip
"""Prefixes of the environment variables that a host may read."""


def lasting(config: ServiceConfig, directory: Path) -> LocalHosts | None:
    """The launcher that starts a service's hosts or finds those of an earlier one; None if they end with the service."""
    here = config.cluster.launcher == "local" and sys.platform == "linux"
    return LocalHosts(directory / "engine") if here and config.takeover_seconds else None


class LocalHosts:
    """The hosts of one service: the `Launch` of its `Hosts`."""

    def __init__(self, directory: Path) -> None:
        """`directory` holds sockets and tokens."""
        self._directory = directory

    async def __call__(self, start: m.StartHost, log: Path) -> HostChild:
        """Find or start the process of a host."""
        return await self.host(start.host or 0, log)

    async def host(self, number: int, log: Path) -> HostChild:
        """Find a host's process from an earlier service, or start one that prints to `log`."""
        return await self._left(number) or await self._started(number, log)

    async def end_from(self, number: int, usage: Callable[[m.UsageWindow], object]) -> None:
        """End surplus hosts, from this number on, after they save their jobs.

        `usage` stores what they used, and what hosts used that have ended since no service took them over.
        """
        for path in sorted(self._directory.glob("*.sock")):
            if path.stem.isdigit() and int(path.stem) >= number and (child := await self._left(int(path.stem))):
                child.send(m.Stop())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        async for message in child.messages():
                            if isinstance(message, m.UsageWindow):
                                await asyncio.to_thread(usage, message)
                            elif isinstance(message, m.Stopped):
                                child.close_input()
                await child.kill()
        for path in self._directory.glob(f"*{USAGE}"):
            try:
                for line in path.read_bytes().splitlines():
                    await asyncio.to_thread(usage, decode(line, m.UsageWindow))
            except ValueError as error:
                _log.warning("%s cannot be read, and is deleted: %s", path, error)
            path.unlink()

    async def _left(self, number: int) -> HostChild | None:
        """The listening process, if it is a host of this service."""
        socket_file, token_file = self._files(number)
        try:
            token = token_file.read_text("utf-8")
            with _short(self._directory) as short:
                reader, writer = await asyncio.open_unix_connection(short / socket_file.name, limit=LONGEST_LINE)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", peer)
        half, answer = len(token) // 2, b""
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                writer.write(token[:half].encode())
                answer = await reader.readexactly(len(token) - half)
        if uid == os.getuid() and token and secrets.compare_digest(answer, token[half:].encode()):
            with contextlib.suppress(OSError):  # its service was killed before the process listened
                return _Connected(reader, writer, _host_process(pid), (socket_file, token_file))
        writer.close()
        if uid == os.getuid() and not answer and _serves(pid, socket_file):  # stopped, it would keep its jobs
            _log.warning("%s: process %d there does not answer: it is ended", socket_file, pid)
            with contextlib.suppress(OSError):
                await _end(_host_process(pid))
            return None
        _log.warning("%s: process %d there is no engine of this service; another is started", socket_file, pid)
        return None

    async def _started(self, number: int, log: Path) -> HostChild:
        files, token = self._files(number), secrets.token_hex(32)
        try:
            listening = self._listening(*files, token)
        except OSError as error:
            _log.warning("%s takes no socket (%s): the engine ends with this process", self._directory, error)
            return await start_host(log)
        with log.open("ab") as out, listening, _short(self._directory) as short:
            process = await asyncio.create_subprocess_exec(
                *wall.command("motet.hosts", str(files[0])),
                stdin=listening.fileno(), stdout=out, stderr=out, start_new_session=True, env={**os.environ, TOKEN: token},
            )  # fmt: skip
            reader, writer = await asyncio.open_unix_connection(short / files[0].name, limit=LONGEST_LINE)
        writer.write(token[: len(token) // 2].encode())
        started = _Connected(reader, writer, os.pidfd_open(process.pid), files)
        started.child, started.unread = process, len(token) // 2
        return started

    def _listening(self, socket_file: Path, token_file: Path, token: str) -> socket.socket:
        """Create a new host's socket and token, readable only by this user."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._directory.chmod(0o700)
        for path in (socket_file, token_file):
            path.unlink(missing_ok=True)
        with os.fdopen(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        with contextlib.ExitStack() as opened:
            listening = opened.enter_context(socket.socket(socket.AF_UNIX))
            with _short(self._directory) as short:
                listening.bind(str(short / socket_file.name))
            socket_file.chmod(0o600)
            listening.listen()
            opened.pop_all()
        return listening

    def _files(self, number: int) -> tuple[Path, Path]:
        return self._directory / f"{number}.sock", self._directory / f"{number}.token"


class _Connected(Child[m.FromHost]):
    """A host's process; it need not be a child of this process."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: int, files: Iterable[Path]
    ) -> None:
        """`process` is its pidfd; `files` are deleted when it ends."""
        super().__init__(m.FromHost, reader, writer, self._end_process)
        self._files, self._process = files, process
        self.child: asyncio.subprocess.Process | None = None
        """A reference, because asyncio ends a child without one."""
        self.unread = 0
        """Bytes of a new process's first answer, which needs no check."""

    async def messages(self) -> AsyncIterator[m.FromHost]:
        with contextlib.suppress(OSError, EOFError):
            await self._reader.readexactly(self.unread)
            self.unread = 0
            async for message in super().messages():
                yield message

    async def how_it_ended(self, hint: str = "") -> str:
        """As of any child; only `ended` for a process that an earlier service started."""
        if self.child is None:
            return "ended"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.child.wait(), EXIT_SECONDS)
        return how_it_ended(self.child.returncode, stopped=self._process < 0, hint=hint)

    async def _end_process(self) -> None:
        """Kill the process, wait for its end, and delete its files."""
        if self._process < 0:
            return
        process, self._process = self._process, -1
        await _end(process)
        if self.child is not None:
            await self.child.wait()  # so that asyncio releases it
        for path in self._files:
            path.unlink(missing_ok=True)


def _host_process(pid: int) -> int:
    """A pidfd of a host's process: its id may be reused later. Raises ProcessLookupError if no host has this id."""
    process = os.pidfd_open(pid)
    if b"motet.hosts" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        return process
    os.close(process)
    raise ProcessLookupError(f"process {pid} is no host")


def _serves(pid: int, socket_file: Path) -> bool:
    """Whether a process was started for this socket."""
    with contextlib.suppress(OSError):
        return os.fsencode(socket_file) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


async def _end(process: int) -> None:
    """Kill a process, wait until it has ended, and close its descriptor."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[Path]:
    """A short path to a directory: a socket's address holds about 100 bytes."""
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


def code_of(*places: str) -> str:
    """A digest of a host's code: packages, environment variables, and the given files and folders."""
    digest = hashlib.sha256(sys.executable.encode())
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            digest.update(f"{name}={os.environ[name]}\n".encode("utf-8", "surrogateescape"))
    for place in (str(wall.PACKAGE_ROOT / "motet"), *places):
        for path in sorted(_files_of(Path(place).expanduser())):
            facts = path.stat()
            digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _files_of(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        if not folder.endswith("__pycache__"):
            yield from (path for name in names if (path := Path(folder, name)).is_file())
