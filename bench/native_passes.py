"""Decoding and gradients of SmolLM2 by each `engine.kernels`: `python -m bench.native_passes`, on one core, by CPU time, best
of several; with `--threads 2` by wall clock, which a quiet machine needs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from motet.algorithms import Reinforce
from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import Batch, Sample, Segment
from motet.core.types import AdapterRef, GenerateRequest, SamplingParams
from motet.hosts.launch import load
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights, initial_weights
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from motet.rollout.sequences import Prompt, SampledSequence
from motet.training.torch_trainer import TorchTrainer

KERNELS = ("torch", "native", "native-dpbf16")
RANK, PROMPT, STEPS = 16, 48, 8


def best(work: Callable[[], int], threads: int) -> float:
    """Tokens per second of one thread's CPU time, or of the wall clock where there are several."""
    rates, clock = [], time.process_time if threads == 1 else time.perf_counter
    for _ in range(4):
        started = clock()
        n_tokens = work()
        rates.append(n_tokens / (clock() - started))
    return max(rates)


def adapters(base: LoraModel, n: int) -> list[AdapterWeights]:
    """Adapters of rank 16 on all linear layers."""
    layout = base.adapter_layout("all-linear", RANK)
    return [AdapterWeights.from_masters(layout, 1.0, initial_weights(layout, seed), base.dtype) for seed in range(n)]


def decoding(base: LoraModel, rows: int, own: Sequence[AdapterWeights], threads: int) -> float:
    """Of rows whose prompts have 48 tokens, head and draw included."""
    cache = KVCache(rows * 4, base.block_size, base.device, clean=base.attention.reads_past_end)
    decoder = Decoder(base, cache, max_rows=rows, prefill_tokens=2048)
    numbers = np.random.default_rng(0)
    for index in range(rows):
        place = index % len(own) if own else 0
        request = GenerateRequest(
            id=str(index),
            job="bench",
            adapter=AdapterRef(str(place), 1) if own else None,
            prompt_ids=numbers.integers(3, base.info.vocab_size, PROMPT).astype(np.int32),
            seeds=(index,),
            sampling=SamplingParams(max_tokens=200, temperature=1.0),
        )
        prompt = Prompt(request, own[place] if own else None, lambda _: None)
        prompt.waiting = [SampledSequence(prompt, 0, index)]
        decoder.add(prompt)
    while len(decoder.rows.running) < rows:
        decoder.tick()

    def work() -> int:
        n_tokens = 0
        for _ in range(STEPS):
            n_tokens += len(decoder.rows.running)
            decoder.tick()
        return n_tokens

    return best(work, threads)


def gradients(base: LoraModel, threads: int) -> float:
    """Of 8 samples of 64 prompt tokens and 64 that are trained."""
    numbers, length = np.random.default_rng(0), 128
    mask = np.arange(length) >= length // 2
    samples = tuple(
        Sample(
            token_ids=numbers.integers(3, base.info.vocab_size, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -5, 0).astype(np.float32),
            advantages=mask.astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        for _ in range(8)
    )
    trainer = TorchTrainer(base, slots=1)
    trainer.add_adapter("a", AdapterConfig(rank=RANK), 0)
    batch = Batch((Segment("a", samples, Reinforce(), 512.0),))

    def work() -> int:
        trainer.forward_backward(batch)
        return length * len(samples)

    return best(work, threads)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    columns = []
    for kernels in KERNELS:
        base = load("smollm2", EngineConfig(dtype="bfloat16", threads=threads, kernels=kernels))
        torch.set_num_threads(threads)
        own = adapters(base, 8)
        rates = [decoding(base, rows, own[:n], threads) for rows in (8, 64) for n in (0, 8)]
        columns.append([*rates, gradients(base, threads)])
    print(
        f"| tokens per second, {threads} threads | {' | '.join(f'`{each}`' for each in KERNELS)} |\n|---|---|---|---|"
    )
    names = [f"decoding {rows} rows with {n or 'no'} adapters" for rows in (8, 64) for n in (0, 8)]
    for name, line in zip([*names, "gradients of 1,024 tokens"], zip(*columns, strict=True), strict=True):
        print(f"| {name} | {' | '.join(f'{rate:.0f}' for rate in line)} |")


if __name__ == "__main__":
    main()
