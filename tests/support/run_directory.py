"""A run directory as a run leaves it, written through the runtime's own functions: four jobs in four states."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import open_job

NASTY = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \u2028 \x1b[31m'
START = 1_790_000_000.0


def evaluation(reward: float, rng: random.Random) -> dict[str, Any]:
    return {
        "reward": reward,
        "reward_std": 0.4,
        "reward_stderr": 0.05,
        "reward_parts": {"exact": reward},
        "length": 20 + rng.random(),
        "truncated": 0.02,
        "rollouts": 64,
        "failed": 0,
    }


def step_line(step: int, level: float, rng: random.Random, lag: int = 0) -> dict[str, Any]:
    """A line of metrics.jsonl as `step_record` makes it."""
    version = max(0, step - lag)
    decay = math.exp(-step / 25)
    return {
        "step": step,
        "version": version,
        "staleness": step - version,
        "reward": min(max(level + rng.gauss(0, 0.05), 0.0), 1.0),
        "reward_std": 0.4,
        "reward_parts": {"exact": level, "length": -0.1},
        "length": 34 - 12 * (1 - decay) + rng.gauss(0, 1),
        "truncated": max(0.2 * decay + rng.gauss(0, 0.02), 0.0),
        "rollouts": 128,
        "failed": 0,
        "groups": 16,
        "no_signal": min(max(0.15 + 0.4 * (1 - decay) + rng.gauss(0, 0.05), 0.0), 1.0),
        "distinct": 0.9,
        "samples": 96,
        "turns": 1.0,
        "tokens": 3100,
        "trained": 0.8,
        "loss": rng.gauss(0, 0.02),
        "entropy": 0.4 + 0.9 * decay + rng.gauss(0, 0.03),
        "ratio": 1.0,
        "ratio_max": 1.0 + lag * 0.3,
        "clip_fraction": 0.01 * lag,
        "kl_sampler": abs(rng.gauss(0, 0.002)) * lag,
        "kl_base": 0.05 * (1 - decay) * (1 + rng.random()) if step % 5 == 0 else None,
        "logprob_gap": abs(rng.gauss(0, 0.05)) * lag,
        "grad_norm": 0.6 + 0.9 * decay + abs(rng.gauss(0, 0.2)),
        "lr": 3e-4,
        "skipped": False,
    }


def timing_line(step: int, time: float, rng: random.Random) -> dict[str, Any]:
    warm = min(1.0, 0.5 + step / 12)
    return {
        "step": step,
        "time": time,
        "seconds": {"sample": 4.1, "reward": 0.2, "train": 2.6},
        "tokens_sampled": 3000 + rng.randrange(300),
        "tokens_trained": 4100,
        "device": {
            "decode": round((0.52 + rng.gauss(0, 0.01)) * warm, 4),
            "train": round((0.36 + rng.gauss(0, 0.01)) * warm, 4),
            "occupancy": round((0.8 + rng.gauss(0, 0.02)) * warm, 4),
        },
    }


def rollout_lines(version: int, share: float, rng: random.Random) -> Iterator[dict[str, Any]]:
    for problem in range(12):
        first, second = 3 + 7 * problem, 41 - 3 * problem
        right = rng.random() < share
        said = first + second if right else first + second + rng.choice((-10, 1, 10))
        text = f"First I add the tens, then the ones: {first} + {second}.\nThat makes {said}."
        ending = "stop" if right or problem % 3 else "length"
        yield {
            "purpose": "eval",
            "problem": problem,
            "index": 0,
            "version": version,
            "prompt": f"What is {first} + {second}?" if problem else f"What is {first} + {second}? {NASTY}",
            "answer": str(first + second),
            "completion": text if problem else f"{text} {NASTY}",
            "turns": [text if problem else f"{text} {NASTY}"],
            "reward": float(right) if problem != 4 else None,
            "reward_parts": {"exact": float(right)},
            "finish_reason": ending,
            "tokens": 21,
            "error": "the reward raised ValueError: no number" if problem == 4 else "",
        }


def identity(name: str, steps: int) -> dict[str, Any]:
    return {
        "base": "small",
        "job": {
            "name": name,
            "data": {"source": f"toy:{name}", "holdout": 64, "system": NASTY},
            "rewards": [{"name": "exact", "weight": 1.0}],
            "adapter": {"rank": 32, "alpha": 32.0, "target_modules": "all-linear"},
            "algorithm": {"type": "grpo", "group_size": 8, "groups_per_step": 16},
            "optimizer": {"lr": 0.0003},
            "steps": steps,
        },
    }


def write_job(
    run: Path,
    name: str,
    *,
    done: int,
    steps: int,
    top: float,
    state: str,
    message: str = "",
    every: int = 10,
    lag: int = 0,
    nulls: bool = False,
) -> JobDirectory:
    rng = random.Random(name)
    directory = JobDirectory(run / name)
    open_job(directory, identity(name, steps))
    for step in range(done):
        level = 0.1 + (top - 0.1) * (1 - math.exp(-step / 14))
        line = step_line(step, level, rng, lag)
        if nulls and step % 4 == 1:
            line |= {"reward": float("nan"), "length": math.nan, "entropy": math.inf, "grad_norm": math.nan}
        if every and step % every == 0:
            line["eval"] = evaluation(level + rng.gauss(0, 0.02), rng)
            directory.write_rollouts(f"eval-{step}", rollout_lines(step, level, rng))
        directory.append(directory.metrics, line)
        directory.append(directory.timings, timing_line(step, START + 7 * step + rng.random(), rng))
    if every and done == steps:
        last = {"step": done, "version": done, "eval": evaluation(top, rng)}
        directory.append(directory.metrics, last)
        directory.write_rollouts(f"eval-{done}", rollout_lines(done, top, rng))
    for version in (max(done - 1, 0), done):
        (directory.path / "versions" / f"v{version}").mkdir(exist_ok=True)
    directory.write_status(
        {"state": state, "message": message, "inexact": ["a reward ran into its limit"] if lag else []}
    )
    return directory


def write_run(path: Path) -> Path:
    """Four jobs: done, on its way with asynchronous sampling, failed early, and one with nulls and no evaluation."""
    write_job(path, "add", done=40, steps=40, top=0.85, state="succeeded")
    write_job(path, "sort-numbers", done=33, steps=60, top=0.6, state="running", lag=1)
    reason = f"97 of 128 rollouts have no reward (limit: algorithm.max_failed_fraction = 0.25). The commonest reason: {NASTY}"
    write_job(path, "spell-r64-lr0.0003", done=9, steps=40, top=0.4, state="failed", message=reason, every=4)
    write_job(path, "count_letters", done=26, steps=40, top=0.35, state="paused", every=0, nulls=True)
    (path / "run.json").write_text("{}")
    return path
