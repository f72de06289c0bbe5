"""Trains small jobs whose steps use every function that own kernels have, and prints what became of them.

    python -m tests.support.bits_run DIRECTORY [TYPE [THREADS]]

Other processors are stood in for by the environment: see `tests/kernels/cpu/test_native_bits.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from motet.config import EngineConfig
from motet.hosts.launch import load
from tests.support.small_runs import REWARDS, fingerprint, job, run


def jobs(rewards: Path) -> list[dict[str, Any]]:
    """Ratios that are not 1, a penalty, a critic, and evaluations that leave tokens out."""
    twice = {"updates_per_batch": 2, "kl": {"coef": 0.1, "type": "k3"}, "correct_sampler": True}
    truncated = {"every": 1, "temperature": 0.8, "top_p": 0.9}
    sequences = {"type": "ppo", "loss": "gspo", "updates_per_batch": 2, "critic": {"rank": 4}}
    return [
        job("ratios", rewards, steps=1, algorithm=twice, sampling={"temperature": 0.7}, eval=truncated),
        job("sequences", rewards, steps=1, algorithm=sequences, adapter={"rank": 3}),
    ]


def digests(base: Any, directory: Path) -> dict[str, str]:
    """Of each job: one for its weights, moments, tokens and metrics together."""
    directory.mkdir(parents=True, exist_ok=True)
    rewards = directory / "rewards.py"
    rewards.write_text(REWARDS)
    wanted = jobs(rewards)
    assert run(base, directory / "run", wanted).ok
    files = {each["name"]: fingerprint(directory / "run" / each["name"]) for each in wanted}
    return {name: hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12] for name, found in files.items()}


def main() -> None:
    """Print the digests."""
    dtype = sys.argv[2] if len(sys.argv) > 2 else "bfloat16"
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    base = load("small", EngineConfig(threads=threads, kernels="native", dtype=dtype))
    print(json.dumps(digests(base, Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
