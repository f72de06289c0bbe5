"""Executors that compute no model: tokens are a function of the key, the position and all keys that a row reads.

`LateExecutor` runs ahead as a card does: a step reads and writes memory some time after it was launched, at the latest
when its tokens are waited for, and memory that was freed is poisoned at once. What must not happen gathers in `faults`.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.core.types import BoolArray
from motet.model.device_steps import BLOCKS, DRAWN, KEY, POSITION, TOKEN, DeviceStep, DrawnTokens, StepLayout
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterLayout, AdapterWeights
from motet.rollout.decode_steps import NewTokens
from motet.rollout.prefix_cache import PrefixCache
from motet.rollout.sequences import SampledSequence

POISON = np.iinfo(np.int64).min
_ODD = np.uint64(0x9E3779B97F4A7C15)
U64 = NDArray[np.uint64]


def version(value: float) -> AdapterWeights:
    """Weights of one number; NaN makes a row's logits unusable."""
    return AdapterWeights(AdapterLayout.__new__(AdapterLayout), 1.0, torch.full((1,), value, dtype=torch.float64))


class PoisonedCache(KVCache):
    """One number for each token, poisoned as soon as nobody holds its block."""

    def __init__(self, n_blocks: int, block_size: int, slots: int) -> None:
        super().__init__(n_blocks, block_size, torch.device("cpu"), clean=False, slots=slots)
        self.memory = np.full((n_blocks + 2, block_size), POISON, np.int64)
        self.late: list[_LateFlight] = []
        """Steps that have not run, oldest first."""

    def catch_up(self) -> None:
        """Run all steps: what is begun now comes after them."""
        for flight in self.late[:]:
            flight.run()

    @property
    def bytes_per_block(self) -> int:
        return 8 * self.block_size

    def copy(self, source: int) -> int:
        self.catch_up()
        (block,) = self.take(1)
        self.memory[block] = self.memory[source]
        return block

    def contents(self, block: int) -> Tensor:
        self.catch_up()
        return torch.from_numpy(self.memory[block].copy())

    def restore(self, block: int, contents: Tensor) -> None:
        self.catch_up()
        self.memory[block] = contents.numpy()

    def give_back(self, blocks: list[int]) -> None:
        super().give_back(blocks)
        for block in blocks:
            if not self.references(block):
                self.memory[block] = POISON


