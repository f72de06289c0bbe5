"""The host's time per decode step, with an executor that answers at once: what a card would wait for if it were no slower.

    python bench/host_step.py --rows 64 256

Prints microseconds of this thread's CPU per step, for steps in turn and for steps that run ahead: when nothing changes,
and when a row ends and another begins in every fourth step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from motet.core.types import AdapterRef, GenerateRequest, SamplingParams
from motet.model.device_steps import DeviceStep, DrawnTokens, StepLayout
from motet.model.kv_cache import KVCache
from motet.rollout.decode_steps import Executor, NewTokens
from motet.rollout.decoder import Decoder
from motet.rollout.sequences import Prompt, SampledSequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support import tiny_models as tiny

JOBS, GROUP, BLOCK, PROMPT = 8, 8, 64, 100
END = 2


class InTurn:
    """Answers every call at once."""

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        return torch.zeros(len(inputs), 1)

    def draw(self, sequences: Sequence[SampledSequence], raw_NV: Tensor) -> DrawnTokens:
        return drawn(len(sequences))


@dataclass(frozen=True)
class AtOnce:
    """A step that is done."""

    n_rows: int

    def tokens(self) -> DrawnTokens:
        return drawn(self.n_rows)


class Ahead(InTurn):
    """Takes steps from tokens to tokens."""

    def hold(self, layout: StepLayout) -> None:
        self.state = np.zeros(layout.size, np.int64)

    def launch(self, step: DeviceStep) -> AtOnce:
        self.state[step.changes_C2[:, 0]] = step.changes_C2[:, 1]
        return AtOnce(step.n_rows)


def drawn(n_rows: int) -> DrawnTokens:
    return DrawnTokens(np.full(n_rows, 5, np.int64), np.full(n_rows, -1.0, np.float32), np.ones(n_rows, np.bool_))


def before_steps(executor: Executor, n_rows: int, tenants: int, max_tokens: int) -> Iterator[Decoder]:
    """The decoder of a full batch before each step; with `max_tokens`, some row ends in every so many / `n_rows` steps."""
    cache = KVCache(n_rows * 16, BLOCK, torch.device("cpu"), slots=n_rows + 1)
    decoder = Decoder(tiny.base("llama"), cache, max_rows=n_rows, prefill_tokens=1 << 20, executor=executor)
    asked = 0

    def ask(n_tokens: int, group: int) -> None:
        nonlocal asked
        sampling = SamplingParams(max_tokens=n_tokens, stop_token_ids=(END,))
        job = asked % JOBS
        request = GenerateRequest(
            f"r{asked}", f"job {job}", np.arange(3, 3 + PROMPT, dtype=np.int32), AdapterRef(f"adapter {job}", 1),
            sampling, tuple(range(group)), tenant=f"tenant {job % tenants}",
        )  # fmt: skip
        prompt = Prompt(request, None, lambda chunk: None)
        prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(request.seeds)]
        decoder.add(prompt)
        asked += 1

    for row in range(0, n_rows, GROUP if not max_tokens else 1):
        ask(max_tokens * (row + 1) // n_rows or 100_000, GROUP if not max_tokens else 1)
    while len(decoder.rows.running) < n_rows:
        decoder.tick()
    while True:
        while max_tokens and len(decoder.rows.waiting) < 2:
            ask(max_tokens, 1)
        yield decoder


def step_seconds(executor: Executor, n_rows: int, tenants: int, max_tokens: int, steps: int) -> list[float]:
    """CPU seconds of each step of a full batch."""
    seconds = []
    for decoder in itertools.islice(before_steps(executor, n_rows, tenants, max_tokens), steps):
        begun = time.thread_time()
        decoder.tick()
        seconds.append(time.thread_time() - begun)
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="rows of the batch")
    parser.add_argument("--steps", type=int, default=400, help="steps of each figure, at most 800")
    args = parser.parse_args()
    print(f"{'rows':>5} {'tenants':>8} {'batch':<22} {'in turn, µs':>18} {'ahead, µs':>18}   median (90 %)")
    for rows in args.rows:
        for tenants, max_tokens, name in (
            (1, 0, "nothing changes"),
            (1, 4 * rows, "one of four changes"),
            (JOBS, 0, "nothing changes"),
        ):
            cells = []
            for executor in (InTurn(), Ahead()):
                micros = [1e6 * each for each in step_seconds(executor, rows, tenants, max_tokens, args.steps)]
                cells.append(f"{statistics.median(micros):.0f} ({statistics.quantiles(micros, n=10)[-1]:.0f})")
            print(f"{rows:>5} {tenants:>8} {name:<22} {cells[0]:>18} {cells[1]:>18}")


if __name__ == "__main__":
    main()
