"""`make soak` goes on where it was stopped (`tests/soak.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.soak import ROOT

TESTS = """
import os, pathlib, pytest
def test_good(): pass
def test_good_too(): pass
def test_later(): assert "GOOD" in os.environ
@pytest.fixture
def broken():
    yield
    assert "GOOD" in os.environ
def test_not_torn_down(broken): pass
"""


def run(place: Path, *words: str, **more: str) -> str:
    """What pytest prints of the tests in a directory, whose `kept` has what passed."""
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.soak", "--rootdir", str(place), *words]
    own = {"MOTET_SOAK": str(place / "kept" / "passed"), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {**os.environ, **own, **more}
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False).stdout


def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    kept, words = tmp_path / "kept" / "passed", ("-q", "-n", "1", "test_some.py")
    assert "1 failed, 3 passed, 1 error" in run(tmp_path, *words)
    failures = kept.with_name("failed").read_text()
    assert [name in failures for name in ("test_good", "test_later (call)", "test_not_torn_down (teardown)")] == [
        0,
        1,
        1,
    ]
    assert not kept.read_text(), "a test of the file may have left what could not be torn down"
    assert "4 passed" in run(tmp_path, *words, GOOD="1")
    lines = kept.read_text().splitlines()
    assert len(lines) == 4
    kept.write_text("\n".join([*lines[:3], "0" + lines[3]]) + "\n")
    assert "1 passed" in run(tmp_path, *words, GOOD="1"), "what passed on other files does not count"
