"""Tokens that a base samples and trains in a time. They are measured once for it and its processor, and kept in a file."""

from __future__ import annotations

import contextlib
import math
import re
import time
from pathlib import Path

import numpy as np

from motet.algorithms.client import ClientLoss, batch_of, datum
from motet.config import AdapterConfig
from motet.core.batch import Batch, Segment
from motet.core.checksums import replace_file
from motet.core.errors import MotetError
from motet.core.model_info import ModelInfo
from motet.core.types import GenerateRequest, SamplingParams
from motet.model.find import cache_directory
from motet.protocols import Trainer
from motet.runtime.job import Services

SECONDS = 600.0
"""Of the device, for a step that is as large as it may be by default."""
LEAST = 2**21
"""Tokens that a step may have on any base: 128 rollouts of 8,192 tokens, as with the defaults, sampled and trained."""
_ROWS, _NEW, _MORE = 64, 4, 4
"""Completions that are sampled and trained together, tokens of each, and a factor on these if that was quick."""
_RANK = 8
_NAME = "#speed"
"""Of the adapter: no job can have it."""
_QUICK = 1.0
"""Seconds of a first measurement that counts; a shorter one is done again with more tokens."""


async def measure_steps(services: Services, info: ModelInfo, sampler: str) -> None:
    """Learn how large steps may be by default. `sampler` is the kind of engine; empty if no step is limited."""
    if sampler:
        services.steps.usual = await _usual_step(services, info, sampler)


async def _usual_step(services: Services, info: ModelInfo, sampler: str) -> int:
    """A base that cannot be measured has the least."""
    name, facts = Path(info.name).name, (info.n_parameters, info.dtype, info.processor, services.threads, sampler)
    known = "-".join(re.sub(r"[^\w.]+", "_", f"{part}") for part in (name, *facts))
    file = cache_directory() / "speeds" / f"{known[:200]}.txt"
    if (rate := _kept(file)) is None:
        try:
            rate = await _measured(services)
        except MotetError:
            return LEAST
        with contextlib.suppress(MotetError, OSError):  # then it is measured again at the next start
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, f"{rate} tokens per second".encode())
    return max(LEAST, int(SECONDS * rate))


def _kept(file: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        rate = float(file.read_text("utf-8").split()[0])
        return rate if 0 < rate < math.inf else None
    return None


async def _measured(services: Services) -> float:
    """Tokens per second, sampled and trained; the first time also warms up."""
    for new in (_NEW, _NEW * _MORE):
        begun = time.perf_counter()
        tokens = await _work(services, new)
        if (seconds := time.perf_counter() - begun) > _QUICK:
            break
    return tokens / seconds


async def _work(services: Services, new: int) -> int:
    """Sample completions of so many tokens together and train them; returns the tokens of both."""
    prompt, keys = np.zeros(1, np.int32), tuple(range(min(_ROWS, services.engine.capacity)))
    request = GenerateRequest(f"{_NAME}/0", _NAME, prompt, None, SamplingParams(max_tokens=new), keys)
    sampled = [chunk.token_ids async for chunk in services.engine.generate(request)]
    batch = batch_of([datum(np.append(prompt, ids[:-1]), ids) for ids in sampled], by_sample=False)
    segments = batch.segments(_NAME, ClientLoss.of("cross_entropy"), 1.0, services.micro_batch_tokens)
    try:
        await services.device.run(lambda: _train(services.trainer, segments))
    finally:
        await services.device.run(lambda: services.trainer.remove_adapter(_NAME))
    return sum(map(len, sampled)) + batch.tokens


def _train(trainer: Trainer, segments: tuple[Segment, ...]) -> None:
    trainer.add_adapter(_NAME, AdapterConfig(rank=_RANK), 0)
    for segment in segments:
        trainer.forward_backward(Batch((segment,)))
