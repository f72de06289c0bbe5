"""A full disk under a whole service: jobs wait and say so, and go on by themselves with the same bytes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.support.adapter_files import run_alone, weights_of
from tests.support.service_run import Service, tiny
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.slow

STEPS = 24
SETTLES = 1.5
"""Seconds without a step that show that a job does not go on."""


def test_a_service_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    expected = weights_of(run_alone(tmp_path / "undisturbed", tiny("a", STEPS)))["a"]
    with small_disk(tmp_path / "disk", "60m") as disk:
        service = Service(disk / "served")
        try:
            service.start()
            service.submit(tiny("a", STEPS))
            service.reaches("a", 3)
            filler = disk / "filler"
            _fill(filler, shutil.disk_usage(disk).free)
            service.until(lambda: not service.answers("/readyz") or "is full" in service.job("a")["message"])
            step = service.job("a")["step"]
            time.sleep(SETTLES)
            assert service.job("a")["step"] == step < STEPS, "it waits"
            assert service.job("a")["state"] in ("queued", "running")
            assert "full" in service.get("/readyz").json()["message"] + service.job("a")["message"]
            refused = service.get("/v1/jobs")
            assert refused.status_code == 200, "reading goes on"
            filler.unlink()
            assert service.ended("a") == "succeeded", service.job("a")["message"]
            assert service.steps("a") == list(range(STEPS + 1))
            assert service.weights("a") == expected
            assert service.answers("/readyz")
        finally:
            service.close()


def _fill(path: Path, size: int) -> None:
    """Leave no room."""
    with path.open("wb", buffering=0) as file:
        for _ in range(size // 4096 + 1):
            try:
                file.write(b"x" * 4096)
            except OSError:
                return
