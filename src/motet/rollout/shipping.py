"""Versions as bytes for the node agent beside a server: packed, hashed, sent and unpacked."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

from motet.config.dialects import HttpRequest
from motet.core.errors import EngineError, ServerFault, ServerGone, ServerRefused
from motet.core.types import ADAPTER_FILES
from motet.rollout.connection import ServerConnection

DIGEST = "x-content-sha256"
AWAY = 502
"""The agent's status code when its server does not answer."""


@functools.lru_cache(maxsize=1)
def packed(directory: str) -> tuple[bytes, str]:
    """The files of a version as a tar archive, and its SHA-256. Cached for all servers, because a path is never reused."""
    parts = []
    for name in ADAPTER_FILES:
        member, content = tarfile.TarInfo(name), (Path(directory) / name).read_bytes()
        member.size = len(content)
        parts += [member.tobuf(), content, bytes(-len(content) % tarfile.BLOCKSIZE)]
    archive = b"".join((*parts, bytes(2 * tarfile.BLOCKSIZE)))  # one copy; TarFile would make three
    return archive, hashlib.sha256(archive).hexdigest()


def unpack(content: bytes, digest: str, directory: Path) -> None:
    """Write the files of an archive from `packed`.

    Raises:
        EngineError: the bytes differ from those sent.
    """
    if (arrived := hashlib.sha256(content).hexdigest()) != digest:
        raise EngineError(f"the received bytes have SHA-256 {arrived}, the sent ones {digest}: send them again")
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for name in ADAPTER_FILES:  # other members are ignored
                member = archive.extractfile(name)
                if member is None:
                    raise EngineError(f"{name} in the archive is not a file")
                (directory / name).write_bytes(member.read())
    except (tarfile.TarError, KeyError) as error:
        raise EngineError(f"the archive cannot be read: {error}") from error


async def send(agent: ServerConnection, name: str, directory: str) -> Any:
    """Tell an agent to write and load a version; returns its server's answer.

    Raises:
        ServerGone: the agent or its server does not answer.
        ServerRefused: an error of either, with its message.
        EngineError: its files cannot be read.
    """
    try:
        content, digest = await asyncio.to_thread(packed, directory)
    except OSError as error:
        raise EngineError(f"{agent.url} cannot be sent version {name}: {error}") from error
    request = HttpRequest(f"/versions/{name}", verb="PUT", content=content, headers={DIGEST: digest})
    return await _answer(agent, request)


async def take_back(agent: ServerConnection, name: str) -> Any:
    """Tell an agent to unload a version and delete its files. Raises as `send`."""
    return await _answer(agent, HttpRequest(f"/versions/{name}", verb="DELETE"))


async def written(agent: ServerConnection) -> set[str]:
    """Names of the versions whose files an agent has. Raises as `send`, and `ServerFault` if it is not an agent."""
    answer = await _answer(agent, HttpRequest("/versions"))
    names = answer.get("versions") if isinstance(answer, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ServerFault(f"{agent.url} does not answer like `motet node-agent`; check rollout.agents")
    return set(names)


async def _answer(agent: ServerConnection, request: HttpRequest) -> Any:
    try:
        return await agent.request(request, agent.clocks.load)
    except ServerRefused as error:
        if error.status == AWAY:
            raise ServerGone(str(error)) from error
        raise
