"""How long a service is away when its process is killed: `python -m bench.takeover [KILLS]`.

Four jobs train meanwhile. Ready is `/readyz` with 200: the engine is there, and what it did without a service is written down.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.service_run import Service, tiny

JOBS = ("first", "second", "third", "fourth")
AWAY_SECONDS = 2.0
"""Between a kill and the next start."""


def started(service: Service) -> tuple[float, float]:
    """Seconds from the start of the process until it is ready, and those of processor time."""
    begun = time.monotonic()
    service.start()
    seconds = time.monotonic() - begun
    assert service.process is not None
    used = psutil.Process(service.process.pid).cpu_times()
    return seconds, used.user + used.system


def lines(service: Service) -> int:
    """Steps that all jobs have written."""
    return sum(path.read_text().count("\n") for path in service.directory.glob("run/*/metrics.jsonl"))


def main(kills: int) -> None:
    """Print what was measured."""
    with tempfile.TemporaryDirectory() as directory:
        service = Service(Path(directory) / "served")
        try:
            print(
                "with an engine that starts: ready after {:.1f} s, {:.1f} s of processor time".format(*started(service))
            )
            for name in JOBS:
                service.submit(tiny(name, 100_000))
                service.reaches(name, 1)
            engine, found = service.engine(), list[tuple[float, float]]()
            for _ in range(kills):
                service.kill()
                before = lines(service)
                time.sleep(AWAY_SECONDS)
                made = lines(service) - before
                found.append(started(service))
                assert service.engine() == engine
                seconds, used = found[-1]
                print(
                    f"taken over: ready after {seconds:.1f} s, {used:.1f} s of processor time; {made} steps in between"
                )
            print(
                f"median {statistics.median(seconds for seconds, _ in found):.1f} s, load {psutil.getloadavg()[0]:.1f}"
            )
        finally:
            service.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
