"""A version as bytes on their way to the node agent beside a server: packed, hashed, sent, unpacked where they arrive."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

from motet.dialects import HttpRequest
from motet.errors import EngineError, ServerFault, ServerGone, ServerRefused
from motet.rollout.connection import ServerConnection
from motet.types import ADAPTER_FILES

DIGEST = "x-content-sha256"
AWAY = 502
"""What an agent answers when the server beside it does not."""


@functools.lru_cache(maxsize=1)
def packed(directory: str) -> tuple[bytes, str]:
    """The files of a version as one archive, and its SHA-256; once for all servers, because a path is never used twice."""
    parts = []
    for name in ADAPTER_FILES:
        member, content = tarfile.TarInfo(name), (Path(directory) / name).read_bytes()
        member.size = len(content)
        parts += [member.tobuf(), content, bytes(-len(content) % tarfile.BLOCKSIZE)]
    archive = b"".join((*parts, bytes(2 * tarfile.BLOCKSIZE)))  # one copy: TarFile would make three
    return archive, hashlib.sha256(archive).hexdigest()


def unpack(content: bytes, digest: str, directory: Path) -> None:
    """Write what `packed` made.

    Raises:
        EngineError: it is not what was sent.
    """
    if (arrived := hashlib.sha256(content).hexdigest()) != digest:
        raise EngineError(
            f"the bytes that arrived have SHA-256 {arrived}, those that were sent {digest}: send them again"
        )
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for name in ADAPTER_FILES:  # by name: what else an archive may hold is not looked at
                member = archive.extractfile(name)
                if member is None:
                    raise EngineError(f"{name} in the archive is no file")
                (directory / name).write_bytes(member.read())
    except (tarfile.TarError, KeyError) as error:
        raise EngineError(f"the archive cannot be read: {error}") from error


async def send(agent: ServerConnection, name: str, directory: str) -> Any:
    """Have an agent write a version and load it; what the server beside it answered.

    Raises:
        ServerGone: the agent does not answer, or the server beside it.
        ServerRefused: an error of either, with what was said.
    """
    content, digest = await asyncio.to_thread(packed, directory)
    request = HttpRequest(f"/versions/{name}", verb="PUT", content=content, headers={DIGEST: digest})
    return await _answer(agent, request)


async def take_back(agent: ServerConnection, name: str) -> Any:
    """Have an agent unload a version and remove its files; raises as `send`."""
    return await _answer(agent, HttpRequest(f"/versions/{name}", verb="DELETE"))


async def written(agent: ServerConnection) -> set[str]:
    """The names of the versions whose files an agent has; raises as `send`, and `ServerFault` where it is no agent."""
    answer = await _answer(agent, HttpRequest("/versions"))
    names = answer.get("versions") if isinstance(answer, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ServerFault(f"{agent.url} does not answer as `motet node-agent` does; look at rollout.agents")
    return set(names)


async def _answer(agent: ServerConnection, request: HttpRequest) -> Any:
    try:
        return await agent.request(request, agent.clocks.load)
    except ServerRefused as error:
        if error.status == AWAY:
            raise ServerGone(str(error)) from error
        raise
