"""The command line. Heavy imports happen inside commands, so that `motet --help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

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
Steered = Annotated[
    list[str],
    typer.Argument(
        metavar="[DIRECTORY] JOB", help="A job of a run directory; without one, of the service.", show_default=False
    ),
]
ServedJob = Annotated[str, typer.Argument(help="The job's name or id.", show_default=False)]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="MOTET_URL", help="The service's address.", show_default="http://127.0.0.1:8420"),
]
Key = Annotated[
    str | None, typer.Option("--key", envvar="MOTET_API_KEY", help="Your key of the service.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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


def _steer(words: list[str], word: str, url: str | None, key: str | None) -> None:
    if len(words) == 2:
        from motet.commands.control import send

        typer.echo(send(Path(words[0]), words[1], word))
    elif len(words) == 1:
        from motet.commands import remote

        remote.steer(remote.Where(url, key), words[0], word)
    else:
        raise typer.BadParameter(f"give a job of the service, or a run directory and a job: motet {word} runs/jobs add")


@app.command(epilog="Example: motet pause sort; of a run on this machine: motet pause runs/jobs sort")
def pause(job: Steered, url: Url = None, key: Key = None) -> None:
    """Let one job finish its step, save, and give its slot away; the others go on."""
    _steer(job, "pause", url, key)


@app.command(epilog="Example: motet resume sort; of a run on this machine: motet resume runs/jobs sort")
def resume(job: Steered, url: Url = None, key: Key = None) -> None:
    """Let a paused or failed job go on."""
    _steer(job, "resume", url, key)


@app.command(epilog="Example: motet cancel sort; of a run on this machine: motet cancel runs/jobs sort")
def cancel(job: Steered, url: Url = None, key: Key = None) -> None:
    """End one job; what it saved stays."""
    _steer(job, "cancel", url, key)


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


# --- speaking to a service ----------------------------------------------------------------------------------------------


@app.command(epilog="Example: motet submit jobs.yaml --set steps=100 --follow")
def submit(
    jobs: JobFile,
    overrides: Override = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show steps until all jobs have ended.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Submit all jobs of a file to a service. Its data files are uploaded; the exit code is 1 where a followed job failed."""
    from motet.commands import remote

    raise typer.Exit(remote.submit(remote.Where(url, key), jobs, overrides or [], follow=follow, as_json=as_json))


@app.command(epilog="Example: motet ls --state running")
def ls(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many of the newest; 0 shows all.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show the jobs of a service, newest first."""
    from motet.commands import remote

    remote.ls(remote.Where(url, key), state, limit, as_json=as_json)


@app.command(epilog="Example: motet show sort")
def show(job: ServedJob, as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show one job of a service and the versions of its adapter."""
    from motet.commands import remote

    remote.show(remote.Where(url, key), job, as_json=as_json)


@app.command(epilog="Example: motet logs sort -f")
def logs(
    job: ServedJob,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show what happened to a job of a service, a line each. The exit code is 1 where a followed job failed."""
    from motet.commands import remote

    raise typer.Exit(remote.logs(remote.Where(url, key), job, follow=follow, as_json=as_json))


@app.command(epilog="Example: motet pull sort --version latest --to adapters")
def pull(
    job: ServedJob,
    version: Annotated[str, typer.Option(help="`best`, `latest` or a number.")] = "best",
    to: Annotated[Path, typer.Option(help="Where to put the directory.")] = Path("."),
    url: Url = None,
    key: Key = None,
) -> None:
    """Take a job's adapter home: the PEFT directory <job>-v<version>."""
    from motet.commands import remote

    remote.pull(remote.Where(url, key), job, version, to)


keys = typer.Typer(help="Make, show and end the API keys of a service.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys", epilog="Example: motet keys create team-a --name laptop")


@keys.command("create", epilog="Example: motet keys create team-a --name laptop --expires-days 90")
def create_key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is; made where there is none of the name.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    role: Annotated[
        Literal["admin", "member"], typer.Option(help="Admins see the jobs of all tenants and make keys.")
    ] = "member",
    expires_days: Annotated[float | None, typer.Option(help="Days until it ends; never unless given.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Make a key and print it, this once; needs an admin's key."""
    from motet.commands import remote

    remote.create_key(remote.Where(url, key), tenant, name, role, expires_days, as_json=as_json)


@keys.command("ls", epilog="Example: motet keys ls")
def list_keys(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show all keys, without their texts; needs an admin's key."""
    from motet.commands import remote

    remote.list_keys(remote.Where(url, key), as_json=as_json)


@keys.command("revoke", epilog="Example: motet keys revoke key-0123456789abcdef")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `motet keys ls` shows it.", show_default=False)],
    url: Url = None,
    key: Key = None,
) -> None:
    """End a key; it is refused from now on. Needs an admin's key."""
    from motet.commands import remote

    remote.revoke_key(remote.Where(url, key), key_id)


def main() -> None:
    """Entry point: errors meant for people are one message and exit code 2."""
    try:
        app()
    except MotetError as error:
        typer.secho(f"motet: {error}", fg="red", err=True)
        sys.exit(2)
