"""Is `lr: auto` right? Train at a third, one and three times its value, for batches and ranks, and compare held-out rewards.

    python -m bench.auto_rate                                            # small base, three tasks, a few minutes
    python -m bench.auto_rate --tasks reverse --batches 32 --ranks 4 64  # a part of it
    python -m bench.auto_rate --base smollm2 --tasks letters --batches 32 --ranks 16 --factors 1
    python -m bench.auto_rate --table                                    # print what is there, train nothing

What was trained is kept in `--directory`, and the same command resumes. The held-out reward is the mean of the last two
evaluations, 4 answers to each problem on the small base.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from motet.config.jobfile import load_jobs, validate

GROUP = 8
FACTORS = (1 / 3, 1.0, 3.0)
GOAL = 0.95
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "smollm2.yaml"


def jobs(given: argparse.Namespace, task: str, batch: int, rank: int) -> list[dict[str, Any]]:
    """A job for each factor; fewer rollouts a step get more steps."""
    steps = given.steps or (25 if batch >= 128 else 40)
    data, reward, tokens, n = {"source": f"toy:{task}"}, [{"name": "exact"}], 16, 4
    if given.base == "smollm2":
        example = next(job for job in load_jobs(EXAMPLE).jobs if job.name == task)
        data, tokens, n = example.data.model_dump(exclude_unset=True), example.sampling.max_tokens, 1
        reward = [reward.model_dump(exclude_unset=True) for reward in example.rewards]
    return [
        {
            "name": f"x{factor:.3g}",
            "data": data,
            "rewards": reward,
            "steps": steps,
            "seed": 1,
            "sampling": {"max_tokens": tokens},
            "adapter": {"rank": rank},
            "algorithm": {"group_size": GROUP, "groups_per_step": batch // GROUP, "updates_per_batch": given.updates},
            "optimizer": {"lr_multiplier": factor},
            "eval": {"every": 5, "n": n},
            "checkpoint": {"every": steps, "keep": 1},
        }
        for factor in given.factors
    ]


def record(given: argparse.Namespace, out: Path, task: str, batch: int, rank: int) -> None:
    """Train the jobs of one cell and write their curves; what is there already stays."""
    from motet.hosts.running import run_config

    if out.exists() or given.table:
        return
    run = out.with_suffix("")
    tree = {"base": given.base, "run": str(run), "engine": {"samplers": 0}, "jobs": jobs(given, task, batch, rank)}
    done = run_config(validate(tree, "the bench"))
    curves = []
    for factor, job in zip(given.factors, done.jobs.values(), strict=True):
        rate = yaml.safe_load((run / job.name / "job.yaml").read_text())["learning_rate"]
        curves.append({"factor": factor, "rate": rate, "held_out": job.evaluations, "reward": job.rewards})
    out.write_text(json.dumps({"task": task, "batch": batch, "rank": rank, "curves": curves}))


def final(curve: dict[str, Any]) -> float:
    """Held-out reward at the end."""
    return fmean(reward for _, reward in curve["held_out"][-2:])


def table(directory: Path) -> None:
    """Print each cell, and how often `auto` reaches the goal."""
    cells = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    print(
        f"{'task':14} rollouts rank  auto     "
        + " ".join(f"{f'x{factor:.3g}':>7}" for factor in FACTORS)
        + "   of best"
    )
    shares, best = [], dict[tuple[int, int], Counter[str]]()
    for cell in sorted(cells, key=lambda cell: (cell["task"], cell["batch"], cell["rank"])):
        known = {round(curve["factor"], 3): curve for curve in cell["curves"]}
        ends = {factor: final(curve) for factor, curve in known.items()}
        shares.append(ends[1.0] / max(*ends.values(), 1e-9))
        top = max(ends, key=lambda factor: ends[factor])
        best.setdefault((cell["batch"], cell["rank"]), Counter())[f"x{top:g}"] += 1
        figures = " ".join(f"{ends.get(round(factor, 3), float('nan')):7.3f}" for factor in FACTORS)
        name = f"{cell['task']:14} {cell['batch']:8} {cell['rank']:4}  {known[1.0]['rate']:.1e}"
        print(f"{name}  {figures}  {shares[-1]:8.0%}")
    print(f"auto reaches {GOAL:.0%} of the best in {sum(share >= GOAL for share in shares)} of {len(shares)}")
    for (batch, rank), counts in sorted(best.items()):
        print(f"{batch} rollouts, rank {rank}: best " + ", ".join(f"{name} {n}x" for name, n in sorted(counts.items())))


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", choices=("small", "smollm2"), default="small")
    parser.add_argument("--tasks", nargs="+", default=["reverse", "sort_letters", "spell"])
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--steps", type=int, help="by default 25 with 128 rollouts or more, else 40")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    directory = given.directory or Path(f"runs/auto_rate-{given.base}-u{given.updates}")
    directory.mkdir(parents=True, exist_ok=True)
    for task, batch, rank in product(given.tasks, given.batches, given.ranks):
        record(given, directory / f"{task}-b{batch}-r{rank}.json", task, batch, rank)
    table(directory)


if __name__ == "__main__":
    main()
