"""`motet serve`: a base, or several, as a service for a team."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from motet import wall
from motet.cluster.client import EngineClient
from motet.cluster.host import start_engine
from motet.config.service import RateConfig, ServiceConfig
from motet.errors import ConfigError
from motet.tasks.reward_installed import install

if TYPE_CHECKING:
    from fastapi import FastAPI

_GRACE_SECONDS = 10
"""For answers under way when the service stops; the service itself lets go of them after half of that."""


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
) -> None:
    """Serve until stopped.

    Raises:
        MotetError: it cannot start, and why.
    """
    if (base is None) != bool(config.bases):
        raise ConfigError(
            "name what to serve: --base small, or several as `bases` in the file of --config"
            if base is None
            else "--base is for one base: with `bases` in the file of --config leave it out"
        )
    if no_keys and not _loopback(host):
        raise ConfigError(
            f"--no-keys is for a service that this machine alone can reach, not for {host}; leave one of the two out"
        )
    if config.rate is None and not no_keys:
        config = config.model_copy(update={"rate": RateConfig()})
    directory = directory.expanduser().resolve()
    wall.check_outside(directory)
    installed = {name: one.model_dump() for name, one in config.rewards.items()}
    functions = install(installed, rewards) if installed or rewards else {}

    def make() -> FastAPI:
        from motet.service.app import create_app
        from motet.service.settings import Settings

        app = create_app(
            Settings(base or "", directory, database or "", config, open_to_all=no_keys, hub=hub, rewards=functions)
        )
        _greet(app, f"http://{host}:{port}")
        return app

    directory.mkdir(parents=True, exist_ok=True)
    try:
        here = config.cluster.launcher == "local"
        asyncio.run(_run(make, directory / "engine.log" if here else None, host, port))
    except KeyboardInterrupt:
        return


async def _run(make: Callable[[], FastAPI], log: Path | None, host: str, port: int) -> None:
    """Make the application and serve it. With `log` an engine's process is started first: both take seconds to be loaded."""
    engine = None if log is None else await start_engine(log)
    try:
        import uvicorn

        app = make()
    except BaseException:
        if engine is not None:
            await engine.kill()
        raise
    if engine is not None:
        app.state.parts[EngineClient].adopt(engine)

    lifecycle = app.state.lifecycle

    class Server(uvicorn.Server):
        """Tells whoever waits for something that it stops; uvicorn would wait for them, and then break them off."""

        async def shutdown(self, sockets: object = None) -> None:
            lifecycle.drain(_GRACE_SECONDS / 2)
            await super().shutdown()

    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=_GRACE_SECONDS
    )  # fmt: skip
    server = Server(config)
    await server.serve()
    if not server.started:
        sys.exit(3)


def _greet(app: FastAPI, address: str) -> None:
    """Say where the service is, and the first key, which nobody can ask for later."""
    from motet.service.database.store import Store
    from motet.service.settings import Settings

    console, parts = Console(emoji=False), app.state.parts
    settings, tenants = parts[Settings], parts[Store].tenants
    if not settings.open_to_all and not tenants.all_keys():
        _, key = tenants.create_key("admin", "first", "admin")
        console.print(
            f"the first key, an admin's, shown this once: [bold]{key}[/bold]", soft_wrap=True, highlight=False
        )
    console.print(
        f"motet serves {', '.join(settings.bases.names)} at {address} (the dashboard; the API is described at /docs); "
        f"engine log: {settings.directory / 'engine.log'}",
        soft_wrap=True,
    )
    if reason := wall.missing():
        console.print(
            f"this machine has no wall ({reason}): jobs whose rewards need one are refused, unless `unwalled` or `wall: false` "
            "names them; data that tenants give is parsed under limits of memory and time alone",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
