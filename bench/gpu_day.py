"""What a card has to show, in 25 pieces of at most nine minutes: `make gpu-day`.

Each piece is a process. Its result is kept in `.gpu-day/`; the same command leaves out what has passed and runs the rest. The
page is written after every piece, so it says what is known when one fails or the machine is taken away.

    python -m bench.gpu_day                       # docs/benchmarks-gpu.md
    python -m bench.gpu_day --list                # the pieces
    python -m bench.gpu_day --only gpu-tests-fast # again, whatever it did before
    python -m bench.gpu_day --rehearse            # the same pieces on a CPU, with a tiny base; the page is in .gpu-day/
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.speed.page import paragraph
from bench.speed.programs import OFFLINE
from bench.speed.table import cost_text, markdown

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 540.0
"""Seconds of a piece."""
SKIPPED = 77
"""Exit code of a piece that this machine cannot run."""
TESTS = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--durations", "3")
TWO_RANKS = """
import subprocess, sys, torch
from pathlib import Path
device, place = sys.argv[1], Path(sys.argv[2])
cards = torch.cuda.device_count()
if device == "cuda" and cards < 2:
    print(f"{cards} card: two are needed")
    sys.exit(77)
learned = []
for setting in ("engine.ranks=2", "engine.shard=2"):
    words = ["examples/demo.yaml", "--run", str(place / setting)]
    for given in (setting, f"engine.device={device}", "engine.kernels=torch", "steps=4"):
        words += ["--set", given]
    if code := subprocess.call([sys.executable, "-m", "motet", "run", *words]):
        sys.exit(code)
    files = (place / setting).glob("*/versions/v4/adapter_model.safetensors")
    learned.append({file.parts[-4]: file.read_bytes() for file in files})
