"""Run by `make soak`: processes of runs, of a service and of its workers are killed at random, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bench.kills.__main__ import killed

from tests.support.memory_limit import memory_limit
from tests.support.service_run import LASTING, serving, tiny
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.soak

KILLS = {"run": 28, "service": 24}


@pytest.mark.parametrize("of", list(KILLS))
def test_kills_at_random_moments_change_no_byte(of: str, tmp_path: Path) -> None:
    tally = killed(tmp_path, of, KILLS[of], seed=0)
    print(tally.table())
    assert not tally.wrong, "\n".join(tally.wrong)


def test_a_real_engine_that_meets_its_memory_limit_twice_in_a_jobs_turn_fails_the_job(tmp_path: Path) -> None:
    steps = {"data": {"source": "toy:add", "size": 4096, "holdout": 0}, "adapter": {"rank": 64}}
    job = tiny("hungry", LASTING, algorithm={"type": "sft", "rows_per_step": 256}, **steps)
    del job["reward"]
    with memory_limit(24) as limit, serving(tmp_path / "served") as service:  # it counts what is taken from then on
        service.submit(job)
        service.becomes("hungry", "running")
        limited, until = set[int](), time.monotonic() + 2 * PATIENCE
        while (now := service.job("hungry"))["state"] != "failed" and time.monotonic() < until:
            engines = {one.pid for one in service.engines()} - limited
            if engines and service.answers("/readyz"):
                service.reaches("hungry", now["step"] + 1)
                limit.write_text(str(min(engines)))
                limited |= engines
            time.sleep(0.2)
    assert "for want of memory in a turn of this job, 2 times; make its rows or its steps smaller" in now["message"]
