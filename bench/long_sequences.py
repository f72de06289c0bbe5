"""Train an adapter on one long sequence: seconds and peak memory of each step.

python -m bench.long_sequences --base smollm2 --length 8192 --steps 2
python -m bench.long_sequences --base smollm2 --length 4096 --steps 1 --keep    # without engine.recompute
python -m bench.long_sequences --base smollm2 --length 8192 --offload /tmp      # layer inputs to a file there
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np

from motet.algorithms.supervised import Supervised
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Batch, Sample, Segment
from motet.model.load import load_base
from motet.training.torch_trainer import TorchTrainer

PROMPT = 256
"""Tokens that are not learned."""


def sample(length: int, vocabulary: int) -> Sample:
    """Random tokens: what is measured does not depend on them."""
    numbers = np.random.default_rng(0)
    mask = np.arange(length) >= min(PROMPT, length // 2)
    return Sample(
        token_ids=numbers.integers(3, vocabulary, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        advantages=mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def peak_gib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print a line for the base, and one for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep activations (engine.recompute: false)")
    parser.add_argument("--offload", type=Path, help="a directory for the inputs of layers (engine.offload)")
    asked = parser.parse_args()
    base = load_base(asked.base, dtype=asked.dtype)
    trainer = TorchTrainer(base, slots=1, kept_tokens=None if asked.keep else 0, inputs=asked.offload)
    trainer.add_adapter("a", AdapterConfig(rank=16, alpha=32.0), seed=0)
    print(
        f"{base.info.name} in {base.info.dtype}, exact: {base.info.exact}; {peak_gib():.2f} GiB once loaded", flush=True
    )
    example = sample(asked.length, base.info.vocab_size)
    for step in range(asked.steps):
        started = time.perf_counter(), time.process_time()
        (trained,) = trainer.forward_backward(
            Batch((Segment("a", (example,), Supervised(), float(example.n_trainable), 1.0),))
        )
        stats = trainer.optim_step("a", AdamW(1e-3))
        wall, busy = time.perf_counter() - started[0], time.process_time() - started[1]
        print(
            f"step {step + 1}: {asked.length} tokens, loss {trained.stats.loss:.4f}, gradient {stats.grad_norm:.3g}, "
            f"{wall:.0f} s ({busy:.0f} s of processor), peak {peak_gib():.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
