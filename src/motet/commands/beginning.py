"""`motet demo`, `init`, `fits` and `data` as commands; the files of these names, and `run.py`, do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import Override

app = typer.Typer(rich_markup_mode=None)
_DEMO = Path(__file__).resolve().parents[1] / "assets" / "demo.yaml"


@app.command(epilog="Example: motet demo --print > jobs.yaml; motet run jobs.yaml")
def demo(
    overrides: Override = None,
    directory: Annotated[Path, typer.Option("--run", help="Run directory.")] = Path("runs/demo"),
    show: Annotated[bool, typer.Option("--print", help="Print the job file and train nothing.")] = False,
) -> None:
    """Train four adapters at once on the small base that ships with Motet. Takes a minute on two cores, without network."""
    from motet.commands.run import run_file

    if show:
        typer.echo(_DEMO.read_text("utf-8"), nl=False)
        raise typer.Exit
    raise typer.Exit(run_file(_DEMO, overrides or [], directory=directory))


@app.command(epilog="Example: motet init; motet init --task number --data gsm8k.jsonl --base smollm2 --yes")
def init(
    file: Annotated[Path, typer.Argument(help="The job file to write.")] = Path("jobs.yaml"),
    task: Annotated[
        str | None,
        typer.Option(help="exact, contains, number, math, own (a function of yours) or imitate.", show_default=False),
    ] = None,
    data: Annotated[str | None, typer.Option(help="A file, `toy:NAME` or a hub name.", show_default=False)] = None,
    base: Annotated[
        str | None, typer.Option(help="`small`, a hub id, a directory or a .gguf file.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The column with the prompts.", show_default=False)] = None,
    answer: Annotated[str | None, typer.Option(help="The column with the answers.", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: use the default of each missing option.")] = False,
) -> None:
    """Ask three questions, and for columns of unknown names, and write a job file that runs."""
    from motet.commands.init import write_job_file

    write_job_file(file, task, data, base, prompt, answer, ask=not yes)


@app.command(epilog="Example: motet fits Qwen/Qwen3-8B; motet fits config.json --rank 32 --card H100")
def fits(
    base: Annotated[
        str, typer.Argument(help="A config.json, a directory with one, or a hub id; no weights.", show_default=False)
    ],
    rank: Annotated[int, typer.Option(min=1, max=4096, help="Rank of the adapters, on all linear layers.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, max=1000, help="Adapters that train at once, at least.")] = 1,
    rows: Annotated[int, typer.Option(min=4, max=4096, help="Completions that are decoded at a time.")] = 64,
    tokens: Annotated[int, typer.Option(min=64, max=10**6, help="Prompt and answer together, at most.")] = 2048,
    card: Annotated[
        list[str] | None, typer.Option(help="Only this card, such as H100; can be repeated.", show_default=False)
    ] = None,
) -> None:
    """Estimate which cards a base fits on, and how fast it could be, from its config.json alone."""
    from motet.commands.fits import Work, show

    raise typer.Exit(show(base, Work(rank, adapters, rows, tokens), card or []))


@app.command(
    epilog="Examples: motet data rows.jsonl; motet data rows.jsonl --filter 'level >= 3' --dedupe --split 100 --to hard.jsonl"
)
def data(
    source: Annotated[str, typer.Argument(help="As `data.source` in a job file.", show_default=False)],
    base: Annotated[str, typer.Option(help="Count tokens with the tokenizer of this base.")] = "small",
    prompt: Annotated[str | None, typer.Option(help="As `data.prompt`.", show_default=False)] = None,
    answer: Annotated[str | None, typer.Option(help="As `data.answer`.", show_default=False)] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="COMPARISON",
            help="Keep rows such as 'level >= 3', 'kind == hard' or 'text ~ word' (contains). Repeat it to narrow down.",
            show_default=False,
        ),
    ] = None,
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Keep the first of rows with the same prompt, ignoring case and spaces.")
    ] = False,
    near: Annotated[
        float | None,
        typer.Option(
            min=0.5,
            max=1.0,
            help="Also leave out prompts that share at least this fraction of their word triples with an earlier one.",
        ),
    ] = None,
    held_out: Annotated[
        int, typer.Option("--split", min=0, metavar="N", help="Write N rows, drawn by --seed, to a second file.")
    ] = 0,
    to: Annotated[Path | None, typer.Option(help="Write the rows to this .jsonl file.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of --split.")] = 0,
) -> None:
    """Show columns, lengths and a prompt as the model reads it; filter, dedupe and split rows into .jsonl files."""
    from motet.commands.data import Selection, look_at

    look_at(source, base, prompt, answer, Selection(tuple(only or ()), dedupe, near, held_out, seed), to)
