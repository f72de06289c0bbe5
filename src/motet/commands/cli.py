"""The command line. Heavy imports happen inside commands, so that `motet --help` answers at once."""

from __future__ import annotations

import errno
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from motet import __version__
from motet.commands import beginning, comparing, exporting, jobs, login, operating, sharing, tenants, workers
from motet.commands.options import JobFile, Key, Override, TrustRemoteCode, Url
from motet.commands.overview import Overview, refuse_left
from motet.core.errors import MotetError
from motet.core.left import LeftNotice

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
Your own reward in rewards.py is `rewards.py:reward`:
    def reward(problem, completion):
        return float(problem.answer in completion)

\b
    motet run jobs.yaml
    motet run jobs.yaml --set steps=100 --set jobs.add.optimizer.lr=1e-4
"""

_NOT_OURS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG,
)  # fmt: skip
"""Message about a file that cannot be read or written."""

app = typer.Typer(
    name="motet",
    cls=Overview,
    help="Train many LoRA adapters at once by reinforcement learning over one frozen base model.",
    epilog="Start with: motet demo",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RunDir = Annotated[Path, typer.Argument(help="The run directory.", show_default=False)]
Steered = Annotated[
    list[str],
    typer.Argument(
        metavar="[DIRECTORY] JOB",
        help="`RUN_DIR JOB` for a local run, `JOB` for a job on the service.",
        show_default=False,
    ),
]


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
        bool, typer.Option("--sequential", help="Run jobs one at a time: slower, identical results.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Resume even if the job or its code has changed, or saved files are damaged."
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run the hosts on the nodes of this Ray cluster; `auto` finds it."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train all jobs of a file at once. Run the same command again to resume."""
    from motet.commands.run import run_file

    raise typer.Exit(
        run_file(
            jobs,
            overrides or [],
            directory=directory,
            sequential=sequential,
            accept_changes=accept_changes,
            ray=ray,
            trust_remote_code=trust_remote_code,
        )
    )


