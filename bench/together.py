"""A job alone and beside two others, on a base of random weights: `python -m bench.together SHAPE [--device cuda]`.

Exits with 1 where bits differ and the base calls itself exact.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.speed.shapes import SHAPES, make_base

from motet.config import EngineConfig
from motet.hosts.launch import load
from tests.support.small_runs import REWARDS, fingerprint, job, run


def main(words: list[str] | None = None) -> int:
    """Run, and say whether what must not depend on company is the same; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.together")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--bases", type=Path, default=Path("runs/bench/bases"), help="where bases of random weights are"
    )
    chosen = parser.parse_args(words)
    directory = make_base(chosen.shape, chosen.bases, chosen.device)
    base = load(str(directory), EngineConfig(dtype="bfloat16", device=chosen.device))
    with tempfile.TemporaryDirectory() as place:
        rewards = Path(place) / "rewards.py"
        rewards.write_text(REWARDS)
        mine = job("mine", rewards, adapter={"rank": 8})
        others = [job("wide", rewards, adapter={"rank": 16}), job("gspo", rewards, algorithm={"type": "gspo"})]
        found = []
        for name, jobs in (("alone", [mine]), ("together", [others[0], mine, others[1]])):
            if not run(base, Path(place) / name, jobs).ok:
                print(f"{name}: a job failed", file=sys.stderr)
                return 1
            found.append(fingerprint(Path(place) / name / "mine"))
    alone, together = found
    other = sorted(name for name in alone.keys() | together.keys() if alone.get(name) != together.get(name))
    print(f"{chosen.shape}: {len(alone)} files of a job, {len(other)} differ beside others {other}")
    print(f"exact: {base.info.exact}; {base.arithmetic}; {' '.join(base.info.notes)}")
    return int(bool(other) and base.info.exact)


if __name__ == "__main__":
    sys.exit(main())
