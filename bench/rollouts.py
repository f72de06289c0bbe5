"""Three jobs on a real vLLM, on-policy and two steps behind, in turn: time, throughput, publishes, and what was learned.

    make vllm && .venv/bin/python -m bench.rollouts                 # a table for docs/servers.md; about ten minutes
    .venv/bin/python -m bench.rollouts --repeats 1 --steps 8        # a quick look

Start-up of the server is excluded: both kinds of run ask one that is up. The base is the small one that ships with Motet, in
float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.config import EngineConfig, RunConfig
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.model.lora_model import LoraModel
from motet.runtime.progress import JobProgress
from tests.support.vllm_server import vllm_server

KEY = "MOTET_BENCH_VLLM_KEY"
JOBS = {"sort": "toy:sort_letters", "reverse": "toy:reverse", "count": "toy:count_letters"}


@dataclass(frozen=True)
class Outcome:
    """One run of all jobs."""

    seconds: float
    tokens: int
    publishes: tuple[float, ...]
    rewards: tuple[float, ...]
    """Held out, of the last version."""
    stale: int
    """Steps that were trained on tokens older than the bound."""


def jobs(lag: int, steps: int) -> list[dict[str, Any]]:
    """The three jobs; two steps behind they correct for it."""
    return [
        {
            "name": name,
            "data": {"source": source, "holdout": 64},
            "rewards": ["exact"],
            "adapter": {"rank": 16},
            "sampling": {"max_tokens": 16},
            "algorithm": {
                "group_size": 8, "groups_per_step": 4, "max_off_policy_steps": lag, "correct_sampler": lag > 0
            },
            "steps": steps,
            "eval": {"every": 0, "n": 2},
        }
        for name, source in JOBS.items()
    ]  # fmt: skip


def run(base: LoraModel, url: str, lag: int, steps: int, directory: Path) -> Outcome:
    """Run the jobs to their end."""
    tree = {
        "base": "small",
        "engine": {"dtype": "float32"},
        "rollout": {"engine": "vllm", "urls": [url], "api_key_env": KEY},
        "jobs": jobs(lag, steps),
        "run": str(directory),
    }
    began: list[float] = []
    ended: list[float] = []

    def observe(progress: Sequence[JobProgress]) -> None:
        if not began and any(job.started for job in progress):
            began.append(time.monotonic())
        if not ended and all(job.state.final for job in progress):
            ended.append(time.monotonic())

    result = run_config(RunConfig.model_validate(tree), base=base, observe=observe)
    tokens, publishes, stale = 0, [], 0
    for name, found in result.jobs.items():
        if found.state != "succeeded":
            raise SystemExit(f"{name}: {found.message}")
        timings = [json.loads(line) for line in (directory / name / "timings.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
        tokens += sum(line["tokens_sampled"] for line in timings)
        publishes += [line["seconds"]["publish"] for line in timings]
        stale += sum(line.get("staleness", 0) > lag for line in metrics)
    rewards = tuple(found.evaluations[-1][1] for found in result.jobs.values())
    return Outcome(ended[0] - began[0], tokens, tuple(publishes), rewards, stale)


def row(label: str, found: Sequence[Outcome]) -> str:
    """A line of the table: medians over the repeats."""
    seconds = statistics.median(result.seconds for result in found)
    rate = statistics.median(result.tokens / result.seconds for result in found)
    publishes = sorted(seconds for result in found for seconds in result.publishes)
    reward = statistics.fmean(reward for result in found for reward in result.rewards)
    return (
        f"| {label} | {seconds:.1f} s | {rate:,.0f} tokens/s | {1000 * statistics.median(publishes):.0f} ms "
        f"({1000 * publishes[int(0.99 * len(publishes))]:.0f} ms) | {reward:.2f} | {sum(result.stale for result in found)} |"
    )


def main() -> None:
    """Run both kinds in turn and print the table."""
    parser = argparse.ArgumentParser(description="On-policy and two steps behind on a real vLLM.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    base = load("small", EngineConfig(dtype="float32"))
    found: dict[int, list[Outcome]] = {0: [], 2: []}
    with tempfile.TemporaryDirectory() as scratch, vllm_server(base, Path(scratch)) as server:
        os.environ[KEY] = server.key
        run(base, server.url, 0, 2, Path(scratch) / "warm")
        for repeat in range(args.repeats):
            for lag, outcomes in found.items():
                outcomes.append(run(base, server.url, lag, args.steps, Path(scratch) / f"{repeat}-{lag}"))
                print(f"  {lag}: {outcomes[-1].seconds:.1f} s", flush=True)
    print("| | time | sampled | publish and probe (99 %) | held-out reward | stale steps |\n|---|---|---|---|---|---|")
    print(row("on-policy", found[0]))
    print(row("two steps behind", found[2]))
    pairs = [result.seconds / other.seconds for result, other in zip(found[0], found[2], strict=True)]
    print(f"\nspeed-up: {statistics.median(pairs):.2f}×")


if __name__ == "__main__":
    main()
