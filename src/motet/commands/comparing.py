"""`motet compare`, `diff`, `eval`, `probe`, `replay` and `fork` as commands; the modules with these names do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import JobFile, Key, Override, TrustRemoteCode, Url

app = typer.Typer(rich_markup_mode=None)
_STEPS = "The job and its steps: JOB@8 is version 8, JOB@4..8 are versions 5 to 8, JOB is all of them."


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
    epilog="Example: motet diff runs/a/sort runs/b/sort; motet diff runs/jobs/sort@8 runs/jobs/sort@16 --rollouts",
)
def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="RUN/JOB, or RUN/JOB@12 for one version.", show_default=False)
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The same of another job.", show_default=False)],
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Also show recorded answers of both to the same problems.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --rollouts: answers that this step trained on, not held-out ones.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="With --rollouts: the largest number of problems to show.")] = 5,
    report: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything to this file.")
    ] = None,
) -> None:
    """Show where two jobs differ: settings, base, data and code, held-out curves, answers."""
    from motet.commands.compare import diff as show

    show((first, second), rollouts=rollouts, step=step, limit=limit, report=report)


@app.command(
    name="eval",
    epilog="Examples: motet eval jobs.yaml sort; motet eval jobs.yaml sort@best sort@12 --samples 8 --out answers.jsonl; "
    "motet eval jobs.yaml sort other/adapter --data test.jsonl --rows 200 --greedy",
)
def evaluate(
    jobs: JobFile,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="JOB (its best version), JOB@best, JOB@latest, JOB@12, or a PEFT LoRA directory.",
            show_default=False,
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="The job whose problems and rewards are used [default: the first].", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Problems to use instead of the held-out rows: a source as in a job file.",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Replaces the job's rewards; you can repeat the option.", show_default=False),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Evaluate only the first N rows; with --data, N drawn ones.", show_default=False
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Answers per row and model.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")] = False,
    seed: Annotated[int, typer.Option(help="Random numbers depend only on this seed, the row and the sample.")] = 0,
    base: Annotated[bool, typer.Option(help="Evaluate the base too, and compare with it.")] = True,
    solved: Annotated[float, typer.Option(help="The lowest reward of an answer that passes, for pass@k.")] = 1.0,
    report: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write each answer to this file (.jsonl or .parquet).", show_default=False),
    ] = None,
    overrides: Override = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Evaluate the base and adapters on the same problems, with intervals. Ctrl-C stops after the current rows."""
    from motet.commands.evaluate import Asked
    from motet.commands.evaluate import evaluate as compare_models

    asked = Asked(task, data, reward or (), rows, samples, greedy, seed, base, solved)
    raise typer.Exit(
        compare_models(
            jobs, models, asked, overrides or [], report=report, out=out, trust_remote_code=trust_remote_code
        )
    )


@app.command(
    epilog="Example: motet probe http://gpu1:8000 --model sort --adapter runs/demo/sort/versions/v25 --base small"
)
def probe(
    server: Annotated[str, typer.Argument(metavar="URL", help="The server's address.", show_default=False)],
    model: Annotated[str, typer.Option(help="The server's name for the adapter.", show_default=False)],
    adapter: Annotated[Path, typer.Option(help="The adapter's PEFT directory.", show_default=False)],
    base: Annotated[str, typer.Option(help="The base, as in a job file.", show_default=False)],
    server_base: Annotated[
        str | None,
        typer.Option(help="The server's name for the base [default: the first that it lists].", show_default=False),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="The server's protocol: `openai`, or as `rollout.engine` [default: detected].", show_default=False
        ),
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(envvar="MOTET_SERVER_KEY", help="The server's API key.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to score, such as a prompt with its answer.", show_default=False)
    ] = None,
) -> None:
    """Check that a vLLM, SGLang or OpenAI-compatible server answers with the adapter, and not with the base."""
    from motet.commands.probe import probe as ask

    raise typer.Exit(
        ask(server, model, adapter, base, server_base=server_base, kind=kind, key=server_key, texts=text or ())
    )


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
        str,
        typer.Argument(
            metavar="JOB@STEP",
            help="The job and a step whose commit it keeps, JOB@best or JOB@latest.",
            show_default=False,
        ),
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
