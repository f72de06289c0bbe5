"""How soon a service is ready again after its processes are killed, beside three jobs: `python -m bench.restarts`.

Kills the HTTP process, the engine, or their parent, in a random order; after the parent's death its processes must end by
themselves, and it is started again. A kill is ready again when `/readyz` answers 200, seen from outside; a job goes on when
its next step is recorded.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.support.service_run import Service, serving, tiny

JOBS = 3
KINDS = ("HTTP process", "engine", "motet serve")
REST_SECONDS = 31.0
"""After the death of an HTTP process: the third within a minute is started again later."""
END_SECONDS = 2.0
"""In which the processes of a parent that is killed end."""
_LOOK_SECONDS = 0.02


def kill(service: Service, kind: str) -> set[int]:
    """Kill processes, and wait until they are gone; returns their ids."""
    gone = [service.http()] if kind != "engine" else []
    gone += [service.engine()] if kind != "HTTP process" else []
    for process in gone if kind != "motet serve" else ():
        process.kill()
    began = time.monotonic()
    if kind == "motet serve":
        service.kill()
    while any(process.is_running() and process.status() != "zombie" for process in gone):
        time.sleep(_LOOK_SECONDS)
    if kind == "motet serve":
        assert time.monotonic() - began < END_SECONDS, "its processes outlive it"
        service.launch()
    return {process.pid for process in gone}


def is_ready(service: Service, gone: set[int]) -> bool:
    """Whether it answers with processes that live; it may not have noticed a death yet."""
    engines = {process.pid for process in service.engines()}
    return bool(engines) and not engines & gone and service.answers("/readyz")


def seconds_until(condition: Callable[[], bool], began: float) -> float:
    """Until something is true."""
    while not condition():
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - began


def measured(kills: int, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds until ready, and until each job has done another step, for each kind of kill."""
    kinds = [*KINDS] * kills
    random.Random(seed).shuffle(kinds)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place, serving(Path(place) / "served") as service:
        names = [f"job-{number}" for number in range(JOBS)]
        for name in names:
            service.submit(tiny(name, 100_000))
        for kind in kinds:
            steps = {name: service.job(name)["step"] for name in names}
            for name in names:
                service.reaches(name, steps[name] + 2)
            began = time.monotonic()
            gone = kill(service, kind)
            ready = seconds_until(lambda: is_ready(service, gone), began)  # noqa: B023
            steps = {name: service.job(name)["step"] for name in names}
            on = seconds_until(lambda: all(service.job(name)["step"] > steps[name] for name in names), began)  # noqa: B023
            found[kind].append((ready, on))
            print(f"{kind:13} ready {ready:5.2f} s, jobs {on:5.2f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            time.sleep(REST_SECONDS if kind == "HTTP process" else 1.0)
    return found


def main() -> None:
    """Print a table for docs/service.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=15, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    before, found = os.getloadavg()[0], measured(args.kills, args.seed)
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    processor = named[1] if named else "unknown processor"
    print(f"\n{processor}, {os.cpu_count()} cores, load {before:.1f} at first, {os.getloadavg()[0]:.1f} at last\n")
    print("| killed | times | ready, middle | ready, worst | jobs go on, middle |\n|---|---|---|---|---|")
    for kind in KINDS:
        ready, on = zip(*found[kind], strict=True)
        print(
            f"| {kind} | {len(ready)} | {statistics.median(ready):.1f} s | {max(ready):.1f} s | {statistics.median(on):.1f} s |"
        )


if __name__ == "__main__":
    main()
