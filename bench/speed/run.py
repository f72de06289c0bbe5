"""One run: start workers, measure the machine, run the blocks, profile, write what was found."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.speed.goals import kind_of, read_processor, units_of
from bench.speed.limits import Machine, Shape
from bench.speed.link import SideFailed, Workers
from bench.speed.measure import Measured, judge, run_block
from bench.speed.page import Run, compose, findings, record, remember
from bench.speed.plot import draw
from bench.speed.programs import ROOT, program, threads
from bench.speed.rows import RANK, Block
from bench.speed.shapes import SHAPES, SMALL_BASE, make_base
from bench.speed.table import text

from motet.model.find import cache_directory

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "decode, 64 rows, 8 adapters, one process": {
        "of": "decode",
        "prompts": 8,
        "each": 8,
        "prompt_tokens": 40,
        "new_tokens": 8,
        "adapters": 8,
        "rank": RANK,
        "samplers": 0,
    },
    "gradients, 8 × (64 + 64) tokens": {
        "of": "train",
        "samples": 8,
        "prompt": 64,
        "response": 64,
        "adapters": 1,
        "rank": RANK,
    },
}


@dataclass(frozen=True)
class Settings:
    """What a run is to do."""

    blocks: Sequence[Block]
    quick: bool
    repeats: int | None
    """Of every block, instead of its own number."""
    out: Path
    """Logs and results.json."""
    page: Path
    device: str
    envs: Path
    profiled: bool
    """Whether to look where the time goes."""


def say(words: str) -> None:
    """Progress, at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {words}", flush=True)


def base_directory(base: str, out: Path, device: str) -> Path:
    """Where a base lies; one of random weights is made."""
    if base in SHAPES:
        return make_base(base, out / "bases", device)
    if base == "small":
        return SMALL_BASE
    return cache_directory() / "SmolLM2-135M-Instruct"


def programs_of(block: Block) -> list[str]:
    """The workers that a block needs."""
    return list(dict.fromkeys(side.program for side in block.sides.values()))


def run(settings: Settings) -> Run:
    """Measure everything and write it down; what a side cannot do stands in the table."""
    settings.out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    runs: list[Block] = []
    results: list[Measured] = []
    limits: dict[str, Any] = {}
    profiles: dict[str, Mapping[str, float]] = {}
    seen: dict[str, dict[str, Any]] = {}
    for base in dict.fromkeys(block.base for block in settings.blocks):
        blocks = [block for block in settings.blocks if block.base == base]
        found, profiled, loaded = _on_base(base, blocks, settings, limits)
        results += found
        profiles |= profiled
        seen |= loaded
        runs += blocks
    shapes = bool({block.base for block in runs} & SHAPES.keys())
    result = Run(
        title=f"Speed on {'a GPU' if settings.device == 'cuda' else 'a CPU'}" if shapes else "Speed",
        quick=settings.quick,
        blocks=runs,
        results=results,
        environment={**environment(seen, settings.device), "load average before": f"{load:.1f}"},
        limits=limits,
        profiles=profiles,
    )
    _write(result, settings)
    return result


def _on_base(
    base: str, blocks: Sequence[Block], settings: Settings, limits: dict[str, Any]
) -> tuple[list[Measured], Mapping[str, Mapping[str, float]], Mapping[str, dict[str, Any]]]:
    """Results, profiles, and what workers said when they had loaded, of all blocks on one base.

    Workers live as long as a block needs them; `limits` is filled where it is empty.
    """
    directory = base_directory(base, settings.out, settings.device)
    mark = "" if base == "smollm2" else f":{base}"
    motet = next((name for block in blocks for name in programs_of(block) if name.startswith("motet")), "motet")
    names = list(dict.fromkeys([f"machine{mark}", motet, *(name for block in blocks for name in programs_of(block))]))
    called = str(directory) if base in SHAPES else base
    programs = [
        program(name, called, directory, settings.envs, quick=settings.quick, device=settings.device) for name in names
    ]
    results: list[Measured] = []
    with Workers(programs, settings.out / "logs", ROOT, say) as workers:
        workers.start(names)
        if not limits:
            limits.update(_limits(workers, f"machine{mark}"))
        machine = Machine(limits["value"], limits["bandwidth"]) if limits else None
        shape = Shape.of(directory) if (directory / "config.json").is_file() else None
        for place, block in enumerate(blocks):
            repeats = settings.repeats or block.repeats[0 if settings.quick else 1]
            answers, failed = run_block(block, workers, repeats, say)
            (settings.out / f"{block.name.replace(':', '-')}.json").write_text(json.dumps(answers, indent=1))
            results += judge(block, answers, failed, shape, machine)
            print(text(results[-len(block.rows) :]), flush=True)
            for name in programs_of(block):
                if name != motet and not any(name in programs_of(later) for later in blocks[place + 1 :]):
                    workers.end(name)
        profiles = _profiles(workers, motet, base) if settings.profiled and base != "small" else {}
        return results, profiles, workers.loaded


