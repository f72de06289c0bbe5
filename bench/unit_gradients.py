"""Sizes of the gradients of units, and errors of their sum, by recipe: `python -m bench.unit_gradients [BASE]`.

Each recipe takes some steps after one of SFT. Tokens are random, so they are unlikely, and gradients are larger than those of
text. Prints a line of JSON for each recipe.

Legend: U units, S samples, T tokens of a sample, K targets of a token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from motet.algorithms import Grpo, Ppo
from motet.algorithms.advantages import normalisation
from motet.algorithms.algorithm import StepBatch
from motet.algorithms.critic import CriticConfig, ValueLoss, credited
from motet.algorithms.distillation import Distillation
from motet.algorithms.dpo import Dpo
from motet.algorithms.kto import Kto
from motet.algorithms.rows import RowAlgorithm, RowLogprobs
from motet.algorithms.supervised import SoftTargets, Supervised
from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import AdamW, Batch, Example, Loss, Row, Sample, Segment
from motet.core.types import FloatArray
from motet.hosts.launch import load
from motet.model.lora_model import LoraModel
from motet.model.unit_sums import SCALE, UNFIT, UnitSums
from motet.training.torch_trainer import TorchTrainer

POLICY, CRITIC = "policy", "critic"
GROUP = 4


@dataclass(frozen=True)
class Sizes:
    """Rows of a step, and the tokens of each."""

    rows: int = 16
    prompt: int = 12
    answer: int = 24
    rank: int = 8


class Recipes:
    """Data of one step of each recipe, as a job has it: adapter, loss and samples."""

    def __init__(self, base: LoraModel, sizes: Sizes, seed: int) -> None:
        """A trainer with a policy and a critic."""
        self.trainer, self.sizes = TorchTrainer(base, slots=2), sizes
        self._numbers, self._ids = np.random.default_rng(seed), base.info.vocab_size
        for name in (POLICY, CRITIC):
            shape = AdapterConfig(rank=sizes.rank, alpha=2.0 * sizes.rank)
            self.trainer.add_adapter(name, shape, seed=seed, head=name == CRITIC)
        self._step(POLICY, Supervised(), self._rows(Supervised()))

    def _example(self, n_targets: int = 0) -> Example:
        n, numbers = self.sizes.prompt + self.sizes.answer, self._numbers
        ids, mask = numbers.integers(0, self._ids, n).astype(np.int32), np.arange(n) >= self.sizes.prompt
        if not n_targets:
            return Example(ids, mask)
        targets = numbers.integers(0, self._ids, (n, n_targets)).astype(np.int32)
        return Example(ids, mask, targets, numbers.dirichlet(np.ones(n_targets), n).astype(np.float32))

    def _scored(self, samples: Sequence[Sample], name: str = POLICY, *, base: bool = False) -> tuple[FloatArray, ...]:
        return self.trainer.forward(Batch((Segment(name, tuple(samples)),)), base=base)[0]

    def _sampled(self, advantage: Callable[[int], float], *, last: bool = False) -> StepBatch:
        """Answers with the policy's logprobs; an advantage on each token of a sample, or on its last one."""
        examples = [self._example() for _ in range(self.sizes.rows)]
        weights, denominator = normalisation([example.n_learned for example in examples], "token", 1)
        samples = []
        for index, (example, weight) in enumerate(zip(examples, weights, strict=True)):
            own = example.loss_mask & (
                np.arange(len(example.token_ids)) == len(example.token_ids) - 1 if last else True
            )
            zeros, versions = np.zeros(len(own), np.float32), np.where(example.loss_mask, 0, -1).astype(np.int32)
            told = np.where(own, np.float32(advantage(index)), np.float32(0))
            samples.append(Sample(example.token_ids, example.loss_mask, zeros, told, versions, zeros + weight))
        logprobs = self._scored(samples)
        pairs = zip(samples, logprobs, strict=True)
        return StepBatch(tuple(replace(sample, logprobs=own) for sample, own in pairs), denominator)

    def _rewards(self) -> Callable[[int], float]:
        """Rewards of 0 and 1, less the mean of a group."""
        rewards = self._numbers.integers(0, 2, (self.sizes.rows // GROUP, GROUP)).astype(float)
        rewards[:, :2] = 0, 1  # every group has both
        centred = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
        return lambda index: float(centred[index])

    def _rows(self, algorithm: RowAlgorithm, per_row: int = 1, n_targets: int = 0) -> StepBatch:
        """Rows as an algorithm weighs them; the reference is the base."""
        rows = [
            Row(tuple(self._example(n_targets) for _ in range(per_row)), liked=bool(index % 2))
            for index in range(self.sizes.rows // per_row)
        ]
        batch = algorithm.batch(rows)
        if not algorithm.compares:
            return batch
        return algorithm.weighed(
            batch, RowLogprobs(self._scored(batch.samples), self._scored(batch.samples, base=True))
        )

    def steps(self) -> Mapping[str, Callable[[], tuple[str, Loss, StepBatch]]]:
        """By name of the recipe."""
        grpo, ppo, distilled = Grpo(), Ppo(critic=CriticConfig()), Distillation(teacher="base")

        def credit() -> tuple[StepBatch, StepBatch]:
            batch, config = self._sampled(self._rewards(), last=True), CriticConfig()
            found = credited(batch, self._scored(batch.samples, CRITIC), config)
            return found.policy, found.critic

        def taught() -> StepBatch:
            batch = self._sampled(lambda _: 0.0)
            return distilled.weighed(batch.with_logprobs("reference_logprobs", self._scored(batch.samples, base=True)))

        return {
            "GRPO": lambda: (POLICY, grpo, self._sampled(self._rewards())),
            "PPO": lambda: (POLICY, ppo, credit()[0]),
            "PPO's critic": lambda: (CRITIC, ValueLoss(CriticConfig().clip), credit()[1]),
            "DPO": lambda: (POLICY, Dpo(), self._rows(Dpo(), per_row=2)),
            "KTO": lambda: (POLICY, Kto(), self._rows(Kto())),
            "SFT": lambda: (POLICY, Supervised(), self._rows(Supervised())),
            "soft targets": lambda: (POLICY, SoftTargets(), self._rows(SoftTargets(), n_targets=4)),
            "distillation": lambda: (POLICY, distilled, taught()),
        }

    def units(self, name: str, n_steps: int) -> Iterator[Tensor]:
        """Gradients [U, elements] of the samples of each step."""
        for _ in range(n_steps):
            adapter, loss, batch = self.steps()[name]()
            arena, units = self.trainer._arena(adapter), list[Tensor]()
            for sample in batch.samples:
                self.trainer.forward_backward(Batch((Segment(adapter, (sample,), loss, batch.denominator),)))
                units.append(arena.gradient.clone())
                arena._clear()
            self._step(adapter, loss, batch)
            yield torch.stack(units)

    def _step(self, adapter: str, loss: Loss, batch: StepBatch) -> None:
        self.trainer.forward_backward(Batch((Segment(adapter, batch.samples, loss, batch.denominator),)))
        self.trainer.optim_step(adapter, AdamW(1e-3))


@dataclass(frozen=True)
class Measured:
    """The units of some steps of one recipe."""

    recipe: str
    largest: float
    """|Element| of a unit."""
    middle: float
    """Of those that are not 0."""
    largest_of_range: float
    """The largest, times the units of a step, as a share of what fits."""
    middle_in_units: float
    """The middle one in multiples of the last bit of a sum."""
    error: float
    """Of the sum of whole numbers, relative to the norm of the sum in fp64."""
    error_fp32: float
    """Of the sum in fp32."""


def errors(units: Tensor) -> tuple[float, float]:
    """Relative errors of the sum of whole numbers, and of that in fp32."""
    exact = units.double().sum(0)
    sums, floats = UnitSums.empty(units.shape[1], units.device), torch.zeros_like(units[0])
    for unit in units:
        sums.add_unit(sums.flat, unit)
        sums.n_units += 1
        floats += unit
    whole, plain = (float((total.double() - exact).norm() / exact.norm()) for total in (sums.total(), floats))
    return whole, plain


def measured(base: LoraModel, name: str, sizes: Sizes, n_steps: int, seed: int = 0) -> Measured:
    """Measure one recipe."""
    steps = list(Recipes(base, sizes, seed).units(name, n_steps))
    sizes_of = torch.cat([units.abs().flatten() for units in steps])
    largest, middle = float(sizes_of.max()), float(sizes_of[sizes_of > 0].median())
    found = [errors(units) for units in steps]
    whole, plain = (max(each) for each in zip(*found, strict=True))
    of_range = largest * max(len(units) for units in steps) * SCALE / (2 * UNFIT)
    return Measured(name, largest, middle, of_range, middle * SCALE, whole, plain)


def main() -> None:
    """Print a line for each recipe."""
    engine = EngineConfig(dtype="float32", threads=1, device="cpu")
    base = load(sys.argv[1] if len(sys.argv) > 1 else "small", engine)
    for name in Recipes(base, Sizes(), 0).steps():
        print(json.dumps(asdict(measured(base, name, Sizes(), 4))), flush=True)


if __name__ == "__main__":
    main()
