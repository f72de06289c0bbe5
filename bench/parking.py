"""Time of a step and memory with many adapters of which few are resident: `python -m bench.parking [ADAPTERS]`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from motet.algorithms import Grpo
from motet.batch import AdamW, Batch, Sample, Segment
from motet.config import AdapterConfig, EngineConfig
from motet.launch import load, make_trainer

ROUNDS = 2
RESIDENT = 8


def private_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measure(adapters: int, resident: int) -> None:
    """Print the seconds of a step, the bytes of an adapter, and those that it takes."""
    with tempfile.TemporaryDirectory() as directory:
        engine = EngineConfig(
            dtype="float32", threads=1, slots=adapters, device="cpu", resident=resident, parking=directory
        )
        trainer = make_trainer(load("small", engine), engine)
        before = private_memory()
        for number in range(adapters):
            trainer.add_adapter(f"{number}", AdapterConfig(rank=16), seed=number)
        ids = np.arange(5, 69, dtype=np.int32)
        ones = np.ones(len(ids), np.float32)
        sample = Sample(ids, np.arange(len(ids)) > 8, -ones, ones, np.zeros(len(ids), np.int32))
        seconds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for number in range(adapters):
                trainer.forward_backward(Batch((Segment(f"{number}", (sample,) * 4, Grpo(), 224.0),)))
                trainer.optim_step(f"{number}", AdamW(1e-4))
            seconds.append((time.perf_counter() - begun) / adapters)
        size = trainer.weights("0").layout.size
        print(f"{1000 * min(seconds):.1f} {size} {(private_memory() - before) / adapters / size:.1f}")


def main() -> None:
    """Print a table."""
    adapters = sys.argv[1] if len(sys.argv) > 1 else "200"
    print("| adapters | resident | time of a step | bytes a parameter in memory |\n|---|---|---|---|")
    for resident in (0, RESIDENT):
        command = [sys.executable, "-m", "bench.parking", adapters, str(resident)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        milliseconds, _, taken = done.stdout.split()
        print(f"| {adapters} | {resident or 'all'} | {milliseconds} ms | {taken} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
