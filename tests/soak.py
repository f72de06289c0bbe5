"""`make soak`: the long tests by three workers, then with nothing beside them those that measure time or load.

What passed, with its seconds, is kept in `.soak/`. After Ctrl-C, a crash or a failure the same command runs what is left,
as long as neither the package nor the file of the test has changed. How a test failed is in `.soak/failed` at once.
This module is the command and, in the processes of pytest that it starts, their plugin.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(os.environ.get("MOTET_SOAK", ROOT / ".soak" / "passed"))
FAILED = KEPT.with_name("failed")
FILES = ("src", "tests", "scripts", "bench", "examples", "pyproject.toml", "constraints.txt")
WORKERS = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
PARTS = {"soak and not alone": WORKERS, "soak and alone": ("-s",)}
# Three workers have more threads than there are cores: a thread of torch that waits must not keep a core from another.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


@functools.cache
def _files() -> tuple[str, ...]:
    """Those that tests depend on, committed or not."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FILES)
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return tuple(sorted(name for name in found if (ROOT / name).is_file()))


@functools.cache
def digest(file: str) -> str:
    """Of what a file of tests depends on. Those of the project read and run other tests; the others do not."""
    found = hashlib.sha256()
    for name in _files():
        if name == file or file.startswith("tests/project/") or not Path(name).name.startswith("test_"):
            found.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()[:12]


def passed() -> list[str]:
    """The ids of the tests that passed on these very files."""
    lines = [line.split(" ", 2) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return [name for known, _, name in lines if known == digest(name.partition("::")[0])]


def lasted() -> dict[str, float]:
    """Seconds that the tests of each file took when they last passed, on whichever files."""
    lines = [line.split(" ", 2) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    found: dict[str, float] = defaultdict(float)
    for name, seconds in {name: float(seconds) for _, seconds, name in lines}.items():
        found[name.partition("::")[0]] += seconds
    return dict(found)


class Passed:
    """What passed before, and what passes now."""

    def __init__(self, config: Any) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._called = set[str]()
        given: dict[str, Any] = getattr(config, "workerinput", {})
        self._reports = "passed" not in given
        self.before = set(passed() if self._reports else given["passed"])
        self.lasted: dict[str, float] = lasted() if self._reports else given["lasted"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput |= {"passed": sorted(self.before), "lasted": self.lasted}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """The longest files first: a worker has one file at a time."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.before])
        items[:] = [item for item in items if item.nodeid not in self.before]
        items.sort(key=lambda item: -self.lasted.get(item.nodeid.partition("::")[0], 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """With its teardown; a file of one line each has all that passed whatever ends this process."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        if not self._reports:
            return
        if report.failed:
            KEPT.parent.mkdir(exist_ok=True)
            with FAILED.open("a") as failed:
                failed.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")
        if report.when != "teardown":
            return
        file = report.nodeid.partition("::")[0]
        if report.passed and report.nodeid in self._called:
            KEPT.parent.mkdir(exist_ok=True)
            with KEPT.open("a") as kept:
                kept.write(f"{digest(file)} {self._seconds[report.nodeid]:.1f} {report.nodeid}\n")
        elif KEPT.exists():  # what an earlier test of the file left
            lines = KEPT.read_text().splitlines(keepends=True)
            KEPT.write_text("".join(one for one in lines if not one.split(" ", 2)[2].startswith(file + "::")))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Passed(config))


def main(words: list[str]) -> int:
    """Both parts, also when tests of the first fail; Ctrl-C ends the second, too."""
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest gets it too, and ends what its tests started
    shown, worst = ("-v", "--durations", "20", "-rfEsP", "-p", "tests.soak"), 0
    FAILED.unlink(missing_ok=True)
    for marks, how in PARTS.items():
        print(f"--- {marks}", flush=True)
        environment = os.environ | (WAITING if how is WORKERS else {})
        command = [sys.executable, "-m", "pytest", "-m", marks, *how, *shown, *words]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        nothing_left = code == pytest.ExitCode.NO_TESTS_COLLECTED and passed()
        worst = max(worst, 0 if nothing_left else abs(code))  # of a process that a signal ended it is negative
        if code == pytest.ExitCode.INTERRUPTED:
            break
    print(f"{len(passed())} have passed on these files ({KEPT}).")
    if FAILED.exists():
        print(f"How the others failed: {FAILED}")
    print("Run `make soak` again for the rest: it leaves these out." if worst else "All that can run here has passed.")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
