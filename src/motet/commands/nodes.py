"""`motet simulate` and `motet node-agent`: clusters before they are there, and beside their servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet simulate examples/cluster.yaml --hosts 12 --plot cluster.html")
def simulate(
    cluster: Annotated[Path, typer.Argument(help="Hosts, what they take, and the jobs that come.", show_default=False)],
    hosts: Annotated[int | None, typer.Option(min=1, help="So many hosts instead.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Draw jobs over time.")] = None,
) -> None:
    """Say how long an imagined cluster takes for some jobs, how busy it is, what it costs, and how fair it is."""
    from motet.commands.simulate import show

    show(cluster, hosts, plot)


@app.command(
    "node-agent", epilog="Example: motet node-agent http://127.0.0.1:8000 --host 0.0.0.0 --key-env VLLM_API_KEY"
)
def node_agent(
    server: Annotated[str, typer.Argument(help="URL of the vLLM or SGLang on this node.", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After `--`: what starts that server, if the agent is to start and end it.", show_default=False
        ),
    ] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Which of the two it is.")] = "vllm",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8430,
    directory: Annotated[
        Path | None, typer.Option(help="Where versions are written [default: below /dev/shm, which is memory].")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the key that requests bring, the server's too.")
    ] = None,
) -> None:
    """Receive versions for the server on this node, so that it shares no file system with the run (`rollout.agents`)."""
    from motet.commands.node_agent import listen

    listen(server, engine, host=host, port=port, directory=directory, key_env=key_env, command=command or ())
