"""The kinds of processors, and the goals that depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.speed.ratios import Goal
from bench.speed.rows import Block, at_least

KINDS = {
    "amx_bf16": "with AMX",
    "avx512_bf16": "with AVX512_BF16",
    "avx512f": "with AVX-512",
    "avx2": "with AVX2",
}
"""By what Linux calls the unit, the best one first."""

GOALS = {
    "decode": (at_least(2.5), at_least(1.5), at_least(1.5)),
    "decode-adapters": (at_least(8), at_least(6), at_least(6)),
    "train": (at_least(4), at_least(3), at_least(3)),
    "grpo": (at_least(5), at_least(5), at_least(4)),
    "grpo-eight": (at_least(10), at_least(10), at_least(8)),
}
"""Of a row: with AMX, with AVX512_BF16, and with neither."""


def units_of(facts: Mapping[str, str]) -> list[str]:
    """The units of a processor that `KINDS` has, the best one first."""
    return [unit for unit in KINDS if unit in facts.get("flags", "").split()]


def read_processor(info: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux says about the first core; empty elsewhere."""
    try:
        lines = info.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def kind_of(facts: Mapping[str, str]) -> str:
    """A name for processors that are equally fast at each row, as `Intel with AMX`."""
    vendors = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
    vendor = facts.get("vendor_id", "")
    family = f" family {facts['cpu family']}" if vendor == "AuthenticAMD" else ""
    unit = "".join(KINDS[unit] for unit in units_of(facts)[:1])
    return " ".join(f"{vendors.get(vendor, 'another processor')}{family} {unit}".split())


def with_goals(blocks: Sequence[Block], facts: Mapping[str, str]) -> list[Block]:
    """The blocks with the goals of this processor."""
    place = {"amx_bf16": 0, "avx512_bf16": 1}.get("".join(units_of(facts)[:1]), 2)
    goal: dict[str, Goal] = {name: goals[place] for name, goals in GOALS.items()}
    return [
        replace(block, rows=tuple(replace(row, goal=goal.get(row.name, row.goal)) for row in block.rows))
        for block in blocks
    ]
