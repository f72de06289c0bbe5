"""Plant each fault of `tests/faults.toml` in a copy of the sources and see its test turn red.

A test that stays green under its fault does not guard what it says. Run by `make faults`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """A line of the sources made wrong, and the test that must notice."""

    invariant: str
    what: str
    file: str
    right: str
    wrong: str
    test: str


FAULTS = [Fault(**fault) for fault in tomllib.loads((ROOT / "tests" / "faults.toml").read_text())["fault"]]


def plant(fault: Fault) -> tuple[bool, str]:
    """Whether the fault's test turned red, and the last line it printed."""
    with tempfile.TemporaryDirectory(prefix="motet-fault-") as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src" / "motet", source / "motet")
        path = source / "motet" / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            return False, f"the line to spoil is there {text.count(fault.right)} times: mend this list"
        path.write_text(text.replace(fault.right, fault.wrong))
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "soak or not soak"]
        command = [sys.executable, "-m", "pytest", *options, fault.test]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            return False, "no end after ten minutes"
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        return done.returncode == 1, lines[-1] if lines else done.stderr[-200:]


def main() -> None:
    """Plant all faults (or those whose description contains a word) and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose invariant or description contains one of these")
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [fault for fault in FAULTS if any(word in fault.invariant + fault.what for word in words)]
    results = []
    with ThreadPoolExecutor(2) as pool:
        for fault, (red, line) in zip(chosen, pool.map(plant, chosen), strict=True):
            print(f"{'red  ' if red else 'GREEN'}  {fault.invariant}: {fault.what}\n       {line}", flush=True)
            results.append(red)
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
