"""Many tenants at once: no answer fails (`bench/load.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.load import load, table
from bench.speed.envs import directory, python_of


@pytest.mark.soak
@pytest.mark.alone
def test_fifty_tenants_are_answered_for_a_minute(tmp_path: Path) -> None:
    """`MOTET_LOAD_SECONDS` makes it longer; `make load` asks for ten minutes."""
    if not python_of(directory(), "locust").exists():
        pytest.skip("locust is not installed: run `make load`, or `make soak`")
    kinds, wrong = load(tmp_path, float(os.environ.get("MOTET_LOAD_SECONDS", "60")), 50)
    print(table(kinds))
    assert not wrong, wrong
    names = {one.name for one in kinds}
    assert {
        "chat",
        "chat, streamed",
        "submit",
        "upload",
        "metrics",
        "asample",
        "retrieve_future",
        "list /v1/jobs",
    } <= names
    assert sum(one.count for one in kinds if one.name.endswith("(429)")) <= sum(one.count for one in kinds) / 10
