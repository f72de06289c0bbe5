"""Greedy completions of trained bases by this device's kernels, and by the kernels for CPUs of the same machine.

    python -m bench.gpu.tokens DEVICE BASE…

On a CPU, torch's kernels stand for the device's. Kernels round differently, so a token may differ where two are nearly equal.
Up to there both have read the same tokens, so their logprobs must be near; the exit code is 1 where they are not.

Legend: T tokens of a completion.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import numpy as np
from bench.gpu.company import executor_of
from bench.gpu.figures import Figure, say
from bench.speed.workers.material import story_prompts

from motet.config import EngineConfig
from motet.config.budgets import Need
from motet.core.errors import BaseModelError
from motet.core.types import Chunk, GenerateRequest, SamplingParams
from motet.hosts.launch import build, load
from motet.model.find import find_base
from motet.model.lora_model import LoraModel

PROMPTS, TOKENS = 8, 64
MOST_GAP = 0.5
"""Of logprobs: four units in the last place of logits in bfloat16 from 16 on, as SmolLM2's are."""
KV_TOKENS = 4096
"""Of each engine, as other parts use the card beside it."""


def completions(base: LoraModel, config: EngineConfig, tokens: int = TOKENS) -> list[Chunk]:
    """The completion of each prompt, all decoded at once by the engine."""
    requests = [
        GenerateRequest(
            id=f"r{number}",
            job="tokens",
            prompt_ids=np.array(base.info.tokenizer.encode(text), np.int32),
            adapter=None,
            sampling=SamplingParams(temperature=0.0, max_tokens=tokens),
            seeds=(number,),
        )
        for number, text in enumerate(story_prompts()[:PROMPTS])
    ]
    made = build(base, config, [Need(max(len(request.prompt_ids) for request in requests), tokens)])

    async def completed(request: GenerateRequest) -> Chunk:
        (chunk,) = [chunk async for chunk in made.engine.generate(request)]
        return chunk

    async def every() -> list[Chunk]:
        return list(await asyncio.gather(*map(completed, requests)))

    try:
        return asyncio.run(every())
    finally:
        made.close()


def beside(ours: Sequence[Chunk], theirs: Sequence[Chunk]) -> tuple[int, float]:
    """Tokens before the first that differs, of all completions; and the largest gap of logprobs up to there, with it.

    Where two tokens differ, both are the likeliest of nearly equal distributions, so their logprobs are near too.
    """
    equal, gap = 0, 0.0
    for answer, other in zip(ours, theirs, strict=True):
        same_T = answer.token_ids == other.token_ids
        first = len(same_T) if same_T.all() else int(np.argmin(same_T))
        gaps_T = np.abs(answer.logprobs[: first + 1] - other.logprobs[: first + 1])
        equal, gap = equal + first, max(gap, float(gaps_T.max()))
    return equal, gap


def main(words: list[str]) -> int:
    """Compare each base; returns 1 where a gap is too large."""
    device, bad = words[0], 0
    on_cpu = EngineConfig(dtype="bfloat16", device="cpu", threads=1, kv_tokens=KV_TOKENS)  # a team waits for cores
    here = on_cpu.model_copy(update={"device": device, "kernels": "torch" if device == "cpu" else "auto"})
    for name in words[1:]:
        try:
            find_base(name)
        except BaseModelError as error:  # this machine lacks it
            print(error)
            continue
        found, by = [], []
        for config in (here, on_cpu):
            base = load(name, config)
            print(f"{name}: {base.info.processor}; {' '.join(base.info.notes)}")
            found.append(completions(base, config))
            by.append(executor_of(base))
        equal, gap = beside(*found)
        all_tokens = sum(len(chunk.token_ids) for chunk in found[0])
        said = (
            f"{equal} of {all_tokens} before one differs; logprobs differ by at most {gap:.3g}, allowed are {MOST_GAP}"
        )
        say(Figure("bits", f"{name}: greedy tokens, beside a CPU's", said, "", " and ".join(by)))
        bad += gap > MOST_GAP
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
