"""Many tenants at once: no answer fails (`bench/load.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.load import Kind, kinds_of, load, table
from bench.speed.envs import directory, python_of

STATS = """Type,Name,Request Count,Failure Count,Median Response Time,50%,66%,99%,100%
POST,chat,120,0,31,31,40,250,300
GET,list /v1/jobs,80,2,4,4,5,12,20
,Aggregated,200,2,20,20,30,240,300
"""


def test_what_locust_writes_becomes_a_table(tmp_path: Path) -> None:
    (tmp_path / "stats.csv").write_text(STATS)
    kinds = kinds_of(tmp_path / "stats.csv")
    assert kinds[0] == Kind("chat", 120, 0, 0.031, 0.25)
    assert kinds[-1] == Kind("Aggregated", 200, 2, 0.02, 0.24)
    assert table(kinds).splitlines()[1].split() == ["chat", "120", "0", "0.03", "s", "0.25", "s"]


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
