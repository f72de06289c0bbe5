"""Does a base keep its bits on this device?

    python -m bench.gpu.bits OPTIONS KEYS

Logprobs that the engine wrote are compared with those of the trainer; then come the questions of `company.py`, about sequences
of KEYS tokens, and those of `gradients.py`. The exit code is 1 where a base that calls itself exact has a row with other bits.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from bench.gpu.company import SEQUENCES, WITHOUT_ADAPTER, Company, executor_of, questions
from bench.gpu.figures import say, unequal
from bench.gpu.gradients import gradient_questions
from bench.speed.workers import motet_parts as parts

from motet.core.batch import AdamW, Batch, Sample, Segment
from motet.core.types import AdapterRef, Chunk, GenerateRequest

if TYPE_CHECKING:
    from motet.hosts.workshop import Workshop
    from motet.protocols import RolloutEngine

TEMPERATURES = (1.0, 0.7)
COMPLETIONS = 8
"""Of each prompt, when logprobs are compared."""


def sampled_logprobs(shape: str, keys: int) -> int:
    """Compare the logprobs that sampling wrote with those of a training pass; returns how many are unequal."""
    made, new = parts.workshop(), min(64, keys // 4)
    with parts.resident(made.trainer, SEQUENCES, 16) as names:
        _learn(made, names)
        references = [AdapterRef(name, 0) for name in names]
        for reference in references:
            asyncio.run(made.sync.publish(reference.name, reference))
        adapters = [None if place == WITHOUT_ADAPTER else reference for place, reference in enumerate(references)]
        work = {"prompts": SEQUENCES, "each": COMPLETIONS, "prompt_tokens": keys - new, "new_tokens": new}
        heated = zip(parts.requests_of(work, adapters), TEMPERATURES * COMPLETIONS, strict=False)
        requests = [replace(request, sampling=replace(request.sampling, temperature=heat)) for request, heat in heated]
        sampled = asyncio.run(_sampled(made.engine, requests))
        bad = compared = 0
        for name, request, samples in zip(names, requests, sampled, strict=True):
            segment = Segment(name, samples, temperature=request.sampling.temperature)
            score = partial(made.trainer.forward, Batch((segment,)), base=request.adapter is None)
            for sample, logprobs in zip(samples, parts.on_device(made, score)[0], strict=True):
                ours, theirs = (values[sample.loss_mask].view(np.int32) for values in (sample.logprobs, logprobs))
                bad, compared = bad + int((ours != theirs).sum()), compared + len(ours)
        for reference in references:
            asyncio.run(made.engine.unload_adapter(reference))
    parts.close_workshop()
    say(unequal(f"{shape}: logprobs that sampling wrote, in a pass", bad, compared, executor_of(parts.base())))
    return bad


def _learn(made: Workshop, names: Sequence[str]) -> None:
    """One step of each adapter, so that its B is not zero."""
    for batch in parts.batches_of({"samples": 2 * len(names), "prompt": 16, "response": 16}, names):
        parts.on_device(made, partial(made.trainer.forward_backward, batch))
    for name in names:
        parts.on_device(made, partial(made.trainer.optim_step, name, AdamW(1e-2)))


async def _sampled(engine: RolloutEngine, requests: Sequence[GenerateRequest]) -> list[tuple[Sample, ...]]:
    """The completions of each request, all sampled at once."""

    async def sampled(request: GenerateRequest) -> tuple[Sample, ...]:
        chunks = [chunk async for chunk in engine.generate(request)]
        return tuple(_sample(request, chunk) for chunk in sorted(chunks, key=lambda chunk: chunk.index))

    return list(await asyncio.gather(*(sampled(request) for request in requests)))


def _sample(request: GenerateRequest, chunk: Chunk) -> Sample:
    ids = np.concatenate([request.prompt_ids, chunk.token_ids])
    mask = np.arange(len(ids)) >= len(request.prompt_ids)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = chunk.logprobs
    return Sample(ids, mask, logprobs, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))


def main(words: list[str]) -> int:
    """Ask everything; returns 1 where an exact base's row differs."""
    base, keys = parts.base(), int(words[-1])
    shape = base.info.name.rsplit("/", 1)[-1]
    print(f"exact: {base.info.exact}; {base.arithmetic}; {' '.join(base.info.notes)}")
    bad = sampled_logprobs(shape, keys)
    gc.collect()
    torch.cuda.empty_cache()
    with torch.no_grad():
        bad += questions(Company(base, keys), shape)
    gc.collect()
    torch.cuda.empty_cache()
    bad += gradient_questions(base, shape)
    return int(bad > 0 and base.info.exact)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
