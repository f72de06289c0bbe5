"""Tenants that train and chat beside one that attacks in fifteen ways at once: what they have with it, and without.

    .venv/bin/python -m bench.attacked_day                        # ten minutes without and with the attacker, on SQLite
    .venv/bin/python -m bench.attacked_day --postgresql --slots 16
    .venv/bin/python -m bench.attacked_day --seconds 60 --parts attacked

`alone` and `attacked` have a service each, with an engine of one thread and the same tenants. `account` has the attacker
only, so whatever the service does beyond an idle one is the attacker's: its account is compared with that. The tenants and
the attacker (`bench/attacker.py`) run on the same machine, in processes of their own. An answer 429 with `Retry-After` is
no failure, and is asked again. Exits with 1 if a process of the service ended, a request failed or an adapter is another
than the one that `motet run` makes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil  # type: ignore[import-untyped]

from tests.support.adapter_files import run_alone, weights_of
from tests.support.database import new_database, running_postgres
from tests.support.service_run import FINAL, Json, Service, tiny
from tests.support.tenants import CHAT, Tenants

ATTACKER = "mallory"
SEEDS = 4
"""Different jobs of the tenants; the adapters of each are compared."""
STEPS = 12
SETTLED = 5.0
"""Seconds of an idle service before it is measured."""
PATIENCE = 120.0
"""Seconds until a request has failed."""
PARTS = ("alone", "attacked", "account")


def job(number: int) -> Json:
    """A small job of a tenant."""
    return tiny(f"job-{number % SEEDS}", STEPS, seed=number % SEEDS, eval={"every": 0})


# --- tenants ----------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the tenants saw."""

    chats: list[float] = field(default_factory=list)
    """Seconds of each, as answered; those of a 429 are a request of their own."""
    starts: list[float] = field(default_factory=list)
    """Seconds from a job's acceptance until it runs."""
    requests: int = 0
    again: int = 0
    """Answers that said when to come again."""
    failed: list[str] = field(default_factory=list)
    adapters: int = 0
    """Adapters that were compared."""
    steps: int = 0


