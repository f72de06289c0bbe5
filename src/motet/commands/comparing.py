"""`motet compare` and `motet probe` as commands; `compare.py` and `probe.py` do what they ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from motet.commands.options import Key, Url

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog="Example: motet compare runs/sweep; motet compare runs/before runs/after; motet compare sort sort-2"
)
def compare(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="PLACE…",
            help="Run directories, job directories, or jobs on the service. One run compares its settings.",
            show_default=False,
        ),
    ],
    svg: Annotated[Path | None, typer.Option(help="Also draw the mean curves to this file.")] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Compare runs, jobs or settings on the same held-out problems, with confidence intervals."""
    from motet.commands.compare import compare_places

    compare_places(places, svg, url, key)


@app.command(
    epilog="Example: motet probe http://gpu1:8000 --model sort --adapter runs/demo/sort/versions/v25 --base small"
)
def probe(
    server: Annotated[str, typer.Argument(metavar="URL", help="The server's address.", show_default=False)],
    model: Annotated[str, typer.Option(help="What the server calls the adapter.", show_default=False)],
    adapter: Annotated[Path, typer.Option(help="The adapter's PEFT directory.", show_default=False)],
    base: Annotated[str, typer.Option(help="The base, as in a job file.", show_default=False)],
    server_base: Annotated[
        str | None, typer.Option(help="What the server calls the base; the first that it lists.", show_default=False)
    ] = None,
    kind: Annotated[
        Literal["vllm", "sglang", "openai"] | None, typer.Option(help="The server's protocol; found out without it.")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(envvar="MOTET_SERVER_KEY", help="The server's API key.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to score, such as a prompt with its answer.", show_default=False)
    ] = None,
) -> None:
    """Check that a vLLM, SGLang or OpenAI-compatible server samples the adapter it says it does, and not the base."""
    from motet.commands.probe import probe as ask

    raise typer.Exit(
        ask(server, model, adapter, base, server_base=server_base, kind=kind, key=server_key, texts=text or ())
    )
