"""Name the rooms whose other tests a change needs: those of files that differ from main. The last line of `make test`.

python scripts/what_else.py
"""

from __future__ import annotations

import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "seconds.toml"
WORKERS = 2
"""As many files as are tested at once on the machine that the figures are of."""


def changed() -> list[str]:
    """List the files that differ from main, committed or not; none without git or a main."""
    commands = (("diff", "--name-only", "main"), ("ls-files", "--others", "--exclude-standard"))
    found = [
        subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False) for words in commands
    ]
    return [file for done in found if done.returncode == 0 for file in done.stdout.splitlines()]


def rooms(files: Iterable[str]) -> set[str]:
    """Name the rooms of files of the package and of tests."""
    names = set()
    for file in files:
        place, _, rest = file.partition("/")
        if place in ("src", "tests") and "/" in (inner := rest.removeprefix("motet/")):
            names.add(inner.partition("/")[0])
    return names


def minutes(tier2: dict[str, float]) -> dict[str, float]:
    """Give the minutes that `make check ROOM=…` takes, by room, from CPU seconds of files."""
    total: dict[str, float] = defaultdict(float)
    for file, cpu_seconds in tier2.items():
        total[file.split("/")[1]] += cpu_seconds / 60 / WORKERS
    return total


def line(files: Iterable[str], tier2: dict[str, float]) -> str:
    """Write the line; empty if nothing that differs has other tests."""
    needed = minutes(tier2)
    told = [
        f"make check ROOM={room}" + (f" ({max(round(needed[room]), 1)} min)" if room in needed else "")
        for room in sorted(rooms(files))
        if (ROOT / "tests" / room).is_dir() and room != "support"
    ]
    return f"what differs from main has more tests: {', '.join(told)}" if told else ""


if __name__ == "__main__":
    print(line(changed(), tomllib.loads(SECONDS.read_text(encoding="utf-8")).get("tier2", {})))
