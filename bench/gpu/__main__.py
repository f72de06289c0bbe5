"""What a card is asked in 13 minutes: `make gpu-quarter`.

python -m bench.gpu                          # docs/benchmarks-gpu.md; leaves out what has passed before
python -m bench.gpu --list                   # the parts
python -m bench.gpu --only bits-8b decode-8b # these, whatever they did before
python -m bench.gpu --limit 300              # all that goes into five minutes
python -m bench.gpu --rehearse               # the same parts on a CPU, with a tiny base; the page is in the folder of results
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import page
from bench.gpu.archive import pack
from bench.gpu.parts import LIMIT, SLOWER, parts
from bench.gpu.schedule import ROOT, Part, Result, Schedule, kept

PAGE = ROOT / "docs" / "benchmarks-gpu.md"
_BASES_BYTES = 24 * 2**30
"""Free bytes that memory must have to keep the bases."""


def main(words: list[str] | None = None) -> int:
    """Run what has not passed; returns 0 where nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="What a card is asked in 13 minutes.")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these, also when they have passed")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny base")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-quarter", help="results (default: .gpu-quarter)")
    said = f"of all (default: {LIMIT:.0f}, and {SLOWER} times as many in a rehearsal)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=said)
    chosen = parser.parse_args(words)
    place = chosen.out.resolve()
    bases = place / "bases" if chosen.rehearse else bases_directory(place)
    every = parts(*(("cpu", ["tiny"]) if chosen.rehearse else ("cuda", ["0.5b", "8b"])), place, bases)
    if unknown := sorted(set(chosen.only) - {part.name for part in every}):
        parser.error(f"there is no part {unknown[0]}; there are: {', '.join(part.name for part in every)}")
    if chosen.list:
        print("\n".join(f"{part.name:32} {part.limit:4.0f} s  {part.shows}" for part in every))
        return 0
    place.mkdir(parents=True, exist_ok=True)
    written = place / PAGE.name if chosen.rehearse else PAGE
    todo = to_run(every, kept(place), chosen.only)
    try:
        whole = SLOWER * LIMIT if chosen.rehearse else LIMIT
        results = go(todo, place, written, whole if chosen.limit is None else chosen.limit)
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return 130
    found = [results[part.name] for part in every if part.name in results]
    print(f"{page.summary(found)}\n{written}\n{place}")
    return int(any(result.state in ("failed", "cut") for result in found))


def to_run(every: Sequence[Part], before: dict[str, Result], only: Sequence[str]) -> list[Part]:
    """The parts that are named, or have not passed, and those that make their bases."""

    def wanted(part: Part) -> bool:
        return part.name in only if only else part.name not in before or before[part.name].state != "passed"

    needed = {part.needs for part in every if wanted(part)}
    return [part for part in every if part.name in needed or (wanted(part) and (part.makes is None or bool(only)))]


def go(todo: Sequence[Part], place: Path, written: Path, limit: float) -> dict[str, Result]:
    """Run parts; the page and the archive are written after each of them."""
    cards, (card, about) = page.read(written.with_suffix(".json")), machine()
    names = {part.name for part in todo}

    def ended(results: dict[str, Result]) -> None:
        page.write(written, page.merged(cards, card, about, [results[name] for name in results if name in names]))
        for file in (written, written.with_suffix(".json")):
            if file.parent != place:
                shutil.copy(file, place)  # for the archive
        pack(place)

    return Schedule(todo, place, limit, ended).run()


def bases_directory(place: Path) -> Path:
    """Where bases of random weights are made: in memory where there is room for them."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > _BASES_BYTES
    return memory / "motet-bases" if roomy else place / "bases"


def machine() -> tuple[str, dict[str, str]]:
    """The card's name, and what its figures depend on."""
    import torch

    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "transformers, Triton, peft": ", ".join(_version(name) for name in ("transformers", "triton", "peft")),
        "Python, CPU cores": f"{platform.python_version()}, {os.cpu_count()}",
    }
    return card, about


def commit() -> str:
    """The commit of this tree: git's, or the kit's."""
    return os.environ.get("MOTET_COMMIT") or _said("git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD")


def _said(*words: str) -> str:
    """The first line that a program prints; a dash where it is not there."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "–"
    return next(iter(done.stdout.splitlines()), "–")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that parts are ended on the way out
    sys.exit(main())
