"""What copying to host memory saves where the KV cache has half the room that a batch needs.

    .venv/bin/python -m bench.paging                      # figures for docs/benchmarks.md; on SmolLM2 an hour
    .venv/bin/python -m bench.paging --base small         # a look in a few minutes

The same requests with room for all, with half of it and host memory, and with half of it alone, in turn. Tokens and logprobs of
the three are compared: a bit that differs ends it. Times are those of the processor, one thread's, so that other programs count
less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from motet.config import EngineConfig
from motet.core.types import Chunk, GenerateRequest, IntArray, SamplingParams
from motet.hosts.launch import load
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from motet.rollout.sequences import Prompt, SampledSequence

ROWS = 32
SAID = 32
"""Tokens that are read before each turn but the first."""


@dataclass(frozen=True)
class Shape:
    """What every row is asked for."""

    prompt: int
    new: int
    group: int
    """Completions of one prompt."""
    turns: int = 1

    @property
    def tokens(self) -> int:
        """Of a row at its end."""
        return self.prompt + self.new + (self.turns - 1) * (SAID + self.new)

    def __str__(self) -> str:
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return f"{ROWS // self.group} prompts of {self.prompt} tokens × {self.group}, {self.new} sampled{turns}"


SHAPES = (Shape(512, 192, 1), Shape(512, 192, 8), Shape(64, 512, 8), Shape(512, 32, 1, turns=4))


@dataclass(frozen=True)
class Decoded:
    """A batch from its first token to its last."""

    seconds: float
    answers: tuple[bytes, ...]
    """Tokens and logprobs."""
    preemptions: int
    prefilled: int
    """Tokens of prompts, and of what was preempted."""
    copied: int
    """Tokens that were copied back from host memory."""


def decode(base: LoraModel, shape: Shape, share: float, host: int) -> Decoded:
    """All rows, with a share of the blocks that they need together."""
    n_groups, block, source = ROWS // shape.group, base.block_size, np.random.default_rng(1)
    needed = ROWS * -(-shape.tokens // block) - (ROWS - n_groups) * (shape.prompt // block) + n_groups
    n_blocks = int(needed * share)
    cache = KVCache(n_blocks, block, base.device, slots=ROWS + 1)
    decoder = Decoder(base, cache, max_rows=ROWS, prefill_tokens=2048, kept_blocks=n_blocks // 2, host_bytes=host)
    histories = [source.integers(5, 200, size=shape.prompt - number % 8).astype(np.int32) for number in range(n_groups)]
    answers: list[bytes] = []
    started = time.process_time()
    for turn in range(shape.turns):
        if turn:
            histories = [
                np.concatenate([ids, source.integers(5, 200, size=SAID).astype(np.int32)]) for ids in histories
            ]
        asked = [_ask(decoder, shape, number, ids) for number, ids in enumerate(histories)]
        while not decoder.idle:
            decoder.tick()
        for number, chunks in enumerate(asked):
            chunks.sort(key=lambda chunk: chunk.index)
            answers += [chunk.token_ids.tobytes() + chunk.logprobs.tobytes() for chunk in chunks]
            histories[number] = np.concatenate([histories[number], chunks[0].token_ids])
    seconds = time.process_time() - started
    return Decoded(seconds, tuple(answers), decoder.rows.preemptions, decoder.prefilled_tokens, decoder.host.tokens_in)


def _ask(decoder: Decoder, shape: Shape, number: int, ids: IntArray) -> list[Chunk]:
    """Queue a group; its chunks gather in the list."""
    chunks: list[Chunk] = []

    def take(chunk: Chunk | Exception) -> None:
        if isinstance(chunk, Exception):
            raise chunk
        chunks.append(chunk)

    seeds = tuple(range(number * shape.group, (number + 1) * shape.group))
    episodes = (f"e{number}",) if shape.turns > 1 else ()
    params = SamplingParams(max_tokens=shape.new)
    request = GenerateRequest(f"r{number}", "bench", ids, None, params, seeds, episodes=episodes)
    prompt = Prompt(request, None, take)
    prompt.waiting = [SampledSequence(prompt, index, seed) for index, seed in enumerate(seeds)]
    decoder.add(prompt)
    return chunks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="by their numbers, from 0")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    base = load(options.base, EngineConfig(threads=1))
    print(f"{base.info.name}, {base.info.dtype}, one thread; times are shares of that with room for all\n")
    print("| what | room | time | preempted | tokens prefilled | copied back |\n|---|---|---|---|---|---|")
    for shape in (SHAPES[number] for number in options.shapes):
        runs: dict[str, list[Decoded]] = {"all": [], "half and host memory": [], "half": []}
        for _ in range(options.repeats):
            for name, some in runs.items():
                some.append(decode(base, shape, 1.0 if name == "all" else 0.5, 1 << 40 if "host" in name else 0))
            if len({some[-1].answers for some in runs.values()}) > 1:
                raise SystemExit("the three differ in their answers")
        for name, some in runs.items():
            took = (
                f"{statistics.median(run.seconds for run in some):.0f} s"
                if name == "all"
                else _ratio(some, runs["all"])
            )
            last = some[-1]
            print(
                f"| {shape} | {name} | {took} | {last.preemptions} | {last.prefilled:,} | {last.copied:,} |", flush=True
            )
        print(f"| {shape} | host memory against none | {_ratio(runs['half and host memory'], runs['half'])} | | | |")


def _ratio(some: list[Decoded], others: list[Decoded]) -> str:
    ratios = [run.seconds / other.seconds for run, other in zip(some, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


if __name__ == "__main__":
    main()
