"""What copying to host memory saves where the KV cache has half the room that a batch needs.

    .venv/bin/python -m bench.paging                      # figures for docs/benchmarks.md; on SmolLM2 half an hour
    .venv/bin/python -m bench.paging --base small         # a look in a minute

The same requests with room for all, with half of it and host memory, and with half of it alone, in turn. Tokens and logprobs of
the three are compared: a bit that differs ends it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from motet.config import EngineConfig
from motet.launch import load
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from motet.rollout.sequences import Prompt, Sequence
from motet.types import GenerateRequest, SamplingParams

ROOMY = 1 << 40


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


def decode(base: LoraModel, options: argparse.Namespace, group: int, share: float, host: int) -> Decoded:
    """Rows in groups of one prompt each, with a share of the blocks that they need together."""
    block, source = base.block_size, np.random.default_rng(1)
    per_row = -(-(options.prompt + options.new) // block)
    shared = options.prompt // block
    needed = options.rows * per_row - (options.rows - options.rows // group) * shared
    cache = KVCache(int(needed * share), block, base.device, slots=options.rows + 1)
    decoder = Decoder(base, cache, max_rows=options.rows, prefill_tokens=2048, host_bytes=host)
    chunks: list[list[Any]] = []
    for number in range(options.rows // group):
        ids = source.integers(5, 200, size=options.prompt - number % 8).astype(np.int32)
        seeds = tuple(range(number * group, (number + 1) * group))
        chunks.append([])
        request = GenerateRequest(f"r{number}", "bench", ids, None, SamplingParams(max_tokens=options.new), seeds)
        prompt = Prompt(request, None, chunks[-1].append)
        prompt.waiting = [Sequence(prompt, index, seed) for index, seed in enumerate(seeds)]
        decoder.add(prompt)
    started = time.perf_counter()
    while not decoder.idle:
        decoder.tick()
    seconds = time.perf_counter() - started
    answers = tuple(
        one.token_ids.tobytes() + one.logprobs.tobytes()
        for some in chunks
        for one in sorted(some, key=lambda chunk: chunk.index)
    )
    return Decoded(seconds, answers, decoder.preemptions, decoder.prefilled_tokens, decoder.host.tokens_in)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8], help="completions of one prompt")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    base = load(options.base, EngineConfig(threads=1))
    print(
        f"{base.info.name}, {base.info.dtype}, one thread: {options.rows} rows, prompts of {options.prompt} tokens, ",
        end="",
    )
    print(f"{options.new} sampled; time as a share of that with room for all\n")
    print("| completions of a prompt | room | time | preempted | tokens prefilled | copied back |")
    print("|---|---|---|---|---|---|")
    for group in options.groups:
        runs: dict[str, list[Decoded]] = {"all": [], "half, host memory": [], "half": []}
        for _ in range(options.repeats):
            for name, some in runs.items():
                some.append(decode(base, options, group, 1.0 if name == "all" else 0.5, ROOMY if "host" in name else 0))
            if len({some[-1].answers for some in runs.values()}) > 1:
                raise SystemExit("the three differ in their answers")
        for name, some in runs.items():
            ratios = [one.seconds / whole.seconds for one, whole in zip(some, runs["all"], strict=True)]
            one = some[-1]
            took = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            took = f"{statistics.median(one.seconds for one in some):.0f} s" if name == "all" else took
            print(f"| {group} | {name} | {took} | {one.preemptions} | {one.prefilled:,} | {one.copied:,} |", flush=True)
        saved = [
            paged.seconds / bare.seconds for paged, bare in zip(runs["half, host memory"], runs["half"], strict=True)
        ]
        print(
            f"\nwith host memory {statistics.median(saved):.2f} of the time without ({min(saved):.2f}–{max(saved):.2f})\n"
        )


if __name__ == "__main__":
    main()