class AnsweringExecutor:
    """Answers at once, one call after the other."""

    def __init__(self, cache: PoisonedCache, n_vocab: int) -> None:
        self.cache, self.n_vocab = cache, n_vocab
        self.faults: list[str] = []

    def logits(self, inputs: Sequence[NewTokens]) -> Tensor:
        self.cache.catch_up()
        rows = []
        for new in inputs:
            value = _value(new.weights)
            for offset, token in enumerate(new.token_ids):
                self.write(new.blocks, new.start + offset, token, value)
            rows.append([self.read(new.blocks, new.start + len(new.token_ids)), float(math.isnan(value))])
        return torch.tensor(rows, dtype=torch.float64)

    def draw(self, sequences: Sequence[SampledSequence], raw_NV: Tensor) -> DrawnTokens:
        masks = [None if item.grammar is None else item.grammar.allowed() for item in sequences]
        keys = [(item.key, len(item.tokens)) for item in sequences]
        return self.drawn(
            [
                self.token(*key, int(read), mask)
                for key, read, mask in zip(keys, raw_NV[:, 0].tolist(), masks, strict=True)
            ],
            [not broken for broken in raw_NV[:, 1].tolist()],
        )

    def drawn(self, tokens: list[tuple[int, float]], usable: list[bool]) -> DrawnTokens:
        return DrawnTokens(
            np.array([token for token, _ in tokens], np.int64),
            np.array([logprob for _, logprob in tokens], np.float32),
            np.array(usable, np.bool_),
        )

    def write(self, blocks: Sequence[int], position: int, token: int, value: float) -> None:
        known = 0 if math.isnan(value) else round(1000 * value)
        self.cache.memory[blocks[position // self.cache.block_size], position % self.cache.block_size] = (
            1 + token + (known << 20)
        )

    def read(self, blocks: Sequence[int], n_tokens: int) -> int:
        """A number of 50 bits that depends on the first tokens and their order."""
        n_blocks = -(-n_tokens // self.cache.block_size)
        read = self.cache.memory[list(blocks[:n_blocks])].reshape(-1)[:n_tokens]
        if (read == POISON).any():
            self.faults.append("poison was read")
        with np.errstate(over="ignore"):
            mixed = (read.astype(np.uint64) * _ODD) ^ (
                np.arange(n_tokens, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
            )
            return int((mixed * _ODD).sum() >> np.uint64(14))

    def token(self, key: int, position: int, read: int, mask: BoolArray | None) -> tuple[int, float]:
        number = random.Random(f"{key} {position} {read}").getrandbits(53)
        ids = np.arange(self.n_vocab) if mask is None else np.flatnonzero(mask)
        return int(ids[number % len(ids)]), -float(np.float32(number / 2**53))


@dataclass(eq=False)
class _LateFlight:
    executor: LateExecutor
    step: DeviceStep
    blocks: list[int] = field(default_factory=list)
    result: DrawnTokens | None = None
    asked: bool = False

    def run(self) -> None:
        self.executor.cache.late.remove(self)
        self.result = self.executor.compute(self.step)

    def tokens(self) -> DrawnTokens:
        if self.asked:
            self.executor.faults.append("a step was waited for twice")
        self.asked = True
        while self.result is None:
            self.executor.cache.late[0].run()
        return self.result


class LateExecutor(AnsweringExecutor):
    """Runs ahead; a step runs when it is waited for, or earlier, as `chance` has it."""

    def __init__(self, cache: PoisonedCache, n_vocab: int, chance: random.Random) -> None:
        super().__init__(cache, n_vocab)
        self.chance = chance
        self.kept: PrefixCache | None = None
        self.launches = self.changed_launches = self.changes = 0
        self._seen: dict[int, weakref.finalize] = {}  # type: ignore[type-arg]

    def hold(self, layout: StepLayout) -> None:
        self.table, self.state = layout, np.zeros(layout.size, np.int64)

    def launch(self, step: DeviceStep) -> _LateFlight:
        # the memory of weights, which does not keep them; it is poisoned when nobody has them any more
        for weights in step.weights:
            if weights is not None and (id(weights) not in self._seen or not self._seen[id(weights)].alive):
                self._seen[id(weights)] = weakref.finalize(weights, weights.flat.fill_, math.inf)
        flats = [None if weights is None else weights.flat for weights in step.weights]
        self.launches += 1
        self.changed_launches += len(step.changes_C2) > 0
        self.changes += len(step.changes_C2)
        masks = None if step.masks_NV is None else step.masks_NV.copy()
        read: Any = flats
        late = replace(step, changes_C2=step.changes_C2.copy(), weights=read, masks_NV=masks)
        flight = _LateFlight(self, late)
        self.cache.late.append(flight)
        while self.cache.late and self.chance.random() < 0.3:
            self.cache.late[0].run()
        return flight

    def compute(self, step: DeviceStep) -> DrawnTokens:
        for index, value in step.changes_C2.tolist():
            self.state[index] = value
        start = self.table.order_at(step.group)
        rows = self.state[start : start + step.n_rows].tolist()
        assert len(set(rows)) == step.n_rows, "a row is in its step once"
        tokens, usable = [], []
        for place, row in enumerate(rows):
            record = self.state[row * self.table.width : (row + 1) * self.table.width]
            flat: Tensor | None = step.weights[place]  # type: ignore[assignment]
            value = 0.0 if flat is None else float(flat[0])
            if value == math.inf:
                self.faults.append("the weights of a row were overwritten")
                value = 0.0
            position = int(record[POSITION])
            blocks = record[BLOCKS : BLOCKS + position // self.cache.block_size + 1].tolist()
            self.check(blocks[-1])
            self.write(blocks, position, int(record[TOKEN]), value)
            mask = None if step.masks_NV is None else step.masks_NV[place]
            key = int(np.int64(record[KEY]).astype(np.uint64))
            drawn = self.token(key, int(record[DRAWN]), int(float(self.read(blocks, position + 1))), mask)
            record[[TOKEN, POSITION, DRAWN]] = drawn[0], position + 1, record[DRAWN] + 1
            tokens.append(drawn)
            usable.append(not math.isnan(value))
        return self.drawn(tokens, usable)

    def check(self, block: int) -> None:
        """Only the row itself holds the block that it writes."""
        if self.cache.references(block) != 1:
            self.faults.append(f"a block with {self.cache.references(block)} owners was written")
        if self.kept is not None and block in self.kept._held:
            self.faults.append("a kept block was written")


def _value(weights: AdapterWeights | None) -> float:
    return 0.0 if weights is None else float(weights.flat[0])
