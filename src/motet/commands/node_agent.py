"""`motet node-agent`: receive versions for the server on this node until it is ended."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from motet.commands.listening import bound, url_of
from motet.config.dialects import DIALECTS
from motet.config.urls import is_loopback, parse_url
from motet.core.errors import ConfigError
from motet.hosting.servers import MEMORY


def listen(
    server: str,
    engine: str,
    *,
    host: str,
    port: int,
    directory: Path | None,
    key_env: str | None,
    command: Sequence[str] = (),
) -> None:
    """Serve until a signal. Written files stay, because the server may read them again. `command` starts the server.

    Raises:
        ConfigError: the settings are not safe, or something is not installed.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"motet node-agent needs {missing[0]}, which is not installed: pip install 'motet[serve]'")
    import uvicorn

    from motet.rollout.node_agent import NodeAgent, NodeServer

    if engine not in DIALECTS:
        raise ConfigError(f"--engine {engine}: must be one of {', '.join(DIALECTS)}")
    try:
        parse_url(server)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    key = None if key_env is None else os.environ.get(key_env)
    if key_env is not None and not key:
        raise ConfigError(f"--key-env names {key_env}, which is not set in the environment")
    if key is None and not is_loopback(host):
        raise ConfigError(f"anyone who reaches {host} could replace adapters: give --key-env, or listen on 127.0.0.1")
    if command and shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}, which is to start the server, is not found; give its path")
    sockets = bound(host, port)
    port = sockets[0].getsockname()[1]
    place = directory or (MEMORY if MEMORY.is_dir() else Path.cwd()) / f"motet-node-agent-{port}"
    place, log = Path(os.path.expanduser(place)).resolve(), Path(f"motet-node-agent-{port}.log").resolve()
    made = not place.exists()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if command:
            log.touch()
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(
            f"{error.filename} cannot be written: {error.strerror}; give another --directory, or start where you may write"
        ) from error
    kept = NodeServer(command, log) if command else None
    agent = NodeAgent(server.rstrip("/"), DIALECTS[engine], place, key, kept)
    if kept is not None:
        print(f"The server is started, and started again when it dies or hangs; it writes to {log}", flush=True)
    print(f"Versions that are sent to {url_of(sockets)} are written to {place} and loaded into {server}", flush=True)
    try:
        uvicorn.Server(uvicorn.Config(agent.app(), log_level="warning")).run(sockets)
    finally:
        _leave(place, made=made)


def _leave(place: Path, *, made: bool) -> None:
    """Print which files stay; none if no version came."""
    if made:
        with contextlib.suppress(OSError):
            place.rmdir()
    if place.is_dir() and any(place.iterdir()):
        print(f"What is in {place} stays, because the server may read it again; remove it once the server has ended")
