"""`motet export` as a command; `export.py` does what it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet export runs/demo/sort/versions/v25 --to sort-model --format ollama")
def export(
    adapter: Annotated[Path, typer.Argument(help="A PEFT LoRA directory.", show_default=False)],
    to: Annotated[Path, typer.Option(help="The directory to write.", show_default=False)],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="`merged`: the base with the adapter added to its weights. `peft`: the adapter. `card`: the adapter with a "
            "model card. `gguf`: the merged model for llama.cpp. `gguf-adapter`: the adapter for llama.cpp. `ollama`: `gguf` "
            "with a Modelfile. `experts`: an adapter on experts, one expert at a time, as vLLM reads it.",
        ),
    ] = "merged",
    base: Annotated[
        str | None, typer.Option(help="The base it was trained on [default: the one in its directory].")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="Type of the weights of a whole model; auto keeps that of the base, and is float16 for llama.cpp."
        ),
    ] = "auto",
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not load the export again to compare its logprobs.")
    ] = False,
) -> None:
    """Write an adapter for other programs, load it again as they do, and compare its logprobs with the adapter's own."""
    from motet.commands.export import write

    typer.echo(write(adapter, base, to, form, dtype, checked=not unchecked))
