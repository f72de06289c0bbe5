"""`motet serve`: one base as a service for a team."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import uvicorn
from rich.console import Console

from motet import wall
from motet.config.service import RateConfig, ServiceConfig
from motet.errors import ConfigError
from motet.service.app import create_app
from motet.service.database.store import Store
from motet.service.desk import Settings
from motet.tasks.reward_installed import install


def serve(
    base: str,
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
    console = Console(emoji=False)
    if no_keys and not _loopback(host):
        raise ConfigError(
            f"--no-keys is for a service that this machine alone can reach, not for {host}; leave one of the two out"
        )
    if config.rate is None and not no_keys:
        config = config.model_copy(update={"rate": RateConfig()})
    installed = {name: one.model_dump() for name, one in config.rewards.items()}
    settings = Settings(
        base, directory.expanduser().resolve(), database or "", config, open_to_all=no_keys, hub=hub,
        rewards=install(installed, rewards) if installed or rewards else {},
    )  # fmt: skip
    wall.check_outside(settings.directory)
    app = create_app(settings)
    store: Store = app.state.desk.store
    if not no_keys and not store.tenants.all_keys():
        _, key = store.tenants.create_key("admin", "first", "admin")
        console.print(
            f"the first key, an admin's, shown this once: [bold]{key}[/bold]", soft_wrap=True, highlight=False
        )
    console.print(
        f"motet serves {base} at http://{host}:{port} (the dashboard; the API is described at /docs); "
        f"engine log: {settings.directory / 'engine.log'}",
        soft_wrap=True,
    )
    if reason := wall.missing():
        console.print(
            f"this machine has no wall ({reason}): jobs whose rewards need one are refused, unless `unwalled` or `wall: false` "
            "names them; data that tenants give is parsed under limits of memory and time alone",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