same = len(learned[0]) == 4 and learned[0] == learned[1]
print("copies and shards:", "the same adapters" if same else "different adapters")
sys.exit(not same)
"""


@dataclass(frozen=True)
class Piece:
    """A command that runs by itself."""

    name: str
    shows: str
    words: tuple[str, ...]
    """After the interpreter."""
    rows: bool = False
    """Whether it writes rows of the speed bench."""


@dataclass(frozen=True)
class Result:
    """What became of a piece."""

    name: str
    state: str
    """passed, failed, too slow or not here."""
    seconds: float
    said: str
    """The last line that says something."""
    rows: list[dict[str, Any]] = field(default_factory=list)


def pieces(device: str, shapes: Sequence[str], place: Path) -> list[Piece]:
    """All of them, in the order in which they tell most."""
    bases, bench = place / "bench" / "bases", ("-m", "bench.speed", "--device", device, "--out", str(place / "bench"))
    found = [
        Piece("doctor", "what Motet sees of this machine", ("-m", "motet", "doctor")),
        *(
            Piece(name, shows, (*TESTS, f"tests/model/{file}"))
            for name, shows, file in (
                ("attention-kernels", "attention by kernels: values, gradients, bits", "test_kernels.py"),
                ("recurrence-kernels", "recurrences by kernels", "test_recurrence_kernels.py"),
                ("graphs", "decoding as recorded graphs", "test_cuda_graph.py"),
            )
        ),
    ]
    for kind in ("float32-exact", "bfloat16-exact", "bfloat16-fast"):
        shown = f"isolation, on-policy logprobs, gradients on the small base, {kind}"
        found.append(Piece(f"gpu-tests-{kind}", shown, (*TESTS, "tests/running/test_gpu.py", "-k", kind)))
    demo = ("-m", "motet", "run", "examples/demo.yaml", "--run", str(place / "demo"))
    found.append(Piece("demo", "four jobs learn on the small base", (*demo, "--set", f"engine.device={device}")))
    for shape in shapes:
        together = ("-m", "bench.together", shape, "--device", device, "--bases", str(bases))
        found += [
            Piece(f"base-{shape}", "random weights", ("-m", "bench.speed.shapes", shape, str(bases), device)),
            Piece(f"together-{shape}", "a job alone = beside others, bit for bit", together),
        ]
        for row, shown in (
            ("adapters", "decode with 8 adapters and with none"),
            ("exact-decode", "decode, exact and fast"),
            ("train", "gradients"),
            ("exact-train", "gradients, exact and fast"),
            ("exact-grpo", "a step of one job, exact and fast"),
            ("at-once", "eight jobs at once and in turn"),
        ):
            name = f"{row}-{shape}"
            found.append(Piece(name, shown, (*bench, "--shape", shape, "--only", name), rows=True))
    two_ranks = ("-c", TWO_RANKS, device, str(place / "two-ranks"))
    return [*found, Piece("two-ranks", "a job on two cards: a whole base on each, and a shard", two_ranks)]


def run(piece: Piece, place: Path, limit: float) -> Result:
    """Run a piece in a session of its own; what it started ends with it."""
    log, rows = place / f"{piece.name}.log", place / "bench" / "results.json"
    rows.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *piece.words],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **OFFLINE},
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    said = next((line.strip() for line in reversed(text.splitlines()) if line.strip(" =-.")), "")
    measured = json.loads(rows.read_text())["rows"] if piece.rows and rows.is_file() else []
    state = {0: "passed", SKIPPED: "not here", None: "too slow"}.get(code, "failed")
    if state == "passed" and " skipped" in said and " passed" not in said:
        state = "not here"
    if state == "passed" and piece.rows and not any(row["ratio"] is not None for row in measured):
        state, said = "failed", next((str(row["reason"]) for row in measured), said)
    return Result(piece.name, state, round(time.monotonic() - started, 1), said[:200], measured)


def kept(place: Path) -> dict[str, Result]:
    """Results of before, by the name of the piece."""
    found = (json.loads(file.read_text()) for file in sorted(place.glob("*.json")))
    return {one["name"]: Result(**one) for one in found}


def page(every: Sequence[Piece], results: dict[str, Result], machine: dict[str, str]) -> str:
    """All that is known by now."""
    lines, measured = [], list[tuple[str, ...]]()
    for piece in every:
        result = results.get(piece.name)
        if result is None:
            lines.append((f"`{piece.name}`", piece.shows, "not run yet", "", ""))
            continue
        why = "" if result.state == "passed" else result.said
        lines.append((f"`{piece.name}`", piece.shows, result.state, f"{result.seconds:.0f} s", why))
        for row in result.rows:
            value, spread = figures(row)
            measured.append((row["work"], row["against"], row["compare"], value, spread, row["reason"] or ""))
    passed = sum(result.state == "passed" for result in results.values())
    parts = [
        "<!-- Written by `make gpu-day`. -->\n\n# Motet on a GPU\n",
        paragraph(
            f"{passed} of {len(every)} pieces passed. Bases have random weights; start-up and warm-up are excluded."
        ),
        markdown(("piece", "what it shows", "result", "time", "why not"), lines),
        "## Speed\n",
        markdown(("work", "against", "figure", "value", "spread", "why not"), measured),
        "## Where it ran\n",
        markdown(("what", "which"), list(machine.items())),
    ]
    return "\n".join(parts)


def figures(row: dict[str, Any]) -> tuple[str, str]:
    """Value and spread of a row: a ratio, or a figure in its unit."""

    def said(value: float) -> str:
        return cost_text(value, row["unit"]) if row["compare"] == "value" else f"{value:.3g}×"

    value = "–" if row["ratio"] is None else said(row["ratio"])
    return value, "" if row["low"] is None else f"{said(row['low'])} to {said(row['high'])}"


def machine() -> dict[str, str]:
    """What the figures depend on."""
    import torch
    import transformers

    cards = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cards": ", ".join(cards) or "none",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "transformers, Triton, Python": f"{transformers.__version__}, {version}, {platform.python_version()}",
    }


def main(words: list[str] | None = None) -> int:
    """Run what has not passed; returns 0 where nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_day", description="What a card has to show.")
    parser.add_argument("--list", action="store_true", help="print the pieces and end")
    parser.add_argument("--only", nargs="+", default=[], metavar="PIECE", help="run these, also when they have passed")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny base")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-day", help="logs and results (default: .gpu-day)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of each piece (default: 540)")
    chosen = parser.parse_args(words)
    place = chosen.out.resolve()
    place.mkdir(parents=True, exist_ok=True)
    every = pieces(*(("cpu", ["tiny"]) if chosen.rehearse else ("cuda", ["0.5b", "8b"])), place)
    unknown = sorted(set(chosen.only) - {piece.name for piece in every})
    if unknown:
        parser.error(f"there is no piece {unknown[0]}; there are: {', '.join(piece.name for piece in every)}")
    if chosen.list:
        print("\n".join(f"{piece.name:24} {piece.shows}" for piece in every))
        return 0
    written = place / "benchmarks-gpu.md" if chosen.rehearse else ROOT / "docs" / "benchmarks-gpu.md"
    try:
        results = go(every, place, written, chosen.only, chosen.limit)
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return 130
    return int(any(result.state in ("failed", "too slow") for result in results.values()))


def go(
    every: Sequence[Piece], place: Path, written: Path, only: Sequence[str] = (), limit: float = LIMIT
) -> dict[str, Result]:
    """Run what has not passed, or those that are named, and write the page after each."""
    results, about = kept(place), machine()
    for piece in every:
        before = results.get(piece.name)
        if piece.name not in only if only else before is not None and before.state == "passed":
            continue
        result = results[piece.name] = run(piece, place, limit)
        (place / f"{piece.name}.json").write_text(json.dumps(asdict(result), indent=1))
        written.write_text(page(every, results, about), encoding="utf-8")
        why = "" if result.state == "passed" else result.said
        print(f"{result.state:9} {result.seconds:6.1f} s  {piece.name}  {why}", flush=True)
    print(written)
    return results


if __name__ == "__main__":
    sys.exit(main())
