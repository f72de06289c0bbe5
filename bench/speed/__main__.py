"""The command line of the speed bench."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from bench.speed import envs
from bench.speed.plan import cpu_blocks, shape_blocks
from bench.speed.programs import ROOT
from bench.speed.rows import Block, chosen
from bench.speed.run import Settings, run

EXAMPLES = """examples:
  python -m bench.speed                                 every row; writes docs/benchmarks.md and docs/benchmarks.svg
  python -m bench.speed --quick                         a rough table in a few minutes; writes to runs/bench only
  python -m bench.speed --list                          the names of the rows
  python -m bench.speed --only train grpo --repeats 3   some rows; writes to runs/bench only
  python -m bench.speed --device cuda --shape 0.5b 8b   Motet alone, on bases of random weights
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m bench.speed",
        description="Measure Motet and its peers on the same work, in turn, and write a table of ratios.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="fewer rows and repeats, shorter work")
    made.add_argument("--only", nargs="+", default=[], metavar="ROW", help="measure these rows")
    made.add_argument("--repeats", type=int, metavar="N", help="repeats of every block, instead of its own number")
    made.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "bench", help="logs, results.json (default: runs/bench)"
    )
    made.add_argument(
        "--page", type=Path, help="the page to write (default: docs/benchmarks.md for a whole run, else in OUT)"
    )
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where Motet runs (default: cpu)")
    made.add_argument(
        "--shape",
        nargs="+",
        default=[],
        metavar="SHAPE",
        help="Motet alone on a base of random weights: tiny, 0.5b, 8b",
    )
    made.add_argument("--list", action="store_true", help="print the names of the rows and end")
    return made


def settings_of(arguments: argparse.Namespace, blocks: list[Block]) -> Settings:
    """What a run needs to know.

    A run of everything writes the page in docs; any other one keeps to its output directory.
    """
    whole = not (arguments.quick or arguments.only or arguments.shape)
    page = ROOT / "docs" / "benchmarks.md" if whole else arguments.out / "benchmarks.md"
    return Settings(
        blocks=blocks,
        quick=arguments.quick,
        repeats=arguments.repeats,
        out=arguments.out.resolve(),
        page=(arguments.page or page).resolve(),
        device=arguments.device,
        envs=envs.directory(),
        profiled=not arguments.only,
    )


def main(words: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    arguments = parser().parse_args(words)
    if arguments.device == "cuda" and not arguments.shape:
        arguments.shape = ["0.5b", "8b"]
    everything = cpu_blocks(arguments.quick) if not arguments.shape else []
    everything += [block for shape in arguments.shape for block in shape_blocks(shape)]
    try:
        blocks = chosen(everything, arguments.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{row.name:24} {row.work}" for block in blocks for row in block.rows))
        return 0
    started = time.monotonic()
    try:
        run(settings_of(arguments, blocks))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are killed on the way out
    sys.exit(main())
