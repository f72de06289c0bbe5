"""Many live jobs in one service: speed, memory, fairness, publish latency, the cost of pages, and a kill in the middle.

    .venv/bin/python -m bench.many                # 1, 10, 50, 100 and 200 jobs of ten tenants: some minutes
    .venv/bin/python -m bench.many --jobs 20      # a short look

Jobs train on the small base with ranks 1 to 8 and short answers. Each count has a service of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml

from tests.support.service_run import Service

TENANTS = 10
PATIENCE = 1800.0


@dataclass(frozen=True)
class Point:
    """What one number of live jobs costs."""

    jobs: int
    submitted: float
    """Seconds in which one client handed them in."""
    steps: int
    """In the measured time."""
    wall_per_step: float
    """Seconds, as is the next."""
    cpu_per_step: float
    """Of the engine and the service together."""
    engine_mib: int
    """Memory of the engine's process; `service_mib` of the HTTP process, `whole_mib` of all, helpers too."""
    service_mib: int
    whole_mib: int
    least_share: float
    """Steps of the tenant with the fewest, for each of the tenant with the most."""
    publish: float
    """Median seconds from an optimizer step until its version can be sampled."""
    publish_slowest: float
    """Of all but the slowest hundredth."""
    metrics_ms: float
    """The service's CPU milliseconds for an answer of `/metrics`; `list_ms` are those for a page of a hundred jobs."""
    list_ms: float
    resumed: float
    """Seconds from the engine's death until every job had taken a step again."""
    resumed_cpu: float
    """CPU seconds of the new engine and the others until then."""


def job(number: int, steps: int) -> dict[str, Any]:
    """With a rank from 1 to 8."""
    return {
        "name": f"job-{number}", "data": {"source": "toy:sort_letters", "size": 64, "holdout": 4}, "reward": "exact",
        "steps": steps, "sampling": {"max_tokens": 8}, "adapter": {"rank": 1 + number % 8}, "eval": {"every": 0},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
    }  # fmt: skip


class Fleet:
    """A service with live jobs of ten tenants."""

    def __init__(self, where: Path, jobs: int) -> None:
        where.mkdir(parents=True)
        config = where / "serve.yaml"
        limits = {"queued_jobs": jobs, "running_jobs": jobs}
        engine = {"samplers": 0, "threads": 1, "slots": jobs}
        config.write_text(yaml.safe_dump({"engine": engine, "limits": limits, "rate": None}))
        self.service = Service(where / "served", "--config", str(config), keys=True)
        self.jobs, self.keys, self.admin, self.submitted = jobs, list[str](), "", 0.0

    def start(self) -> None:
        """Submit them all; they have more steps than anybody waits for."""
        self.service.start()
        self.admin = self.service.admin_key
        self.service.become(self.admin)
        self.keys = [self.service.key_for(f"tenant-{tenant}") for tenant in range(min(TENANTS, self.jobs))]
        begun = time.monotonic()
        for number in range(self.jobs):
            self.service.become(self.keys[number % len(self.keys)])
            self.service.submit(job(number, 100_000))
        self.submitted = time.monotonic() - begun

    def steps(self) -> dict[str, int]:
        """Of each job: by id."""
        found = {}
        for file in (self.service.directory / "run").glob("*/timings.jsonl"):
            found[file.parent.name] = file.read_bytes().count(b"\n")
        return found

    def until(self, condition: Callable[[], bool]) -> float:
        """Seconds that it took; a job that fails ends the bench."""

        def reached() -> bool:
            for file in (self.service.directory / "run").glob("*/error.log"):
                raise SystemExit(f"job {file.parent.name} failed: {file.read_text().splitlines()[-1]}")
            return condition()

        begun = time.monotonic()
        self.service.until(reached, PATIENCE)
        return time.monotonic() - begun

    def processes(self) -> list[psutil.Process]:
        """The parent, the HTTP process, the engine, and what they started."""
        assert self.service.process is not None
        parent = psutil.Process(self.service.process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu(self) -> float:
        """Seconds of all processes."""
        found = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # a helper has ended
                found += sum(process.cpu_times()[:2])
        return found

    def timings(self, since: float) -> list[dict[str, Any]]:
        """Of the steps that ended since then."""
        files = (self.service.directory / "run").glob("*/timings.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]
        return [line for line in lines if line["time"] >= since]

    def own_cpu(self) -> float:
        """Seconds of the HTTP process."""
        return float(sum(self.service.http().cpu_times()[:2]))

    def cost_of(self, path: str, beside: float, times: int = 50) -> float:
        """CPU milliseconds of the service for an answer; it takes `beside` seconds in each second without requests."""
        cpu, begun = self.own_cpu(), time.monotonic()
        for _ in range(times):
            assert self.service.get(path).is_success
        return 1000 * max(0.0, self.own_cpu() - cpu - beside * (time.monotonic() - begun)) / times


def measure(where: Path, jobs: int, seconds: float) -> Point:
    """Train so many jobs for some seconds, look at pages, kill the engine, and wait for every job to go on."""
    fleet = Fleet(where, jobs)
    service = fleet.service
    try:
        fleet.start()
        fleet.until(lambda: len(now := fleet.steps()) == jobs and min(now.values()) > 0)
        before, cpu, begun, clock = fleet.steps(), fleet.cpu(), time.monotonic(), time.time()
        own_cpu = fleet.own_cpu()
        fleet.until(lambda: time.monotonic() - begun > seconds)
        after, cpu, wall = fleet.steps(), fleet.cpu() - cpu, time.monotonic() - begun
        beside = (fleet.own_cpu() - own_cpu) / wall
        done = {job_id: after[job_id] - before[job_id] for job_id in after}
        engine, own = (process.memory_info().rss >> 20 for process in (service.engine(), service.http()))
        whole = sum(process.memory_full_info().pss for process in fleet.processes()) >> 20
        publish = sorted(line["seconds"]["publish"] for line in fleet.timings(clock))
        shares = list[int]()
        for key in fleet.keys:
            service.become(key)
            shares.append(sum(done[item["id"]] for item in service.ask("GET", "/v1/jobs?limit=100")["data"]))
        service.become(fleet.admin)
        metrics, listed = (fleet.cost_of(path, beside) for path in ("/metrics", "/v1/jobs?limit=100"))
        dying = service.engine()
        dying.kill()
        dying.wait()
        killed, before_cpu = fleet.steps(), fleet.cpu()
        resumed = fleet.until(lambda: all(n > killed[job_id] for job_id, n in fleet.steps().items()))
        resumed_cpu = fleet.cpu() - before_cpu
    finally:
        service.close()
    n = sum(done.values())
    return Point(
        jobs, fleet.submitted, n, wall / n, cpu / n, engine, own, whole, min(shares) / max(shares), statistics.median(publish),
        publish[int(0.99 * len(publish))], metrics, listed, resumed, resumed_cpu,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each number of jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 10, 50, 100, 200])
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(arguments)
    for jobs in given.jobs:
        with tempfile.TemporaryDirectory(prefix="motet-many-") as place:
            point = measure(Path(place) / "many", jobs, given.seconds)
        print("  ".join(f"{name} {value:.3g}" for name, value in asdict(point).items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
