"""Whole jobs: what their job file says, and what they took by the files in their run directory (docs/runs.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.speed.workers.material import story_prompts

MATERIAL = Path(__file__).with_name("material.py")
Step = dict[str, Any]
"""One line of timings.jsonl, with `trainable`, the tokens that carried a loss."""


def job_fields(args: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """The `jobs` of a job file; their data is written into a directory."""
    data = scratch / "stories.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in story_prompts()))
    job = {
        "data": {"source": str(data), "holdout": 0},
        "reward": f"{MATERIAL}:varied",
        "adapter": {"rank": args["rank"], "alpha": 2 * args["rank"]},
        "sampling": {"max_tokens": args["max_tokens"]},
        "algorithm": {"type": "grpo", "groups_per_step": args["groups"], "group_size": args["each"]},
        "optimizer": {"lr": 1e-5},
        "steps": args["steps"],
        "checkpoint": {"every": args["steps"]},
    }
    return [{"name": f"job{number}", **job} for number in range(args["jobs"])]


def read_steps(job: Path) -> list[Step]:
    """The steps of one job in their order."""
    metrics = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    timings = [json.loads(line) for line in (job / "timings.jsonl").read_text().splitlines()]
    return [
        {**timing, "trainable": metric["tokens"]}
        for timing, metric in zip(timings, metrics, strict=False)
        if "tokens" in metric
    ]


def figures(jobs: Sequence[Sequence[Step]], args: dict[str, Any], max_rows: int, batch_tokens: int) -> dict[str, Any]:
    """Seconds, steps, and what was computed in them.

    With `after_first`, of one job, the first step is left out. With `without_gaps`, of jobs in turn, the time between one and
    the next is. Otherwise time runs from the first sampled token of the first job to the end of the last step of the last.
    """
    after_first = bool(args.get("after_first"))
    counted = [step for job in jobs for step in (job[1:] if after_first else job)]
    begin = jobs[0][0]["time"] if after_first else min(_start(job[0]) for job in jobs)
    seconds = max(step["time"] for step in counted) - begin
    if args.get("without_gaps"):
        seconds = sum(max(step["time"] for step in job) - _start(job[0]) for job in jobs)
    sampled = sum(step["tokens_sampled"] for step in counted)
    trained = sum(step["tokens_trained"] for step in counted)
    prompt = (trained - sampled) / (len(counted) * args["groups"] * args["each"])
    prompts = len(counted) * args["groups"] * prompt  # tokens of prompts, each group's counted once
    counts = {
        "decoded": sampled,
        "passes": sampled / min(max_rows, args["jobs"] * args["groups"] * args["each"]),
        "prefilled": prompts,
        "trained": sampled + prompts,
        "headed": sum(step["trainable"] for step in counted),
        "batches": (sampled + prompts) / batch_tokens,
        "context": prompt + args["max_tokens"] / 2,
        "adapters": args["jobs"],
        "updates": len(counted),
    }
    return {"seconds": seconds, "units": len(counted), "counts": counts}


def _start(step: Step) -> float:
    """When a job's first step began to sample."""
    return float(step["time"] - step["seconds"]["sample"] - step["seconds"]["train"])
