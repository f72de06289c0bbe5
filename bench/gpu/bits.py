"""Does a row keep its bits in company, behind a fork, behind a prompt read in chunks, and in a training pass?

    python -m bench.gpu.bits OPTIONS KEYS

Seven sequences have an adapter each, and one has none. All are KEYS tokens long. The exit code is 1 where a base that calls
itself exact has a row with other bits.

Legend: T packed rows, N compared rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from bench.gpu.figures import say, unequal
from bench.gpu.products import rows_unequal
from bench.speed.workers import motet_parts as parts
from torch import Tensor

from motet.core.batch import AdamW, Batch, Sample, Segment
from motet.core.types import AdapterRef, Chunk, GenerateRequest
from motet.model.arithmetic import round_up
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights, initial_weights
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.rollout.model_runner import ModelRunner, NewTokens

if TYPE_CHECKING:
    from motet.hosting.workshop import Workshop
    from motet.protocols import RolloutEngine

SEQUENCES = 8
WITHOUT_ADAPTER = 3
STEPS = 4
"""Tokens that are decoded, given, at the end of each sequence."""
TEMPERATURES = (1.0, 0.7)
COMPLETIONS = 8
"""Of each prompt, when logprobs are compared."""
COMPANY = (8, 64, 256)
CHUNKS = (512, 100)
RANKS = (16, 8, 16, 16, 4, 16, 64, 16)


def executor_of(base: LoraModel) -> str:
    """What computes the base's passes."""
    if base.kernels is not None:
        return type(base.kernels).__module__.split(".")[1]
    tile = base.arithmetic.tile
    return f"torch, tile {tile}" if tile else "torch"


def new_adapter(base: LoraModel, rank: int, seed: int) -> AdapterWeights:
    """An adapter on all linear layers whose B is random too, as after training."""
    layout = base.adapter_layout("all-linear", rank)
    masters = initial_weights(layout, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in layout.views(masters).values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.02)
    return AdapterWeights.from_masters(layout, 2.0, masters.to(base.device), base.dtype)


