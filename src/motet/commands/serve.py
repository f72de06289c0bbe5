"""`motet serve`: a base, or several, as a service for a team."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.text import Text

from motet.commands.answers import say
from motet.commands.listening import bound
from motet.config.service import TENANTS, RateConfig, ServiceConfig
from motet.config.urls import check_safe_url, is_loopback
from motet.core.errors import BaseModelError, ConfigError, RunError
from motet.hosts.launch import check_directories
from motet.hosts.listener import owned_by
from motet.model.find import find_files
from motet.observe.text import plain_console, safe
from motet.process import importable, wall
from motet.process.allocator import without_collections
from motet.process.supervised import Heart, Owned, supervised
from motet.rewards.reward_installed import Installed, install
from motet.rewards.reward_walls import NO_WALL

if TYPE_CHECKING:
    from fastapi import FastAPI

    from motet.service.settings import Settings

_SWITCH_SECONDS = 0.001
"""How long a thread that computes holds up the event loop; Python's default is five times that."""
_GRACE_SECONDS = 10
"""Seconds for open answers when the service stops; the service itself ends them after half of that."""


def serve(
    base: str | None,
    directory: Path,
    *,
    host: str,
    port: int,
    database: str | None,
    no_keys: bool,
    hub: bool,
    config: ServiceConfig,
    rewards: Path | None = None,
    public_url: str | None = None,
) -> None:
    """Serve until stopped."""
    if (base is None) != bool(config.bases):
        raise ConfigError(
            "name what to serve: give --base small, or list several under `bases` in the --config file"
            if base is None
            else "--base is for one base, and the --config file has `bases`: leave one of the two out"
        )
    if no_keys and not is_loopback(host):
        raise ConfigError(
            f"--no-keys is for a service that this machine alone can reach, not for {host}; leave one of the two out"
        )
    public = _public(public_url, no_keys, config)
    if config.rate is None and not no_keys:
        config = config.model_copy(update={"rate": RateConfig()})
    if config.cluster.launcher == "local":
        _check_bases(base, config)
    directory = Path(os.path.expanduser(directory)).resolve()
    kept = [directory, *_files_of(config, database)]
    for place in kept:
        wall.check_outside(place)
    importable.withhold(*kept)
    os.umask(0o077)  # also applies to the engine's process and its workers
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())
    functions = _functions(config, rewards)
    lock = _alone(directory)  # noqa: F841 - held until the process ends
    _make_private(directory)
    sockets = bound(host, port)

    def make(heard: Sequence[int]) -> FastAPI:
        from motet.service.settings import Settings

        settings = Settings(
            base or "", directory, database or "", config, open_to_all=no_keys, hub=hub, rewards=functions,
            public_url=public, restarted=not heart.first, launch=owned_by(heart),
        )  # fmt: skip
        app = application(settings)
        if heart.first and not heard:
            _greet(app, f"http://{host}:{port}")
        return app

    heart = supervised(say, "the HTTP process", _import_all, sockets, _engines(config, directory))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(make, sockets, heart))


def _functions(config: ServiceConfig, file: Path | None) -> dict[str, Installed]:
    """The operator's rewards. Raises ConfigError if tenants may send some, and the wall does not hold here."""
    if config.sent_rewards and (reason := wall.missing()):
        raise ConfigError(f"rewards.{TENANTS}: {NO_WALL} ({reason})")
    installed = {name: reward.model_dump() for name, reward in config.installed.items()}
    return install(installed, file) if installed or file else {}


def _engines(config: ServiceConfig, directory: Path) -> Owned:
    """What the parent owns; the first engine on this machine loads beside the HTTP process."""
    engines = Owned(lambda log: wall.command("motet.hosts", log))
    if config.cluster.launcher == "local":
        engines.begin(str(directory / "engine.log"))
    return engines


@without_collections()
def _import_all() -> None:
    """Import what serves, which takes most of the time until a process answers."""
    importlib.import_module("uvicorn")
    importlib.import_module("motet.service.app")
    gc.freeze()


@without_collections()
def application(settings: Settings) -> FastAPI:
    """Import and create the application, then freeze all objects: a garbage collection over them takes a tenth of a second."""
    from motet.service.app import create_app

    app = create_app(settings)
    gc.freeze()
    return app


def _public(url: str | None, no_keys: bool, config: ServiceConfig) -> str:
    """The service's address for browsers: an origin without a path; empty without sign-in.

    Raises:
        ConfigError: it is missing, or cannot be used.
    """
    if config.oidc is None:
        if url:
            raise ConfigError("--public-url is for sign-in: add `oidc` to the --config file, or leave --public-url out")
        return ""
    if no_keys:
        raise ConfigError("--no-keys lets everybody in, and `oidc` asks who they are: leave one of the two out")
    if not url:
        raise ConfigError(
            "`oidc` needs --public-url, the address that browsers open, such as https://motet.example.org; register "
            "https://motet.example.org/login/callback at the provider"
        )
    try:
        parts = check_safe_url(url)
    except ValueError as error:
        raise ConfigError(f"--public-url: {error}") from error
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"--public-url {url!r} must be a scheme and a host alone, such as https://motet.example.org")
    return f"{parts.scheme}://{parts.netloc}".lower()


