"""One attacker of each kind against a service with honest tenants; `refusals.toml` has what single requests are refused for."""

from __future__ import annotations

import contextlib
import os
import statistics
from pathlib import Path

import pytest

from tests.support.adapter_files import run_alone, weights_of
from tests.support.red_team import PROOF, Neighbours, Ring, Row, run, table
from tests.support.red_team_doors import DOORS
from tests.support.red_team_work import WORK
from tests.support.service_run import Service
from tests.support.small_disk import small_disk

pytestmark = [pytest.mark.soak, pytest.mark.alone]

ATTACKS = (*DOORS, *WORK)
CONFIG = """
engine: {samplers: 0, threads: 1, slots: 4}
patience_seconds: 3
"""
QUIET = 15.0


def test_attacks_cost_their_tenant_alone(tmp_path: Path) -> None:
    """`MOTET_ATTACKS` names some of them, with commas between them."""
    only = os.environ.get("MOTET_ATTACKS", "")
    attacks = tuple(one for one in ATTACKS if not only or one.name in only.split(", "))
    (expected,) = weights_of(run_alone(tmp_path / "alone", PROOF)).values()
    traps = tmp_path / "traps"
    traps.mkdir()
    with small_disk(tmp_path / "disk", "1500m") as disk:
        config = tmp_path / "serve.yaml"
        config.write_text(CONFIG)
        service = Service(disk / "served", "--config", str(config), keys=True)
        try:
            service.start()
            ring = Ring(service, traps)
            neighbours = Neighbours(ring, expected)
            with contextlib.closing(ring.tenants):
                with neighbours.beside():
                    rows, broken = run(ring, neighbours, attacks, QUIET)
                print(table(rows, neighbours))
                judge(ring, neighbours, rows, broken)
        finally:
            service.close()


def judge(ring: Ring, neighbours: Neighbours, rows: list[Row], broken: list[str]) -> None:
    """Every attack held, and the neighbours hardly noticed."""
    begun, ended = rows[1].begun, rows[-1].ended
    assert not broken, "\n".join(broken)
    assert not neighbours.wrong, neighbours.wrong[:10]
    for seen in (neighbours.chats, neighbours.lists):
        quiet, loud = seen.within(rows[0].begun, begun), seen.within(begun, ended)
        assert statistics.median(loud) < 20 * statistics.median(quiet) + 1.0
        assert max(loud) < 60.0
    disk = [row for row in rows if row.name == "a full disk"]
    assert all(row.begun <= at <= row.ended + 5.0 for at in neighbours.full for row in disk), "the disk was full before"
    proofs = neighbours.proofs.within(begun, ended)
    alone = statistics.median(neighbours.proofs.within(0.0, begun))
    print(
        f"seconds a step: {alone:.2f} before, {statistics.median(proofs):.2f} in the middle, {max(proofs):.2f} at most"
    )
    assert statistics.median(proofs) < 10 * alone + 1.0
    assert rows[-1].memory_mb - rows[0].memory_mb < 1024
    assert not list(ring.traps.iterdir())
    assert ring.service.answers("/readyz")
    assert len(ring.service.engines()) == 1, "the engine was never ended"
    assert len(ring.http_process.children(recursive=True)) < 40
