"""Tokens that a base samples and trains in a time. They are measured once for it and its processor, and kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
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
LEAST = 2**18
"""Tokens that a step may have on any base: a step with the defaults has fewer if its prompts and rows are short."""
_ROWS, _NEW, _MORE = 64, 4, 4
"""Completions that are sampled and trained together, tokens of each, and a factor on these if that was quick."""
_RANK = 8
_NAME = "#speed"
"""Of the adapter: no job can have it."""
_QUICK = 1.0
"""Seconds of a first measurement that counts; a shorter one is done again with more tokens."""


async def usual_step(services: Services, info: ModelInfo, sampler: str) -> int:
    """The most tokens of a step by default. `sampler` is the kind of engine; only the embedded one is measured.

    A base that cannot be measured has the least.
    """
    known: dict[str, str | int] = {
        "base": Path(info.name).name,
        "parameters": info.n_parameters,
        "dtype": info.dtype,
        "processor": info.processor,
        "threads": services.threads,
        "sampler": sampler,
    }
    file = _file_of(known)
    if (rate := _kept(file)) is None:
        try:
            rate = await _measured(services, samples=sampler == "embedded")
        except MotetError:
            return LEAST
        with contextlib.suppress(MotetError, OSError):  # then it is measured again at the next start
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps({**known, "tokens_per_second": rate}).encode())
    return max(LEAST, int(SECONDS * rate))


def _file_of(known: dict[str, str | int]) -> Path:
    name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / "speeds" / f"{name}.json"


def _kept(file: Path) -> float | None:
    try:
        rate = float(json.loads(file.read_bytes())["tokens_per_second"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return rate if rate > 0 else None


async def _measured(services: Services, *, samples: bool) -> float:
    """Tokens per second, sampled and trained; those of servers are only trained."""
    begun = time.perf_counter()
    tokens = await _work(services, _NEW, samples=samples)
    if (seconds := time.perf_counter() - begun) < _QUICK:
        begun = time.perf_counter()
        tokens = await _work(services, _NEW * _MORE, samples=samples)
        seconds = time.perf_counter() - begun
    return tokens / seconds


async def _work(services: Services, new: int, *, samples: bool) -> int:
    """Sample completions of so many tokens together and train them; returns the tokens of both."""
    prompt = np.zeros(1, np.int32)
    completions = [np.ones(new, np.int32)] * min(_ROWS, services.engine.capacity)
    if samples:
        sampling, keys = SamplingParams(max_tokens=new), tuple(range(len(completions)))
        request = GenerateRequest(f"{_NAME}/0", _NAME, prompt, None, sampling, keys)
        completions = [chunk.token_ids async for chunk in services.engine.generate(request)]
    data = [datum(np.append(prompt, ids[:-1]), ids) for ids in completions]
    batch = batch_of(data, by_sample=False)
    segments = batch.segments(_NAME, ClientLoss.of("cross_entropy"), 1.0, services.micro_batch_tokens)
    try:
        await services.device.run(lambda: _train(services.trainer, segments))
    finally:
        await services.device.run(lambda: services.trainer.remove_adapter(_NAME))
    return sum(map(len, completions)) * samples + batch.tokens


def _train(trainer: Trainer, segments: tuple[Segment, ...]) -> None:
    trainer.add_adapter(_NAME, AdapterConfig(rank=_RANK), 0)
    for segment in segments:
        trainer.forward_backward(Batch((segment,)))
