"""Decoding with and without drafts: `python -m bench.speculation`, SmolLM2 on one core, by CPU time, best of three."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from motet.config import EngineConfig
from motet.core.types import GenerateRequest, IntArray, SamplingParams
from motet.hosting.launch import load
from motet.model.kv_cache import KVCache
from motet.model.lora_model import LoraModel
from motet.rollout.decoder import Decoder
from motet.rollout.sequences import Prompt, SampledSequence

GROUP, TOKENS = 8, 64
EPOCHS = (1, 2, 3, 3)
"""The last has the random numbers of the one before, as evaluations may."""


def questions(base: LoraModel, n: int) -> list[IntArray]:
    """Token ids of prompts."""
    numbers = np.random.default_rng(0)
    tokenizer: Any = base.info.tokenizer
    found = []
    for first, second, third in numbers.integers(10, 99, (n, 3)):
        text = f"State the final answer to the following arithmetic problem: {first} + {second} - {third} ="
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        found.append(np.array(ids, np.int32))
    return found


def rates(base: LoraModel, rows: int, temperature: float, *, speculates: bool) -> list[float]:
    """Tokens per second of each epoch."""
    cache = KVCache(rows * 4, base.block_size, base.device, clean=base.attention.reads_past_end)
    decoder = Decoder(base, cache, max_rows=rows, prefill_tokens=4096, speculates=speculates)
    prompts, found = questions(base, max(1, rows // GROUP)), []
    tokenizer: Any = base.info.tokenizer
    stop = (tokenizer.eos_token_id,)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=temperature, stop_token_ids=stop)
    for epoch in EPOCHS:
        sequences = []
        for index, ids in enumerate(prompts):
            seeds = tuple(10_000 * epoch + GROUP * index + one for one in range(min(GROUP, rows)))
            prompt = Prompt(GenerateRequest(str(index), "job", ids, None, sampling, seeds), None, lambda _: None)
            prompt.waiting = [SampledSequence(prompt, one, seed) for one, seed in enumerate(seeds)]
            sequences += prompt.waiting
            decoder.add(prompt)
        started = time.process_time()
        while not decoder.idle:
            decoder.tick()
        found.append(sum(len(item.tokens) for item in sequences) / (time.process_time() - started))
    return found


def main() -> None:
    """Print a table in Markdown."""
    base = load("smollm2", EngineConfig(dtype="bfloat16", threads=1, kernels="native-dpbf16"))
    print(
        "| rows, temperature | tokens per second without | first epoch | second | third | again, same random numbers |"
    )
    print("|---|---|---|---|---|---|")
    for rows, temperature in ((1, 1.0), (8, 1.0), (8, 0.3), (32, 1.0)):
        pairs = [[rates(base, rows, temperature, speculates=each) for each in (False, True)] for _ in range(3)]
        plain, drafted = (np.max([pair[which] for pair in pairs], axis=0) for which in (0, 1))
        factors = " | ".join(f"{rate:.2f} ×" for rate in drafted / plain)
        print(f"| {rows}, {temperature} | {plain[0]:.0f} | {factors} |")


if __name__ == "__main__":
    main()
