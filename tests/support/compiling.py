"""Compiles launches of kernels in one process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64, "gfx950": 160}
"""KiB of shared memory that a program may have: CUDA's table of compute capabilities, AMD's of its instruction sets."""
SMALL = {"sm_86": 99, "sm_89": 99, "sm_120": 99}
"""The same of cards with little."""

PROGRAM = """
import json, sys
from tests.support import bad_kernels, launched_kernels, launched_layers, launched_room, passes_without_values, watched_passes
for which, words in json.loads(sys.argv[1]):
    print(json.dumps(which))
    locals()[which].main(words)
"""


def compiled(cache: Path, *parts: tuple[str, list[str]], packages: Path | None = None) -> list[list[Any]]:
    """For each part, a module and its words, the lines of JSON that it prints: in one process without the interpreter."""
    places = [str(place) for place in (packages, ROOT, os.environ.get("PYTHONPATH")) if place]
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(parts)]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = []
    for line in map(json.loads, done.stdout.splitlines()):
        if isinstance(line, str):
            found.append([])
        else:
            found[-1].append(line)
    return found
