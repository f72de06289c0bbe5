"""The command line. Heavy imports happen inside commands, so that `motet --help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from motet import __version__
from motet.errors import MotetError

EXAMPLE = """\b
Example job file (jobs.yaml):
    base: small
    jobs:
      - name: add
        data: toy:add
        reward: exact
      - name: sort
        data: toy:sort_numbers
        reward: {exact: 1.0, contains: 0.2}
        algorithm: {type: dr_grpo, group_size: 16}

\b
A reward of your own in rewards.py is named `rewards.py:reward`:
    def reward(problem, completion):
        return float(problem.answer in completion)

\b
    motet run jobs.yaml
    motet run jobs.yaml --set steps=100 --set jobs.add.optimizer.lr=1e-4
"""

app = typer.Typer(
    name="motet",
    help="Train many LoRA adapters at once by reinforcement learning over one frozen base model.",
    epilog="Start with: motet run examples/demo.yaml",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field, e.g. steps=10 or jobs.add.optimizer.lr=1e-4."),
]
RunDir = Annotated[Path, typer.Argument(help="The run directory.", show_default=False)]
JobName = Annotated[str, typer.Argument(help="The job's name.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"motet {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXAMPLE)
def run(
    jobs: JobFile,
    overrides: Override = None,
    directory: Annotated[
        Path | None, typer.Option("--run", help="Run directory [default: runs/<name of the job file>].")
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="One job after another; same bytes, more time.")
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on in a run directory although the job file has changed.")
    ] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write TensorBoard events to this directory.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the base's repository run its own code.")
    ] = False,
) -> None:
    """Train all jobs of a file at once. The same command goes on after Ctrl-C, a crash or a power cut."""
    from motet.commands.run import run_file

    raise typer.Exit(
        run_file(
            jobs,
            overrides or [],
            directory=directory,
            sequential=sequential,
            accept_changes=accept_changes,
            tensorboard=tensorboard,
            trust_remote_code=trust_remote_code,
        )
    )


@app.command()
def check(
    jobs: JobFile,
    overrides: Override = None,
    rollouts: Annotated[int, typer.Option(min=2, max=64, help="Rollouts sampled and scored per job.")] = 4,
) -> None:
    """Load everything, show the first prompts token by token, sample and score a few rollouts, train nothing."""
    from motet.commands.check import check_file

    check_file(jobs, overrides or [], rollouts)


@app.command(epilog="Example: motet chat small --adapter runs/demo/sort/versions/v25")
def chat(
    base: Annotated[str, typer.Argument(help="`small`, a hub id, a directory or a .gguf file.", show_default=False)],
    adapter: Annotated[Path | None, typer.Option(help="A PEFT LoRA directory; without it the base answers.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Nucleus sampling.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
) -> None:
    """Talk to the base or an adapter. An empty line or Ctrl-D ends; `/base`, `/adapter`: who answers; `/new`: start over."""
    from motet.commands.chat import chat_with

    chat_with(base, adapter, temperature=temperature, top_p=top_p, max_tokens=max_tokens, system=system, seed=seed)


@app.command()
def doctor(
    base: Annotated[str, typer.Argument(help="The base to test with.")] = "small",
) -> None:
    """Show this machine, the budgets Motet derives from it, and whether results are bit-exact on it."""
    from motet.commands.doctor import examine

    raise typer.Exit(examine(base))


@app.command()
def report(directory: RunDir) -> None:
    """Write the HTML report of a run again (also while it is going on)."""
    from motet.report import write_report

    typer.echo(write_report(directory))


def _control(directory: Path, job: str, word: str) -> None:
    from motet.commands.control import send

    typer.echo(send(directory, job, word))


@app.command()
def pause(directory: RunDir, job: JobName) -> None:
    """Let one job of a running run finish its step, save, and give its slot away; the others go on."""
    _control(directory, job, "pause")


@app.command()
def resume(directory: RunDir, job: JobName) -> None:
    """Let a paused or failed job of a running run go on."""
    _control(directory, job, "resume")


@app.command()
def cancel(directory: RunDir, job: JobName) -> None:
    """End one job of a running run; what it saved stays."""
    _control(directory, job, "cancel")


@app.command(epilog="Example: motet serve --base small --directory served --no-keys")
def serve(
    base: Annotated[str, typer.Option(help="`small`, a hub id, a directory or a .gguf file.")],
    directory: Annotated[Path, typer.Option(help="Jobs, files, logs, and the database unless it has a URL.")] = Path(
        "served"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8420,
    database: Annotated[
        str | None, typer.Option(help="postgresql://… or sqlite:///… [default: a file in the directory].")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with `engine` and `rollout`, as in a job file.")] = None,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="No key is needed; only on this machine's own address.")
    ] = False,
    hub: Annotated[bool, typer.Option("--hub", help="Let jobs read data from the hub.")] = False,
) -> None:
    """Serve one base to a team: its people submit jobs over HTTP and take adapters home."""
    from motet.commands.serve import serve as serve_base
    from motet.jobfile import load_service

    engine, rollout = load_service(config)
    serve_base(
        base,
        directory,
        host=host,
        port=port,
        database=database,
        no_keys=no_keys,
        hub=hub,
        engine=engine,
        rollout=rollout,
    )


def main() -> None:
    """Entry point: errors meant for people are one message and exit code 2."""
    try:
        app()
    except MotetError as error:
        typer.secho(f"motet: {error}", fg="red", err=True)
        sys.exit(2)
