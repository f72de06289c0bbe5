"""Trains on long passes with kernels that a thread sanitizer watches: `python -m tests.native_races SOURCES LIBRARIES`.

The environment names the sanitizer's library in `LD_PRELOAD`. It reports races on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from motet.native import building, library
from tests import native_calls
from tests import tiny_models as tiny
from tests.segments import long_batch, make_trainer


def main(sources: str, libraries: str) -> None:
    """A dense base whose norms lie before and after, and a mixture of experts."""
    building.SOURCES, library.INSTALLED = Path(sources), Path(libraries)
    native_calls.directory = lambda: library.INSTALLED
    torch.set_num_threads(4)
    for name in ("gemma2/native", "qwen3_moe/native"):
        trainer = make_trainer(tiny.base(name, "bfloat16"), "a", recompute=True)
        trainer.forward_backward(long_batch("a"))
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