@app.command()
def check(
    jobs: JobFile,
    overrides: Override = None,
    rollouts: Annotated[int, typer.Option(min=2, max=64, help="Rollouts sampled and scored per job.")] = 4,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask judges and remote rewards about reference answers too.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Load everything, show the first prompts token by token, and sample and score a few rollouts, without training."""
    from motet.commands.check import check_config
    from motet.config.jobfile import load_jobs

    config = load_jobs(jobs, overrides or [], trust_remote_code=trust_remote_code)
    raise typer.Exit(0 if check_config(config, rollouts, ask=ask) else 1)


@app.command(
    epilog="Example: motet chat small --adapter runs/demo/sort/versions/v25; on a service: motet chat sort@best"
)
def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="A base (`small`, a hub id, a directory, a .gguf file), or JOB, JOB@VERSION or TENANT/NAME of a service.",
            show_default=False,
        ),
    ],
    adapter: Annotated[Path | None, typer.Option(help="A PEFT LoRA directory for a base on this machine.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Nucleus sampling.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
    url: Url = None,
    key: Key = None,
) -> None:
    """Talk to a base or an adapter. `/base` and `/adapter` switch, `/new` starts over, an empty line or Ctrl-D ends."""
    from motet.commands.chat import Style, chat_over_http, chat_with, is_served

    style = Style(temperature, top_p, max_tokens, seed)
    if not Path(model).exists() and ("@" in model or (adapter is None and is_served(url, key, model))):
        chat_over_http(url, key, model, style, system)
    else:
        chat_with(model, adapter, style, system)


@app.command()
def doctor(
    base: Annotated[str, typer.Argument(help="The base to test with.")] = "small",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Examine the nodes of this Ray cluster instead; `auto` finds it."),
    ] = None,
    directory: Annotated[Path, typer.Option(help="With --ray: a directory that every node can read.")] = Path("runs"),
    nodes: Annotated[int, typer.Option(min=1, help="With --ray: wait up to ten minutes for this many nodes.")] = 1,
    build: Annotated[bool, typer.Option("--build", help="Compile Motet's own CPU kernels (about a minute).")] = False,
) -> None:
    """Show this machine, what fits on it, and whether results are bit-exact on it."""
    from motet.commands.doctor import build_kernels, examine, examine_cluster

    if build:
        raise typer.Exit(build_kernels())
    raise typer.Exit(examine(base) if ray is None else examine_cluster(ray, directory.resolve(), nodes))


@app.command()
def report(directory: RunDir) -> None:
    """Update the HTML report of a run, also while it runs."""
    from motet.observe.report import write_report

    typer.echo(write_report(directory))


@app.command(epilog="Example: motet verify runs/jobs; motet verify runs/jobs --jobs jobs.yaml --set steps=10")
def verify(
    directory: Annotated[
        Path, typer.Argument(help="A run directory, a job in it, or a pulled version.", show_default=False)
    ],
    jobs: Annotated[
        Path | None,
        typer.Option(help="Also compare base, data, code and settings of this job file with the receipts."),
    ] = None,
    overrides: Override = None,
) -> None:
    """Check that every saved file is unchanged, and say how to repair damage."""
    from motet.commands.verify import verify as check_files

    raise typer.Exit(check_files(directory, jobs, overrides or ()))


def _steer(argv: list[str], word: str, url: str | None, key: str | None) -> None:
    from motet.commands import control

    if len(argv) == 2:
        typer.echo(control.send(Path(argv[0]), argv[1], word))
    elif len(argv) == 1:
        typer.echo(control.steer(url, key, argv[0], word))
    else:
        raise typer.BadParameter(f"give a job on the service, or a run directory and a job: motet {word} runs/jobs add")


@app.command(epilog="Examples: motet pause sort (on the service); motet pause runs/jobs sort (local run)")
def pause(job: Steered, url: Url = None, key: Key = None) -> None:
    """Pause a job: it finishes its step, saves and frees its slot. Other jobs continue."""
    _steer(job, "pause", url, key)


@app.command(epilog="Examples: motet resume sort (on the service); motet resume runs/jobs sort (local run)")
def resume(
    job: Steered,
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="First set this budget (jobs on a service only).")
    ] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Resume a paused or failed job."""
    if budget is not None and len(job) == 1:
        from motet.client import Client

        with Client(url, key) as client:
            client.change(job[0], budget=budget)
    elif budget is not None:
        raise typer.BadParameter("--budget is for jobs on a service; for a local run, set `budget` in the job file")
    _steer(job, "resume", url, key)


@app.command(epilog="Examples: motet cancel sort (on the service); motet cancel runs/jobs sort (local run)")
def cancel(job: Steered, url: Url = None, key: Key = None) -> None:
    """End a job. Its saved files stay."""
    _steer(job, "cancel", url, key)


@app.command(epilog="Example: motet serve --base small --directory served --no-keys")
def serve(
    base: Annotated[
        str | None,
        typer.Option(help="`small`, a hub id, a directory or a .gguf file. For several, use `bases` in --config."),
    ] = None,
    directory: Annotated[
        Path, typer.Option(help="Directory for jobs, files, logs and, without --database, the database.")
    ] = Path("served"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8420,
    database: Annotated[
        str | None, typer.Option(help="postgresql://… or sqlite:///… [default: a file in the directory].")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings of the service, such as `bases`, `limits` and `oidc`.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Number of host processes; each has the base and some of the jobs.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run the hosts on the nodes of this Ray cluster; `auto` finds it."),
    ] = None,
    no_keys: Annotated[
        bool,
        typer.Option(
            "--no-keys", help="Require no key. Then only programs and browsers on this machine can use the service."
        ),
    ] = False,
    hub: Annotated[bool, typer.Option("--hub", help="Let jobs read data from the hub.")] = False,
    rewards: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="Let jobs use the reward functions of this file by name.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The address that browsers open; sign-in (`oidc`) returns to it.")
    ] = None,
) -> None:
    """Serve one or more bases to a team that submits jobs over HTTP and downloads adapters."""
    from motet.core.errors import ConfigError
    from motet.process.allocator import without_collections

    with without_collections():
        from motet.commands.serve import serve as serve_base
        from motet.config.jobfile import load_service

    if missing := [name for name in ("fastapi", "uvicorn", "sqlalchemy", "alembic") if find_spec(name) is None]:
        raise ConfigError(f"motet serve needs {missing[0]}, which is not installed: pip install 'motet[serve]'")
    serve_base(
        base,
        directory,
        host=host,
        port=port,
        database=database,
        no_keys=no_keys,
        hub=hub,
        config=load_service(config, hosts, ray),
        rewards=rewards,
        public_url=public_url,
    )


for part in (
    beginning.app,
    comparing.app,
    exporting.app,
    operating.app,
    jobs.app,
    sharing.app,
    tenants.app,
    workers.app,
    tenants.key_app,
    login.app,
):
    app.add_typer(part)


def main() -> None:
    """Entry point: errors meant for people are one message and exit code 2."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda text, kind, *place: (
        f"motet: {text}\n" if kind is LeftNotice else usual(text, kind, *place)
    )
    try:
        refuse_left(sys.argv[1:])
        app()
    except MotetError as error:
        from motet.observe.text import safe

        said = safe(str(error))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # met by a write, it names no file
        if error.errno not in _NOT_OURS or (error.filename is None and not full):
            raise
        where = "a file could not be written" if error.filename is None else error.filename
        said = f"{where}: {error.strerror}{'; free some space and try again' if full else ''}"
    else:
        return
    typer.secho(f"motet: {said}", fg="red", err=True)
    sys.exit(2)