@dataclass
class Company:
    """Sequences, and the cache in which their prompts are."""

    base: LoraModel
    keys: int
    adapters: list[AdapterWeights | None] = field(init=False)
    ids: list[list[int]] = field(init=False)
    cache: KVCache = field(init=False)
    runner: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        base, generator = self.base, random.Random(0)
        self.adapters = [new_adapter(base, rank, seed) for seed, rank in enumerate(RANKS)]
        self.adapters[WITHOUT_ADAPTER] = None
        self.ids = [[generator.randrange(3, base.info.vocab_size) for _ in range(self.keys)] for _ in range(SEQUENCES)]
        per_sequence = -(-self.keys // base.block_size)
        blocks = (len(CHUNKS) + 2) * SEQUENCES * per_sequence + 3 * max(COMPANY)
        self.cache = KVCache(blocks, base.block_size, base.device)
        self.runner = ModelRunner(base, self.cache)

    @property
    def prompt(self) -> int:
        """Tokens of each sequence that are read before it is decoded."""
        return self.keys - STEPS

    def read(self, chunk: int) -> list[list[int]]:
        """Read all prompts, some tokens of one of them at a time; returns their blocks."""
        found = []
        for ids, adapter in zip(self.ids, self.adapters, strict=True):
            blocks = self.cache.take(-(-self.keys // self.base.block_size))
            for start in range(0, self.prompt, chunk):
                part = ids[start : min(start + chunk, self.prompt)]
                self.runner.logits([NewTokens(adapter, part, start, blocks)])
            found.append(blocks)
        return found

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of a sequence that goes on from a prompt: whole ones are shared, the last is copied."""
        whole = self.prompt // self.base.block_size
        self.cache.share(list(blocks[:whole]))
        rest = len(blocks) - whole
        copied = [self.cache.copy(blocks[whole])] if self.prompt % self.base.block_size else []
        return [*blocks[:whole], *copied, *self.cache.take(rest - len(copied))]

    def decoded(self, prompts: Sequence[Sequence[int]], rows: int, which: Sequence[int] = range(SEQUENCES)) -> Tensor:
        """Logits [STEPS · N, V] of sequences that are decoded among others: forks of the same prompts, in mixed order."""
        order = random.Random(rows)
        mine = {number: self.fork(prompts[number]) for number in which}
        others = [(order.randrange(SEQUENCES), order.randrange(SEQUENCES)) for _ in range(rows - len(mine))]
        forks = [self.fork(prompts[number]) for number, _ in others]
        found = []
        for step in range(STEPS):
            start = self.prompt + step
            inputs = [NewTokens(self.adapters[n], [self.ids[n][start]], start, blocks) for n, blocks in mine.items()]
            inputs += [
                NewTokens(self.adapters[adapter], [self.ids[number][step]], start, blocks)
                for (number, adapter), blocks in zip(others, forks, strict=True)
            ]
            places = list(range(len(inputs)))
            order.shuffle(places)
            logits_NV = self.runner.logits([inputs[place] for place in places])
            found.append(logits_NV[[places.index(row) for row in range(len(mine))]].clone())
        for blocks in (*mine.values(), *forks):
            self.cache.give_back(blocks)
        return torch.stack(found, 1).flatten(0, 1)

    def passed(self, which: Sequence[int]) -> Tensor:
        """Logits [STEPS · N, V] of the same tokens in a training pass of whole sequences."""
        base = self.base
        room = round_up(self.keys, base.arithmetic.rows)
        pad = room - self.keys
        segments = [
            TrainSegment(place * room, (place + 1) * room, adapter, None)
            for place, number in enumerate(which)
            if (adapter := self.adapters[number]) is not None
        ]
        tokens_T = torch.tensor([token for number in which for token in [*self.ids[number], *[0] * pad]])
        lengths = [self.keys, pad] if pad else [self.keys]
        positions_T = torch.cat([torch.arange(length) for length in lengths]).repeat(len(which)).to(base.device)
        routing = TrainerRouting(segments, base.device, base.products, backward=False)
        with base.routed(routing):
            attention = base.attention.packed(lengths * len(which))
            hidden_TD = base.hidden(tokens_T.to(base.device), positions_T, attention)
        rows = [place * room + self.prompt + step for place in range(len(which)) for step in range(STEPS)]
        return base.raw_logits(base.pad(hidden_TD[torch.tensor(rows, device=base.device)]))[: len(rows)]


def questions(company: Company, shape: str) -> int:
    """Print a figure for each question; returns how many rows were unequal."""
    name, total = executor_of(company.base), 0

    def answer(question: str, found_NV: Tensor, expected_NV: Tensor) -> None:
        nonlocal total
        count = rows_unequal(found_NV, expected_NV)
        total += count
        say(unequal(f"{shape}: {question}", count, len(found_NV), name))

    whole = company.read(company.prompt)
    alone = company.decoded(whole, SEQUENCES)
    for rows in COMPANY[1:]:
        answer(f"logits in {rows} rows, behind forks, at other places", company.decoded(whole, rows), alone)
    one = slice(WITHOUT_ADAPTER * STEPS, (WITHOUT_ADAPTER + 1) * STEPS)
    answer("logits of a row without adapter, alone", company.decoded(whole, 1, [WITHOUT_ADAPTER]), alone[one])
    passed = company.passed(range(SEQUENCES))
    answer("logits in a training pass of eight sequences", passed, alone)
    twice = company.passed([number for number in range(SEQUENCES) for _ in range(2)])
    answer("logits in a pass twice as large", twice.view(SEQUENCES, 2, STEPS, -1)[:, 1].flatten(0, 1), passed)
    for chunk in CHUNKS:
        read = company.read(chunk)
        answer(f"logits behind a prompt read {chunk} tokens at a time", company.decoded(read, COMPANY[1]), alone)
        for blocks in read:
            company.cache.give_back(blocks)
    return total


def sampled_logprobs(shape: str, keys: int) -> int:
    """Compare the logprobs that sampling wrote with those of a training pass; returns how many are unequal."""
    made, new = parts.workshop(), min(64, keys // 4)
    with parts.resident(made.trainer, SEQUENCES, 16) as names:
        _learn(made, names)
        references = [AdapterRef(name, 0) for name in names]
        for reference in references:
            asyncio.run(made.sync.publish(reference.name, reference))
        adapters = [None if place == WITHOUT_ADAPTER else one for place, one in enumerate(references)]
        work = {"prompts": SEQUENCES, "each": COMPLETIONS, "prompt_tokens": keys - new, "new_tokens": new}
        heated = zip(parts.requests_of(work, adapters), TEMPERATURES * COMPLETIONS, strict=False)
        requests = [replace(one, sampling=replace(one.sampling, temperature=heat)) for one, heat in heated]
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

    async def one(request: GenerateRequest) -> tuple[Sample, ...]:
        chunks = [chunk async for chunk in engine.generate(request)]
        return tuple(_sample(request, chunk) for chunk in sorted(chunks, key=lambda chunk: chunk.index))

    return list(await asyncio.gather(*(one(request) for request in requests)))


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
    return int(bad > 0 and base.info.exact)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