def _limits(workers: Workers, name: str) -> dict[str, Any]:
    try:
        workers.ask(name, {"op": "prepare", "work": "limits", "args": {}, "warm": False})
        found = workers.ask(name, {"op": "measure", "work": "limits", "args": {}})
    except SideFailed as error:
        say(f"the limits are not measured: {error}")
        return {}
    finally:
        workers.end(name)
    say(f"products {found['value'] / 1e9:.0f} GFLOP/s, memory {found['bandwidth'] / 1e9:.0f} GB/s")
    return found


def _profiles(workers: Workers, name: str, base: str) -> Mapping[str, Mapping[str, float]]:
    found = {}
    for title, args in PROFILES.items():
        title = title if base == "smollm2" else f"{base}: {title}"
        request = {"work": "profile", "args": dict(args)}
        try:
            workers.ask(name, {"op": "prepare", "warm": False, **request})
            found[title] = workers.ask(name, {"op": "measure", **request})["groups"]
            workers.ask(name, {"op": "release", **request})
            say(f"profile of {title}")
        except SideFailed as error:
            say(f"no profile of {title}: {error}")
    return found


def environment(loaded: Mapping[str, Mapping[str, Any]], device: str) -> dict[str, str]:
    """What the figures depend on."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores used": str(threads()),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
    if device == "cuda":
        found["GPU"] = next((str(item["device"]) for item in loaded.values() if "device" in item), "unknown")
    for name, item in loaded.items():
        versions = ", ".join(f"{package} {version}" for package, version in item.get("versions", {}).items())
        found[f"`{name}`"] = f"{versions}; ready after {item.get('seconds', 0.0):.0f} s (excluded)"
        if item.get("exact") is False:
            found[f"`{name}`"] += "; **not bit-exact here**"
        if "sampling processes" in item:
            found[f"`{name}`"] += f"; samples in {item['sampling processes']} processes"
        found[f"`{name}`"] += "".join(f"; {note}" for note in item.get("notes", ()))
    return found


def _processor() -> str:
    facts = read_processor()
    name = facts.get("model name", platform.processor())
    return f"{name}, {os.cpu_count()} cores, {' '.join(reversed(units_of(facts)))}"


def _write(found: Run, settings: Settings) -> None:
    settings.page.parent.mkdir(parents=True, exist_ok=True)
    picture = settings.page.with_suffix(".svg")
    if importlib.util.find_spec("matplotlib") is None:
        say("no matplotlib, so no picture")
    else:
        picture.write_text(draw(found.results), encoding="utf-8")
    store = settings.page.with_suffix(".json")
    known = json.loads(store.read_text()) if store.is_file() else {}
    kind = kind_of(read_processor()) if settings.device == "cpu" else found.environment["GPU"]
    processors = remember(found, kind, known)
    store.write_text(json.dumps(processors, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = compose(found, picture.name, findings(settings.page), processors)
    settings.page.write_text(page, encoding="utf-8")
    results = settings.out / "results.json"
    results.write_text(json.dumps(record(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{text(found.results)}\n\n{settings.page}\n{picture}\n{results}", flush=True)
