"""Do two ranks learn the same adapters as whole copies of a base and as its shards?

    python -m bench.gpu.two_ranks DEVICE DIR STEPS

The exit code is 77 where a GPU is asked for and there are not two.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.gpu.schedule import SKIPPED

JOBS = 4


def main(words: list[str]) -> int:
    """Run the demo on two copies, then on two shards, and compare the adapters."""
    device, place, steps = words[0], Path(words[1]), words[2]
    if device == "cuda":
        import torch

        if (cards := torch.cuda.device_count()) < 2:
            print(f"{cards} card: two are needed")
            return SKIPPED
    learned = []
    for setting in ("engine.ranks=2", "engine.shard=2"):
        command = [sys.executable, "-m", "motet", "run", "examples/demo.yaml", "--run", str(place / setting)]
        for given in (setting, f"engine.device={device}", "engine.kernels=torch", f"steps={steps}"):
            command += ["--set", given]
        if code := subprocess.call(command):
            return code
        files = (place / setting).glob(f"*/versions/v{steps}/adapter_model.safetensors")
        learned.append({file.parts[-4]: file.read_bytes() for file in files})
    same = len(learned[0]) == JOBS and learned[0] == learned[1]
    print("copies and shards:", "the same adapters" if same else "different adapters")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
