"""`make soak`: the long tests by three workers, then with nothing beside them those that measure time or load.

What passed on these very files is kept in `.soak/`: after Ctrl-C, a crash or a failure the same command runs what is left.
This module is the command and, in the processes of pytest that it starts, their plugin.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(os.environ.get("MOTET_SOAK", ROOT / ".soak"))
FILES = ("src", "tests", "scripts", "bench", "examples", "pyproject.toml", "constraints.txt")
WORKERS = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
PARTS = {"soak and not alone": WORKERS, "soak and alone": ("-s",)}
# Three workers have more threads than there are cores: a thread of torch that waits must not keep a core from another.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def digest() -> str:
    """Of the files that tests depend on, committed or not."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FILES)
    found = hashlib.sha256()
    for name in sorted(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    ):
        if (ROOT / name).is_file():
            found.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()[:12]


class Passed:
    """What passed before, and what passes now."""

    def __init__(self, config: Any) -> None:
        self._called = set[str]()
        self._given: list[str] | None = getattr(config, "workerinput", {}).get("passed")
        self._file = KEPT / digest() if self._given is None else None
        self.before = set(
            self._given or (self._file.read_text().split("\n") if self._file and self._file.exists() else ())
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = sorted(self.before)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.before])
        items[:] = [item for item in items if item.nodeid not in self.before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """With its teardown; a file of one line each has all that passed whatever ends this process."""
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        if self._file and report.when == "teardown" and report.passed and report.nodeid in self._called:
            KEPT.mkdir(exist_ok=True)
            with self._file.open("a") as file:
                file.write(report.nodeid + "\n")
        elif self._file and report.when == "teardown" and self._file.exists():  # what an earlier test of the file left
            here = report.nodeid.partition("::")[0] + "::"
            kept = [line for line in self._file.read_text().splitlines(keepends=True) if not line.startswith(here)]
            self._file.write_text("".join(kept))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Passed(config))


def main(words: list[str]) -> int:
    """Both parts, also when tests of the first fail; Ctrl-C ends the second, too."""
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest gets it too, and ends what its tests started
    shown, worst = ("-v", "--durations", "20", "-rfEsP", "-p", "tests.soak"), 0
    for marks, how in PARTS.items():
        print(f"--- {marks}", flush=True)
        environment = os.environ | (WAITING if how is WORKERS else {})
        command = [sys.executable, "-m", "pytest", "-m", marks, *how, *shown, *words]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        nothing_left = code == pytest.ExitCode.NO_TESTS_COLLECTED and (KEPT / digest()).exists()
        worst = max(worst, 0 if nothing_left else abs(code))  # of a process that a signal ended it is negative
        if code == pytest.ExitCode.INTERRUPTED:
            break
    kept = KEPT / digest()
    print(f"{len(kept.read_text().splitlines()) if kept.exists() else 0} have passed on these files ({kept}).")
    print("Run `make soak` again for the rest: it leaves these out." if worst else "All that can run here has passed.")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
