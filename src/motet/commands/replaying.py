"""`motet replay` and `motet fork` as commands; `replay.py` does what they ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import JobFile, Override, TrustRemoteCode

app = typer.Typer(rich_markup_mode=None)
_STEPS = "The job and its steps: JOB@8 is version 8, JOB@4..8 are versions 5 to 8, JOB is all of them."


@app.command(epilog="Example: motet replay jobs.yaml sort@8; motet replay jobs.yaml sort@0..8")
def replay(
    jobs: JobFile,
    steps: Annotated[str, typer.Argument(metavar="JOB[@STEPS]", help=_STEPS, show_default=False)],
    overrides: Override = None,
    run: Annotated[
        Path | None, typer.Option(help="Keep the second training in this empty directory.", show_default=False)
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train steps of a job again, from the nearest kept commit, and compare every byte with its receipts."""
    from motet.commands.replay import replay as derive

    raise typer.Exit(derive(jobs, steps, overrides or [], run, trust_remote_code=trust_remote_code))


@app.command(
    epilog="Example: motet fork jobs.yaml sort@8 runs/slower --set optimizer.lr=1e-4; motet run runs/slower/jobs.yaml"
)
def fork(
    jobs: JobFile,
    step: Annotated[
        str, typer.Argument(metavar="JOB@STEP", help="The job and a step whose commit it keeps.", show_default=False)
    ],
    run: Annotated[Path, typer.Argument(help="Run directory of the new job.", show_default=False)],
    name: Annotated[
        str | None, typer.Option(help="Name of the new job [default: that of the old one].", show_default=False)
    ] = None,
    overrides: Override = None,
) -> None:
    """Begin a new job at a step of another, with its weights, optimizer state and place in the data."""
    from motet.commands.replay import fork_job

    fork_job(jobs, step, run, name, overrides or [])
