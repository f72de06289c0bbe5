"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="MOTET_URL", help="The service's address.", show_default="http://127.0.0.1:8420"),
]
Key = Annotated[str | None, typer.Option("--key", envvar="MOTET_API_KEY", help="Your API key.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobFile = Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field, e.g. steps=10 or jobs.add.optimizer.lr=1e-4."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the base's repository run its own code.")
]
ServedJob = Annotated[str, typer.Argument(help="The job's name or id.", show_default=False)]
