"""Print the memory that a pass of own kernels takes, and the estimate.

python -m tests.support.native_memory RECOMPUTE [BASE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from motet.config import EngineConfig
from motet.core.batch import Batch, Segment
from motet.hosts.launch import load
from motet.training.memory import pass_memory
from tests.support.segments import REINFORCE, make_samples, make_trainer

SEQUENCES, LENGTH = 16, 250


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(recompute: str = "0", base_name: str = "small", dtype: str = "float32") -> None:
    """A pass of many short sequences, because attention of long ones takes time."""
    base = load(base_name, EngineConfig(threads=1, kernels="native", dtype=dtype))
    trainer = make_trainer(base, "a", recompute=bool(int(recompute)))
    samples = make_samples([(LENGTH // 2, LENGTH - LENGTH // 2)] * SEQUENCES, seed=7)
    memory = pass_memory(base, recompute=bool(int(recompute)))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    trainer.forward_backward(Batch((Segment("a", samples, REINFORCE, 1000.0),)))
    print(status("VmHWM") - before, memory.of(SEQUENCES * LENGTH))


if __name__ == "__main__":
    main(*sys.argv[1:])
