"""Time of a step and memory with many adapters of which few are resident: `python -m bench.parking [ADAPTERS] [few]`.

Steps are those of adapters that lie far apart, so that each has to be brought in; `ahead`, while the one before it trains.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from motet.algorithms import Grpo
from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import AdamW, Batch, Sample, Segment
from motet.hosts.launch import load
from motet.training.torch_trainer import TorchTrainer

ROUNDS = 2
STEPPED = 50
"""Adapters that step in a round."""
RESIDENT = 8


def private_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measure(adapters: int, resident: int, *, ahead: bool) -> None:
    """Print the seconds of a step, the bytes of an adapter, and those that it takes."""
    with tempfile.TemporaryDirectory() as directory:
        engine = EngineConfig(
            dtype="float32",
            threads=1,
            slots=adapters,
            device="cpu",
            resident=resident,
            parking=directory if resident else None,
        )
        trainer = TorchTrainer.of(load("small", engine), engine)
        before = private_memory()
        for number in range(adapters):
            trainer.add_adapter(f"{number}", AdapterConfig(rank=16), seed=number)
        ids = np.arange(5, 69, dtype=np.int32)
        ones = np.ones(len(ids), np.float32)
        sample = Sample(ids, np.arange(len(ids)) > 8, -ones, ones, np.zeros(len(ids), np.int32))
        seconds = []
        stepped = [f"{number}" for number in range(0, adapters, max(1, adapters // STEPPED))]
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            with ThreadPoolExecutor(1) as pool:
                for name, following in zip(stepped, [*stepped[1:], stepped[0]], strict=True):
                    coming = pool.submit(trainer.bring_in, [following] if ahead else [])
                    trainer.forward_backward(Batch((Segment(name, (sample,) * 4, Grpo(), 224.0),)))
                    trainer.optim_step(name, AdamW(1e-4))
                    coming.result()
            seconds.append((time.perf_counter() - begun) / len(stepped))
        size = trainer.weights("0").layout.size
        print(f"{1000 * min(seconds):.1f} {size} {(private_memory() - before) / adapters / size:.1f}")


def main() -> None:
    """Print a table."""
    adapters = sys.argv[1] if len(sys.argv) > 1 else "200"
    ways = [(RESIDENT, ""), (RESIDENT, "ahead")] + [(0, "")] * (len(sys.argv) < 3)
    print("| adapters | resident | time of a step | bytes a parameter in memory |\n|---|---|---|---|")
    for resident, ahead in ways:
        command = [sys.executable, "-m", "bench.parking", adapters, str(resident), ahead]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        milliseconds, _, taken = done.stdout.split()
        name = f"{resident}, brought in ahead" if ahead else f"{resident or 'all'}"
        print(f"| {adapters} | {name} | {milliseconds} ms | {taken} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        measure(int(sys.argv[1]), int(sys.argv[2]), ahead=bool(sys.argv[3]))
    else:
        main()
