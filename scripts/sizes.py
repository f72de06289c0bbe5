"""Count lines, statements and modules of each room, and what the tests have; with a commit also the difference since then.

    python scripts/sizes.py                    # this tree
    python scripts/sizes.py --since v0.1.0     # and what came and left since a commit

A statement is a node `ast.stmt`, docstrings included. Counted are files that git knows.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tarfile
from collections import defaultdict
from dataclasses import astuple, dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src/motet", "tests", "bench", "scripts", "examples")


@dataclass
class Size:
    """The size of a room."""

    lines: int = 0
    statements: int = 0
    modules: int = 0

    def add(self, other: Size) -> None:
        """Add another room."""
        self.lines += other.lines
        self.statements += other.statements
        self.modules += other.modules


def size_of(source: str) -> Size:
    """Count one module."""
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))
    return Size(len(source.splitlines()), statements, 1)


def room_of(file: str) -> str | None:
    """Name the room of a file: `src service`, `tests`; None if it is in no place that is counted."""
    place = next((place for place in PLACES if file.startswith(f"{place}/")), None)
    if place is None or not file.endswith(".py"):
        return None
    return f"src {file.split('/')[2].removesuffix('.py')}" if place == "src/motet" else place


def sizes(sources: dict[str, str]) -> dict[str, Size]:
    """Count by room; `src` is all of the package."""
    rooms: dict[str, Size] = defaultdict(Size)
    for file, source in sources.items():
        room = room_of(file)
        if room is None:
            continue
        size = size_of(source)
        for name in {room, room.split()[0]}:
            rooms[name].add(size)
    return rooms


def here() -> dict[str, str]:
    """Read the files of this tree, committed or not."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PLACES)
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return {
        file: (ROOT / file).read_text(encoding="utf-8") for file in files if (ROOT / file).is_file() and room_of(file)
    }


def at(commit: str) -> dict[str, str]:
    """Read the files of a commit."""
    packed = subprocess.run(("git", "archive", commit), cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        members = {member.name: archive.extractfile(member) for member in archive if room_of(member.name)}
        return {name: file.read().decode() for name, file in members.items() if file is not None}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="also show the difference since this commit")
    since: str | None = parser.parse_args().since
    now, before = sizes(here()), sizes(at(since)) if since else {}
    heads = ("lines", "statements", "modules")
    print(f"{'':18}" + "".join(f"{head:>12}{'since' if since else '':>9}" for head in heads))
    for room in sorted(
        {*now, *before}, key=lambda room: -max(now.get(room, Size()).lines, before.get(room, Size()).lines)
    ):
        columns = zip(astuple(now.get(room, Size())), astuple(before.get(room, Size())), strict=True)
        print(f"{room:18}" + "".join(f"{new:12,}{f'{new - old:+,}' if since else '':>9}" for new, old in columns))


if __name__ == "__main__":
    main()
