"""Fifty tenants ask a service for everything that it does, at once: what fails, and how long answers take.

    make load                                   # ten minutes
    make load LOAD_ARGS="--seconds 30"          # a short look
    make load LOAD_ARGS=--attacks               # one more tenant attacks meanwhile, in each way of bench/attacks.py in turn
    .venv/bin/python -m bench.load --tenants 20 # with locust in .envs/locust (bench/speed/envs.py)

They chat, stream, complete, list, upload, submit small jobs and take their adapters, and sample in the Tinker protocol.
Locust drives them from a process of its own (`bench/load_users.py`). An answer 429 with `Retry-After` is no failure, and is
waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from bench.attacks import ATTACKS
from bench.speed.envs import directory, python_of

from tests.support.service_run import Service

USERS = Path(__file__).with_name("load_users.py")
TOKEN = "token-of-the-load"
ATTACK_SECONDS = 15.0
"""Until the next attack."""
CONFIG = f"engine: {{samplers: 0, threads: 1}}\nmetrics_token: {TOKEN}\n"


@dataclass(frozen=True)
class Kind:
    """Requests of one kind."""

    name: str
    count: int
    failures: int
    median: float
    """Seconds, as is `slowest`."""
    slowest: float
    """Of all but the slowest hundredth."""


def kinds_of(file: Path) -> list[Kind]:
    """What locust wrote: a line for each kind of request, and one for all, named `Aggregated`."""
    with file.open(newline="") as lines:
        return [
            Kind(
                row["Name"],
                int(row["Request Count"]),
                int(row["Failure Count"]),
                *(_seconds(row[at]) for at in ("50%", "99%")),
            )
            for row in csv.DictReader(lines)
        ]


def _seconds(milliseconds: str) -> float:
    return 0.0 if milliseconds in ("", "N/A") else float(milliseconds) / 1000


@contextlib.contextmanager
def attacked(service: Service, key: str) -> Iterator[None]:
    """One attack after another, while the block runs."""
    done = threading.Event()

    def attack() -> None:
        while not done.is_set():
            for name, way in ATTACKS.items():
                print(f"attack: {name}", file=sys.stderr, flush=True)
                with contextlib.suppress(httpx2.HTTPError), way(service, key):
                    if done.wait(ATTACK_SECONDS):
                        return

    attacking = threading.Thread(target=attack)
    attacking.start()
    try:
        yield
    finally:
        done.set()
        attacking.join()


def load(where: Path, seconds: float, tenants: int, *, attacks: bool = False) -> tuple[list[Kind], str]:
    """Put a service in a directory under load: requests by kind, and what failed, as locust tells it."""
    python = python_of(directory(), "locust")
    if not python.exists():
        raise SystemExit(f"locust is not in {python.parents[1]}: run `make load`")
    where.mkdir(parents=True, exist_ok=True)
    config, keys, found = where / "serve.yaml", where / "keys.json", where / "found"
    config.write_text(CONFIG)
    service = Service(where / "served", "--config", str(config), keys=True)
    try:
        service.start()
        service.become(service.admin_key)
        keys.write_text(
            json.dumps(
                {"tenants": [service.key_for(f"tenant-{number}") for number in range(tenants)], "metrics": TOKEN}
            )
        )
        command = [str(python), "-m", "locust", "-f", str(USERS), "--headless", "--only-summary", "--host", service.url]
        command += f"--users {tenants} --spawn-rate 10 --run-time {int(seconds)}s --stop-timeout 60".split()
        command += ["--csv", str(found), "--loglevel", "ERROR"]
        beside = attacked(service, service.key_for("greedy")) if attacks else contextlib.nullcontext()
        with beside:
            told = subprocess.run(
                command, env={**os.environ, "MOTET_LOAD_KEYS": str(keys)}, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert service.answers("/readyz")
    finally:
        service.close()
    failures, errors = Path(f"{found}_failures.csv").read_text(), Path(f"{found}_exceptions.csv").read_text()
    wrong = [line for text in (failures, errors) for line in text.splitlines()[1:]]
    if told.returncode not in (0, 1):  # 1: requests failed
        raise SystemExit(told.stderr)
    return kinds_of(Path(f"{found}_stats.csv")), "\n".join(wrong)


def table(kinds: Sequence[Kind]) -> str:
    """For people."""
    lines = [f"{'request':28} {'number':>7} {'failed':>7} {'p50':>9} {'p99':>9}"]
    lines += [
        f"{kind.name:28} {kind.count:7} {kind.failures:7} {kind.median:7.2f} s {kind.slowest:7.2f} s" for kind in kinds
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--attacks", action="store_true", help="one more tenant attacks meanwhile")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="motet-load-") as place:
        kinds, wrong = load(Path(place), given.seconds, given.tenants, attacks=given.attacks)
    print(table(kinds), wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
