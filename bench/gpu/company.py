"""Sequences that are decoded alone and in company, behind forks, behind prompts read in chunks, and in a training pass.

Legend: T packed rows, N compared rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from bench.gpu.figures import say, unequal
from bench.gpu.products import rows_unequal
from torch import Tensor

from motet.model.arithmetic import round_up
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights, initial_weights
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.rollout.decode_steps import NewTokens
from motet.rollout.model_runner import ModelRunner

SEQUENCES = 8
WITHOUT_ADAPTER = 3
STEPS = 4
"""Tokens that are decoded, given, at the end of each sequence."""
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
    """Tokens of each sequence."""
    rows: tuple[int, ...] = (64, 256)
    """Rows of the batches in which sequences are decoded again."""
    chunks: tuple[int, ...] = (512, 100)
    """Tokens of a prompt that are read at a time."""
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
        blocks = (len(self.chunks) + 2) * SEQUENCES * per_sequence + 3 * max(self.rows)
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
    for rows in company.rows:
        answer(f"logits in {rows} rows, behind forks, at other places", company.decoded(whole, rows), alone)
    plain_rows = slice(WITHOUT_ADAPTER * STEPS, (WITHOUT_ADAPTER + 1) * STEPS)
    answer("logits of a row without adapter, alone", company.decoded(whole, 1, [WITHOUT_ADAPTER]), alone[plain_rows])
    passed = company.passed(range(SEQUENCES))
    answer("logits in a training pass of eight sequences", passed, alone)
    twice = company.passed([number for number in range(SEQUENCES) for _ in range(2)])
    answer("logits in a pass twice as large", twice.view(SEQUENCES, 2, STEPS, -1)[:, 1].flatten(0, 1), passed)
    for chunk in company.chunks:
        read = company.read(chunk)
        answer(f"logits behind a prompt read {chunk} tokens at a time", company.decoded(read, company.rows[0]), alone)
        for blocks in read:
            company.cache.give_back(blocks)
    return total
