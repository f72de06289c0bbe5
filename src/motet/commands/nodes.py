"""`motet simulate` and `motet node-agent`: the simulation of a cluster, and the agent beside a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet simulate examples/cluster.yaml --hosts 12 --plot cluster.html")
def simulate(
    cluster: Annotated[Path, typer.Argument(help="YAML with hosts, their costs, and jobs.", show_default=False)],
    hosts: Annotated[int | None, typer.Option(min=1, help="Override the number of hosts.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Draw jobs over time.")] = None,
) -> None:
    """Simulate a cluster: how long its jobs take, how busy and fair it is, and what it costs."""
    from motet.commands.simulate import show

    show(cluster, hosts, plot)


@app.command(
    "node-agent", epilog="Example: motet node-agent http://127.0.0.1:8000 --host 0.0.0.0 --key-env VLLM_API_KEY"
)
def node_agent(
    server: Annotated[str, typer.Argument(help="URL of the vLLM or SGLang server on this node.", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After `--`: the command that starts the server, if the agent should start and stop it.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="The kind of server, as in `rollout.engine`.")] = "vllm",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8430,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write versions [default: below /dev/shm, in memory].")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="The environment variable that holds the key of the agent and the server.")
    ] = None,
) -> None:
    """Receive adapter versions for the server on this node, without a shared file system (`rollout.agents`)."""
    from motet.commands.node_agent import listen

    listen(server, engine, host=host, port=port, directory=directory, key_env=key_env, command=command or ())
