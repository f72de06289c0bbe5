"""Run by `make soak`: the service's two processes are killed a dozen times at random moments, and nothing is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import motet
from tests.support.service_run import Service, tiny

pytestmark = pytest.mark.soak

KILLS = 12
STEPS = 120
SLOWEST = 900.0
"""Seconds that the jobs may take after the last kill."""


def jobs() -> list[dict[str, Any]]:
    """Jobs of different kinds, each long enough to live through all kills."""
    lagging = {"algorithm": {"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 2}}
    return [
        tiny("plain", STEPS),
        tiny("lagging", STEPS, **lagging),
        tiny("seldom", STEPS, checkpoint={"every": 7}),
        tiny("judged", STEPS, eval={"every": 50}),
    ]


def undisturbed(directory: Path) -> Mapping[str, bytes]:
    """What the jobs end with when nobody kills anything."""
    service = Service(directory)
    try:
        service.start()
        for job in jobs():
            service.submit(job)
        return finished(service)
    finally:
        service.close()


def finished(service: Service) -> Mapping[str, bytes]:
    """Wait for all jobs, look at their events, and return their weights."""
    found = {}
    for name in (str(job["name"]) for job in jobs()):
        service.until(lambda name=name: service.job(name)["state"] not in ("queued", "running"), SLOWEST)  # type: ignore[misc]
        assert service.job(name)["state"] == "succeeded", service.job(name)["message"]
        with motet.Client(service.url) as client:
            steps = [event.data["step"] for event in client.events(name) if event.kind == "step"]
        assert steps == list(range(STEPS + 1)), "a step is told once, and none is missing"
        found[name] = service.weights(name)
    return found


def test_a_dozen_kills_lose_nothing(tmp_path: Path) -> None:
    source = random.Random(0)
    service = Service(tmp_path / "killed")
    kills = {"service": 0, "both": 0, "engine": 0, "engine that starts": 0}
    began = time.monotonic()
    try:
        service.start(ready=False)
        for job in jobs():
            service.submit(job)
        steps = [0]
        while sum(kills.values()) < KILLS and min(steps) < STEPS:
            starting = source.random() < 0.2
            service.until(lambda starting=starting: starting or service.answers("/readyz"))  # type: ignore[misc]
            time.sleep(source.uniform(0.0, 2.0))
            if source.random() < 0.5:
                who = source.choice(("service", "both"))
                (service.kill if who == "service" else service.kill_all)()
                time.sleep(source.uniform(0.0, 1.0))  # the engine works on alone
                service.start(ready=False)
                kills[who] += 1
            else:
                kills["engine that starts" if starting else "engine"] += _kill_engine(service)
            steps = [service.job(str(job["name"]))["step"] for job in jobs()]
        assert sum(kills.values()) >= KILLS / 2, "the jobs were through before: give them more steps"
        found = finished(service)
    finally:
        service.close()
    print(f"{kills} in {time.monotonic() - began:.0f} s; steps at the last kill: {steps}")
    assert found == undisturbed(tmp_path / "undisturbed")


def _kill_engine(service: Service) -> int:
    """Whether there was one to kill."""
    try:
        service.engine().kill()
    except (ValueError, psutil.NoSuchProcess):  # it is between two lives
        return 0
    return 1
