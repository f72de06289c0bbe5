"""Rows of docs/week-one.md: answers to a problem, problems of a step, ranks, and epochs of SFT, on SmolLM2-135M-Instruct.

    make smollm2
    python -m bench.week_one answers       # a table, on one core; `problems` and `ranks` alike
    python -m bench.week_one epochs

The tasks are those of examples/smollm2.yaml: `products`, and for SFT `chain-sum`, which has enough different rows. What was
trained is kept in runs/week_one, and the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

DIRECTORY = Path("runs/week_one")
STEPS, ROWS, BATCH, EPOCHS = 20, 192, 16, (1, 2, 4, 8)
DATA = {
    "source": "reasoning-gym:products",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "template": "{question} Give only the answer.",
    "holdout": 64,
}
SUMS = {
    **DATA,
    "source": "reasoning-gym:chain_sum",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "size": 256,  # about 190 rows to learn beside those held out
}


def job(name: str, problems: int = 4, answers: int = 8, rank: int = 16) -> dict[str, Any]:
    """Build a job of GRPO with the learning rate `auto`."""
    return {
        "name": name,
        "seed": 1,
        "data": {**DATA, "size": 1024},
        "reward": "numeric",
        "sampling": {"max_tokens": 24},
        "adapter": {"rank": rank},
        "algorithm": {"groups_per_step": problems, "group_size": answers},
        "steps": STEPS,
        "eval": {"every": STEPS // 2, "n": 2},
    }


def taught() -> dict[str, Any]:
    """Build a job of SFT that is evaluated after about each epoch."""
    epoch = ROWS // BATCH
    return {
        "name": "taught",
        "seed": 1,
        "data": SUMS,
        "algorithm": {"type": "sft", "rows_per_step": BATCH},
        "adapter": {"rank": 16},
        "sampling": {"max_tokens": 24},
        "steps": epoch * EPOCHS[-1],
        "eval": {"every": epoch},
        "checkpoint": {"keep": epoch * EPOCHS[-1] + 1},
    }


PARTS = {
    "answers": [job("8-by-4", 8, 4), job("4-by-8", 4, 8), job("2-by-16", 2, 16)],
    "problems": [job("2-by-8", 2), job("8-by-8", 8)],
    "ranks": [job("rank-4", rank=4), job("rank-64", rank=64)],
    "epochs": [taught()],
}


def lines(run: Path, name: str, file: str) -> list[dict[str, Any]]:
    """Read one of a job's files of JSON lines."""
    return [json.loads(line) for line in (run / name / file).read_text().splitlines()]


def learned(run: Path, name: str) -> str:
    """Format a row: held-out rewards, the mean training reward of the last five steps, sampled tokens."""
    metrics, timings = lines(run, name, "metrics.jsonl"), lines(run, name, "timings.jsonl")
    held_out = " | ".join(f"{line['eval']['reward']:.2f}" for line in metrics if "eval" in line)
    last = fmean(line["reward"] for line in metrics[-6:] if line.get("reward") is not None)
    tokens = sum(line.get("tokens_sampled", 0) for line in timings)
    return f"| {name} | {held_out} | {last:.2f} | {tokens:,} |"


def epochs(run: Path, file: Path) -> None:
    """Print the loss and the reward after each number of epochs."""
    loss = {line["step"]: line["eval"]["nll"] for line in lines(run, "taught", "metrics.jsonl") if "eval" in line}
    steps = [epoch * ROWS // BATCH for epoch in EPOCHS]
    print("held-out loss before:", round(loss[0], 2), *(f"after {step} steps: {loss[step]:.2f}" for step in steps))
    models = [f"taught@{step}" for step in steps]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "motet",
        "eval",
        file,
        *models,
        "--reward",
        "numeric",
        "--samples",
        "2",
    ]
    subprocess.run([*command, "--set", f"run={run}"], check=True)


def main() -> None:
    """Train one part, and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    run, file = DIRECTORY / part, DIRECTORY / f"{part}.yaml"
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"base": "smollm2", "jobs": PARTS[part]}))
    subprocess.run([sys.executable, "-m", "motet", "run", file, "--run", run], check=True)
    if part == "epochs":
        epochs(run, file)
        return
    print(f"| problems by answers | before | after {STEPS // 2} steps | after {STEPS} | last five steps | tokens |")
    print("\n".join(learned(run, entry["name"]) for entry in PARTS[part]))


if __name__ == "__main__":
    main()
