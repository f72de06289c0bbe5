"""`motet` as a command of this process, and files to give it; with a fixture for every test.

code, out, err = says("submit", job_file(tmp_path, tiny("sort")), "--follow")
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet.commands import cli

Motet = Callable[..., tuple[int, str, str]]
NOBODY = Path("~nobody-here")
"""In the home of a user that no machine has."""


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Motet:
    """Exit code, output and errors of a command."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["motet", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(code or 0), out, err

    return run


def job_file(directory: Path, *jobs: dict[str, Any], **fields: Any) -> str:
    """A file of jobs, as a path to type."""
    path = directory / "jobs.yaml"
    path.write_text(json.dumps({"base": "small", "jobs": jobs, **fields}))  # JSON is YAML
    return str(path)


def rows_in(directory: Path) -> Path:
    """Twenty problems."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(20)))
    return path