class Tenant:
    """One that trains a job after another, and chats."""

    def __init__(self, number: int, http: httpx2.AsyncClient, seen: Seen, expected: Sequence[bytes], until: float):
        self._number, self._http, self._seen, self._until = number, http, seen, until
        self._expected, self._random = expected, random.Random(number)

    def _open(self) -> bool:
        return time.monotonic() < self._until

    async def ask(self, method: str, path: str, **request: Any) -> httpx2.Response | None:
        """An answer that is a success, or None."""
        while True:
            self._seen.requests += 1
            try:
                answer = await self._http.request(method, path, **request)
            except httpx2.HTTPError as error:
                self._seen.failed.append(f"{method} {path}: {error!r}")
                return None
            if answer.status_code == 429 and "Retry-After" in answer.headers:
                self._seen.again += 1
                await asyncio.sleep(min(float(answer.headers["Retry-After"]), 5.0))
                continue
            if not answer.is_success:
                self._seen.failed.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
                return None
            return answer

    async def chats(self) -> None:
        """A few tokens, every two seconds."""
        await asyncio.sleep(2 * self._random.random())
        while self._open():
            begun = time.monotonic()
            if await self.ask("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 6}) is not None:
                self._seen.chats.append(time.monotonic() - begun)
            await asyncio.sleep(1 + 2 * self._random.random())

    async def trains(self) -> None:
        """A job after another; what has not ended with the time is left."""
        await asyncio.sleep(2 * self._random.random())
        wanted = job(self._number)
        path = f"/v1/jobs/{wanted['name']}"
        while self._open():
            if await self.ask("POST", "/v1/jobs", json=wanted) is None:
                await asyncio.sleep(1)
                continue
            if not await self._trained(path):
                return
            await self._looked_at(path)
            await self.ask("DELETE", path)

    async def _trained(self, path: str) -> bool:
        while self._open():
            await asyncio.sleep(2)
            answer = await self.ask("GET", path)
            state = "" if answer is None else answer.json()["state"]
            if state in FINAL:
                if state != "succeeded":
                    self._seen.failed.append(f"{path}: {answer.text[:500] if answer else ''}")
                return True
        if (answer := await self.ask("GET", f"{path}/events")) is not None:
            self._times(answer.json()["data"], time.time())
        return False

    async def _looked_at(self, path: str) -> None:
        if (answer := await self.ask("GET", f"{path}/events")) is not None:
            self._times(answer.json()["data"], None)
            self._seen.steps += STEPS
        if (answer := await self.ask("GET", f"{path}/versions/latest/download")) is not None:
            self._seen.adapters += 1
            if weights_in(answer.content) != self._expected[self._number % SEEDS]:
                self._seen.failed.append(f"{path}: the adapter is not that of `motet run` alone")

    def _times(self, events: list[Json], now: float | None) -> None:
        """Keep the time of a job's start; of one that still waits, the time until now."""
        at = {event["data"]["state"]: event["time"] for event in reversed(events) if event["kind"] == "state"}
        if "queued" in at and (begun := at.get("running", now)) is not None:
            self._seen.starts.append(begun - at["queued"])


def weights_in(packed: bytes) -> bytes:
    """The weights of an adapter that was downloaded."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        (name,) = [name for name in archive.getnames() if name.endswith(".safetensors")]
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


async def drive(url: str, keys: Sequence[str], seen: Seen, expected: Sequence[bytes], seconds: float) -> None:
    """Let all tenants ask until the time is up."""
    until = time.monotonic() + seconds
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number, key in enumerate(keys):
            headers = {"Authorization": f"Bearer {key}"}
            client = httpx2.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False)
            tenant = Tenant(number, await stack.enter_async_context(client), seen, expected, until)
            group.create_task(tenant.trains())
            group.create_task(tenant.chats())


# --- processes --------------------------------------------------------------------------------------------------------------


class Watch:
    """The service's processes: whether they live, their memory, and what CPU time they took."""

    def __init__(self, service: Service) -> None:
        assert service.process is not None
        self._service = service
        self.roles = {"parent": psutil.Process(service.process.pid), "http": service.http()}
        self.roles |= {f"engine {n}".removesuffix(" 0"): process for n, process in enumerate(service.engines())}
        self.most: Counter[str] = Counter()
        """Largest resident memory in MB, and without files that the kernel may take back (`own`); `the largest other` is a
        process below these.
        """
        self._over = threading.Event()

    def ended(self) -> list[str]:
        """The processes that are not there any more, and starts that the parent told of."""
        gone = [role for role, process in self.roles.items() if not process.is_running()]
        told = (self._service.directory / "out").read_text()
        return gone + re.findall(r"[^\n]*(?:start(?:s|ed|ing)? (?:it )?again|ended by)[^\n]*", told)

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far: of each process alone, of all others below it (ended ones included), and of all else here."""
        found = dict[str, float]()
        known = {process.pid for process in self.roles.values()}
        for role, process in self.roles.items():
            own = process.cpu_times()
            found[role] = own.user + own.system
            below = 0.0 if role == "parent" else own.children_user + own.children_system
            for child in [] if role == "parent" else process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in known:
                        below += sum(child.cpu_times()[:4])
            found[f"below {role}"] = below
        machine = psutil.cpu_times()
        found["all else, clients and database too"] = machine.user + machine.system - sum(found.values())
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at memory while the block runs."""
        thread = threading.Thread(target=self._look)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _look(self) -> None:
        known = {process.pid for process in self.roles.values()}
        while not self._over.wait(1.0):
            now: Counter[str] = Counter()
            with contextlib.suppress(psutil.NoSuchProcess):
                for role, process in self.roles.items():
                    memory = process.memory_info()
                    now[role], now[f"{role}, own"] = memory.rss >> 20, (memory.rss - memory.shared) >> 20
                    for child in process.children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            size = (child.memory_info().rss >> 20) if child.pid not in known else 0
                            now["the largest other"] = max(now["the largest other"], size)
            for role, megabytes in now.items():
                self.most[role] = max(self.most[role], megabytes)


# --- parts ------------------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """What one part of the day gave."""

    seconds: float
    seen: Seen
    ended: list[str]
    memory: dict[str, int]
    cpu: dict[str, float]
    """Seconds that the processes took meanwhile."""
    usage: dict[str, Json]
    """By tenant, what was counted meanwhile: tokens, seconds of the device and of the processor."""
    attacks: dict[str, dict[str, int]]


_COUNTED = ("tokens_prompt", "tokens_sampled", "tokens_trained", "device_seconds", "cpu_seconds")


def _used(tenants: Tenants) -> dict[str, Json]:
    time.sleep(3)  # usage is written every two seconds
    return {name: {kind: line[kind] for kind in _COUNTED} for name, line in tenants.used().items()}


def _less(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    if not any(isinstance(value, dict) for value in after.values()):
        return {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: _less(value, before.get(name, {})) for name, value in after.items()}


def run(
    where: Path, part: str, options: argparse.Namespace, database: str | None, expected: Sequence[bytes],
    ways: Sequence[str] = (),
) -> Part:  # fmt: skip
    """One part of the day, on a new service."""
    where.mkdir(parents=True)
    config = where / "serve.yaml"
    config.write_text(f"engine: {{samplers: 0, threads: 1, slots: {options.slots}}}\n")
    url = [] if database is None else ["--database", database]
    service, seen, attacks = (
        Service(where / "served", "--config", str(config), *url, keys=True),
        Seen(),
        dict[str, Any](),
    )
    try:
        service.start()
        with contextlib.closing(Tenants(service)) as tenants:
            keys = [tenants.key(f"tenant-{number}") for number in range(options.tenants)]
            seconds = min(options.seconds, 60.0) if part == "account" else options.seconds
            time.sleep(SETTLED)
            watch = Watch(service)
            idle, since = watch.cpu(), time.monotonic()
            time.sleep(SETTLED)
            idle = {name: taken / (time.monotonic() - since) for name, taken in _less(watch.cpu(), idle).items()}
            used, cpu, begun = _used(tenants), watch.cpu(), time.monotonic()
            with watch.watched(), contextlib.ExitStack() as stack:
                if part != "alone":
                    attacks = stack.enter_context(_attacked(service.url, tenants.key(ATTACKER), seconds, ways))
                if part == "account":
                    time.sleep(seconds)
                else:
                    asyncio.run(drive(service.url, keys, seen, expected, seconds))
            used = _less(_used(tenants), used)
            cpu, took = _less(watch.cpu(), cpu), time.monotonic() - begun
            if part == "account":
                cpu = {name: taken - idle[name] * took for name, taken in cpu.items()}
            return Part(took, seen, watch.ended(), dict(watch.most), cpu, used, attacks)
    finally:
        service.close()


@contextlib.contextmanager
def _attacked(url: str, key: str, seconds: float, ways: Sequence[str]) -> Iterator[dict[str, dict[str, int]]]:
    """Attack while the block runs; gives a dictionary that has the answers afterwards."""
    command = [sys.executable, "-m", "bench.attacker", url, str(seconds), *ways]
    environment, found = {**os.environ, "MOTET_API_KEY": key}, dict[str, dict[str, int]]()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            yield found
            told, _ = process.communicate(timeout=seconds + PATIENCE)
            found.update(json.loads(told))
        finally:
            process.kill()


# --- the table --------------------------------------------------------------------------------------------------------------


def _share(values: Sequence[float], share: float) -> str:
    return f"{np.quantile(values, share):.2f} s" if values else "–"


def rows_of(part: Part) -> dict[str, str]:
    """The figures of a part by name."""
    seen, busy = part.seen, {name: usage for name, usage in part.usage.items() if name}
    attacker = part.usage.get(ATTACKER, dict.fromkeys(_COUNTED, 0))
    device = sum(usage["device_seconds"] for usage in busy.values())
    return {
        "processes that ended": str(len(part.ended)),
        "requests of the tenants, failed, to come again": f"{seen.requests:,}, {len(seen.failed)}, {seen.again}",
        "chats: median, 99 of 100 within": f"{_share(seen.chats, 0.5)}, {_share(seen.chats, 0.99)}",
        "start of a job: median, longest": f"{_share(seen.starts, 0.5)}, {_share(seen.starts, 1)}",
        "jobs that began, steps of ended ones": f"{len(seen.starts)}, {seen.steps}",
        "adapters compared": str(seen.adapters),
        **{f"memory of {role}": f"{megabytes:,} MB" for role, megabytes in part.memory.items()},
        "device seconds of all tenants, of the attacker": f"{device:.1f}, {attacker['device_seconds']:.1f}",
        "CPU seconds counted of all, of the attacker": f"{sum(usage['cpu_seconds'] for usage in busy.values()):.1f}, "
        f"{attacker['cpu_seconds']:.1f}",
        "tokens of the attacker": f"{sum(attacker[kind] for kind in _COUNTED[:3]):,}",
        **{f"CPU seconds of {role}": f"{taken:.1f}" for role, taken in part.cpu.items()},
    }


def table(parts: dict[str, Part]) -> str:
    """The figures of all parts, side by side."""
    columns = {name: rows_of(part) for name, part in parts.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    lines += [f"| {name} | {' | '.join(column.get(name, '–') for column in columns.values())} |" for name in names]
    return "\n".join(lines)


def day(options: argparse.Namespace, ways: Sequence[str] = ()) -> dict[str, Part]:
    """Run the parts."""
    parts = dict[str, Part]()
    with contextlib.ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-day-")))
        expected = list[bytes]()
        if options.parts != ["account"]:
            result = run_alone(where / "motet-run", *(job(number) for number in range(SEEDS)))
            expected = [weights_of(result)[job(number)["name"]] for number in range(SEEDS)]
        server = stack.enter_context(running_postgres()) if options.postgresql else None
        for part in options.parts:
            with contextlib.nullcontext() if server is None else new_database(server) as database:
                parts[part] = run(where / part, part, options, database, expected, ways)
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each part; `account` has 60 at most")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--slots", type=int, default=51, help="jobs that the engine has at once")
    parser.add_argument("--postgresql", action="store_true", help="a PostgreSQL of its own in place of SQLite")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", default=[], help="some of the attacks, such as b1 b15")
    parser.add_argument("--out", type=Path, help="a file for everything that was measured, as JSON")
    options = parser.parse_args(arguments)
    parts = day(options, options.ways)
    if options.out is not None:
        options.out.write_text(json.dumps({name: asdict(part) for name, part in parts.items()}, indent=1))
    print(table(parts))
    for name, part in parts.items():
        print(f"\n{name}:", *part.ended, *part.seen.failed[:20], *map(str, part.attacks.items()), sep="\n  ")
    return int(any(part.ended or part.seen.failed for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