def _check_bases(base: str | None, config: ServiceConfig) -> None:
    """Refuse missing bases and directories, all in one message."""
    wrong = []
    for place in [base] if base is not None else [one.base for one in config.bases.values()]:
        try:
            find_files(place)
        except BaseModelError as error:
            wrong.append(str(error))
    for engine in [config.engine, *(one.engine for one in config.bases.values())]:
        try:
            check_directories(engine)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(dict.fromkeys(wrong)))


async def _run(make: Callable[[Sequence[int]], FastAPI], sockets: Sequence[socket.socket], heart: Heart) -> None:
    """Create the application and serve it."""
    with _noted() as heard:
        import uvicorn

        from motet.service.http.connections import QUEUE, Connections, raise_open_files

        app = make(heard)
    if heard:
        return
    service, lifecycle = app.state.service, app.state.lifecycle
    client = service.hosts

    class Server(uvicorn.Server):
        """A server that tells waiting requests when the service stops; uvicorn would wait for them and then cut them off."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for one in sockets or ():
                one.listen(QUEUE)  # more may wait than are accepted in one turn of the event loop
            self.turning = asyncio.create_task(heart.turn())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self.turning.cancel()
            lifecycle.drain(_GRACE_SECONDS / 2)
            await super().shutdown(sockets)
            await client.kill()  # after a second Ctrl-C, which skips the rest

    sys.setswitchinterval(_SWITCH_SECONDS)
    connections = Connections(service.settings.config.http, raise_open_files(), service.access.charge)
    options: dict[str, Any] = {"http": connections.protocol, "ws": "none", "backlog": connections.backlog}
    options["proxy_headers"] = bool(os.environ.get("FORWARDED_ALLOW_IPS"))  # else anybody here writes its address
    server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_SECONDS, **options))
    looking = asyncio.create_task(_look_for_wall(lambda: server.should_exit or not heart.first))
    await server.serve(list(sockets))
    looking.cancel()
    if not server.started:
        await client.kill()
        sys.exit(3)


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM while the service starts; handled as soon as it can be stopped."""
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _greet(app: FastAPI, address: str) -> None:
    """Print the address and the first key, which is shown only once."""
    from motet.service.http.sign_in import CALLBACK

    console = plain_console()
    settings, tenants = app.state.service.settings, app.state.service.store.tenants
    if not settings.open_to_all and not tenants.keys_of(None, limit=1):
        _, key = tenants.create_key("admin", "first", "admin")
        shown = Text.assemble("the first admin key; it is shown only once: ", (key, "bold"))
        console.print(shown, soft_wrap=True)
    console.print(
        f"motet serves {', '.join(settings.bases.names)} at {address} (the dashboard; the API is described at /docs); "
        f"engine log: {settings.directory / 'engine.log'}",
        soft_wrap=True,
    )
    if settings.config.oidc is not None:
        console.print(
            f"people sign in at {settings.public_url} through {settings.config.oidc.issuer}; the redirect URI to register "
            f"there is {settings.public_url}{CALLBACK}", soft_wrap=True, highlight=False,
        )  # fmt: skip
    console.print(
        "each tenant has limits: motet tenants ls shows them, motet tenants limit changes them", soft_wrap=True
    )


def _files_of(config: ServiceConfig, database: str | None) -> list[Path]:
    """Files of a service that may lie outside its directory."""
    file = (database or "").partition(":///")[2] if (database or "").startswith("sqlite") else ""
    named = [config.secret_key_file, file.partition("?")[0]]
    return [Path(os.path.expanduser(name)) for name in named if name]


async def _look_for_wall(stopping: Callable[[], bool]) -> None:
    """Print a warning if this machine has no wall; the signal that stops the service may have ended the check."""
    if (reason := await asyncio.to_thread(wall.missing)) and not stopping():
        plain_console().print(
            f"this machine has no wall ({reason}): jobs whose rewards need one are refused, unless `unwalled` or `wall: false` "
            "names them; data that tenants give is parsed under limits of memory and time alone",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


class _Plain(logging.Formatter):
    """Log lines without control characters for terminals, because they quote names from tenants."""

    def format(self, record: logging.LogRecord) -> str:
        """One entry."""
        return safe(super().format(record))


def _make_private(directory: Path) -> None:
    """Tighten the rights of a directory that others could read, and say so."""
    if not directory.stat().st_mode & 0o077:
        return
    try:
        for path in (directory, *directory.rglob("*")):
            if not path.is_symlink() and (mode := path.stat().st_mode) & 0o077:
                path.chmod(mode & 0o700)
    except OSError as error:
        say(f"other users of this machine can read {directory}, and its rights cannot be changed: {error.strerror}")
    else:
        say(f"other users of this machine could read {directory}: from now on only its owner can")


def _alone(directory: Path) -> IO[str]:
    """Lock the directory while the file is open; the engine holds a separate lock on `run/`.

    Raises:
        RunError: another service uses the directory, or it cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (directory / ".lock").open("a+")
    except OSError as error:
        raise RunError(f"{directory} cannot be written: {error.strerror}; give another one with --directory") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            owner = file.read().strip()
        raise RunError(
            f"{directory} is served by another process (pid {owner}); stop it, or give another one with --directory"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
