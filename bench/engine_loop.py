"""How long a turn of an engine's event loop takes, by kind of step: `python -m bench.engine_loop [docs/engine-loop.md]`.

A service with the limits that it has by default is asked for everything that an engine does, each kind with the worst
values that these limits allow (`bench.engine_kinds`). Its engine has the event loop of `bench.turns`. Measure where nothing
else runs.

    python -m bench.engine_loop --only "sft: wide" --seconds 5 --stacks /tmp/stacks
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from bench.engine_kinds import kinds, scorer
from bench.engine_tenant import Tenant
from bench.turns import STACKS, TURNS, MeasuredLoop, Told, collected, measuring_engines

from tests.support.fake_run import Setting, job, run_jobs
from tests.support.service_run import Service
from tests.support.waiting import PATIENCE

MOST_SECONDS = 0.05
"""Longest turn, and how late a timer may be because a thread keeps the interpreter's lock."""
TRIES = 2
"""How often a kind that is too long is asked for again; the least counts, because others work here too."""


@dataclass
class Figure:
    """What a kind of step took."""

    kind: str
    turn: float
    """Seconds of the longest turn."""
    late: float
    """Seconds that a timer was late."""
    total: float
    """Seconds of the loop."""
    seconds: float
    """That it lasted."""
    outcome: str


END_OF_STEP = "RL: the end of a step of 32,768 rollouts, on a fake device"


def end_of_step(directory: Path) -> Figure:
    """The figure of a whole step with as many rollouts as it may have, in this process: no device takes its time."""
    algorithm = {"group_size": 8, "groups_per_step": 4096, "max_failed_fraction": 1.0}
    config = job("a", steps=1, algorithm=algorithm, sampling={"max_tokens": 2}, eval={"every": 0})
    before, began = asyncio.get_event_loop_policy(), time.monotonic()
    asyncio.set_event_loop_policy(_Policy())
    gc.callbacks.append(collected)
    TURNS.longest = TURNS.latest = TURNS.total = 0.0
    try:
        setting = Setting(capacity=384, train_tokens=2048, micro_batch_tokens=1024, jitter=None)
        run = run_jobs(directory / "fake", [config], setting)
    finally:
        gc.callbacks.remove(collected)
        asyncio.set_event_loop_policy(before)
    seconds = time.monotonic() - began
    return Figure(END_OF_STEP, TURNS.longest, TURNS.latest, TURNS.total, seconds, run.state("a").value)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return MeasuredLoop()


def measured(directory: Path, only: Sequence[str] = ("",), seconds: float = 8.0, tries: int = TRIES) -> list[Figure]:
    """The figures of the kinds whose names have one of these parts; a job gets so many seconds for its steps."""
    whole = [end_of_step(directory)] if any(part in END_OF_STEP for part in only) else []
    with measuring_engines(directory) as told, scorer() as address:
        service = Service(directory / "service", keys=True)
        host = address.removeprefix("http://").partition(":")[0]
        (service.directory / "engine.yaml").write_text(f"engine: {{threads: 1}}\nreward_hosts: ['{host}']\n")
        try:
            service.start()
            service.become(service.admin_key)
            headers = {"Authorization": f"Bearer {service.key_for('us')}"}
            with httpx2.Client(base_url=service.url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
                us, chosen = Tenant(http, seconds), kinds(address)
                _asked(told, us, "warm", lambda us: us.job(data={"source": "toy:add", "size": 64}, reward="exact"), 1)
                names = [name for name in chosen if any(part in name for part in only)]
                return [*whole, *(_asked(told, us, name, chosen[name], tries) for name in names)]
        finally:
            service.close()


def _asked(told: Told, us: Tenant, name: str, ask: Callable[[Tenant], None], tries: int) -> Figure:
    found = []
    for _ in range(tries):
        told.begin()
        began, us.outcome = time.monotonic(), ""
        ask(us)
        turns = told.read()
        found.append(Figure(name, turns.longest, turns.latest, turns.total, time.monotonic() - began, us.outcome))
        if max(found[-1].turn, found[-1].late) < MOST_SECONDS:
            break
    best = found[-1]
    best.turn, best.late = min(figure.turn for figure in found), min(figure.late for figure in found)
    print(
        f"{best.turn * 1000:7.1f} ms, late {best.late * 1000:7.1f} ms, {best.total:5.1f} of {best.seconds:5.1f} s  "
        f"{name}  [{best.outcome[:150]}]",
        file=sys.stderr,
        flush=True,
    )
    return best


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} cores of {line.partition(': ')[2]}"
    return f"{os.cpu_count()} cores"


def page(figures: Sequence[Figure], before: Mapping[str, Sequence[float]]) -> str:
    """The figures as a page; `before` has those of an earlier release, by kind."""
    day = datetime.datetime.now(datetime.UTC).date()
    lines = [
        "# Figures of the engine's event loop\n",
        "Written by `python -m bench.engine_loop docs/engine-loop.md`. A service with its default limits is asked for each",
        "kind of step with the worst values that these limits allow. The longest turn of the engine's loop is in",
        f"milliseconds of CPU time; the goal is {MOST_SECONDS * 1000:g} ms. How late a timer was, by the clock, shows what",
        f"else holds the interpreter's lock. Measured on {_processor()}, {day}. [The HTTP",
        "loop](loop-figures.md) has its own page.\n",
        "| kind of step | longest turn, ms | timer late, ms | both before they were mended |\n|---|---|---|---|",
    ]
    for figure in figures:
        was = ", ".join(f"{1000 * seconds:.1f}" for seconds in before.get(figure.kind, ()))
        lines.append(f"| {figure.kind} | {1000 * figure.turn:.1f} | {1000 * figure.late:.1f} | {was} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--stacks", default="", help="a file for what runs in long turns")
    parser.add_argument("--before", type=Path, help="figures that --keep kept")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    if given.stacks:
        os.environ[STACKS] = given.stacks
    with tempfile.TemporaryDirectory() as directory:
        figures = measured(Path(directory), given.only, given.seconds, given.tries)
    if given.keep is not None:
        given.keep.write_text(json.dumps({figure.kind: (figure.turn, figure.late) for figure in figures}))
    text = page(figures, {} if given.before is None else json.loads(given.before.read_text()))
    if given.page is not None:
        given.page.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
