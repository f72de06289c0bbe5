"""Runs of small jobs, and what must not depend on company."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from motet.config import RunConfig
from motet.config.jobfile import merge, validate
from motet.hosts.running import run_config
from motet.observe.results import RunResult

STEPS = 3
REWARDS = """
import itertools

def contains(problem, completion):
    return float(problem.answer in completion)

def raises(problem, completion):
    raise RuntimeError("the tenant's own mistake")

def floods(problem, completion):
    return float(len(bytearray(8 << 30)))

def vowels(problem, completion):
    return sum(letter in "aeiou" for letter in completion) / 8

def digits(problem, completion):
    return sum(letter.isdigit() for letter in completion) / 8
"""


def job(name: str, rewards: Path, **fields: Any) -> dict[str, Any]:
    """A small job; tables given are merged into these."""
    small = {
        "name": name,
        "data": {"source": "toy:add", "size": 64, "holdout": 2},
        "reward": f"{rewards}:digits",
        "steps": STEPS,
        "adapter": {"rank": 4},
        "optimizer": {"lr": 0.01},
        "sampling": {"max_tokens": 7},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "eval": {"every": 0},
        "checkpoint": {"keep": 100},
    }
    return merge(small, fields)


def config(directory: Path, jobs: list[dict[str, Any]], **engine: Any) -> RunConfig:
    """A run of these jobs with small budgets."""
    settings = {"micro_batch_tokens": 128, "train_tokens": 256, "block_size": 16, "max_rows": 16, **engine}
    return validate({"base": "small", "run": str(directory), "engine": settings, "jobs": jobs}, "test")


def run(base: Any, directory: Path, jobs: list[dict[str, Any]], **engine: Any) -> RunResult:
    """Run jobs on a loaded base; the label `small` in the configuration is not looked at again."""
    return run_config(config(directory, jobs, **engine), base=base)


def fingerprint(directory: Path) -> dict[str, str]:
    """sha256 of everything of a job that must not depend on company: weights, moments, tokens, metrics."""
    files = [*directory.glob("versions/*/*"), *directory.glob("state/*/optimizer.safetensors")]
    files += [directory / "metrics.jsonl", *directory.glob("rollouts/*.jsonl")]
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
