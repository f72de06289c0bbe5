"""Gradients of adapters alone, in company, twice, cut and reordered: through head, loss and all layers of a training pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from bench.gpu.company import RANKS, executor_of, new_adapter
from bench.gpu.figures import say, unequal
from torch import Tensor

from motet.algorithms import Reinforce
from motet.core.batch import Batch, Sample, Segment
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.unit_sums import UnitSums
from motet.training.head import whole
from motet.training.packed_pass import Learning, PackedPass

LENGTHS = (300, 9, 70, 150)
"""Tokens of each adapter's samples: more than a piece of keys, and than the rows that a unit adds at a time."""


def sample(base: LoraModel, length: int, seed: int) -> Sample:
    """A sample of random tokens whose second half is trained."""
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= length // 2
    ids = random.integers(3, base.info.vocab_size, length).astype(np.int32)
    advantages = np.where(mask, random.standard_normal(), 0).astype(np.float32)
    return Sample(ids, mask, np.where(mask, -6, 0).astype(np.float32), advantages, np.zeros(length, np.int32))


def in_whole_numbers(base: LoraModel) -> bool:
    """Whether cuts and orders of an adapter's samples change no bit of its gradient."""
    return base.kernels is not None and base.kernels.whole_sums


def gradients(
    base: LoraModel, weights: Mapping[str, AdapterWeights], batches: Sequence[Sequence[Segment]]
) -> list[Tensor]:
    """The gradient of each adapter over all batches, in the order of `weights`."""
    sums, flat = dict[str, UnitSums](), dict[str, Tensor]()
    for name, own in weights.items():
        if in_whole_numbers(base):
            sums[name] = UnitSums.empty(own.layout.size, base.device)
        else:
            flat[name] = torch.zeros(own.layout.size, device=base.device)
    for segments in batches:
        learning = [
            Learning(
                weights[segment.adapter],
                weights[segment.adapter].layout.matrices(flat[segment.adapter]) if segment.adapter in flat else None,
                sums=sums.get(segment.adapter),
            )
            for segment in segments
        ]
        whole(PackedPass(base, Batch(tuple(segments)), share=True).train(learning))
    return [sums[name].flat if name in sums else flat[name] for name in weights]


def gradient_questions(base: LoraModel, shape: str, lengths: Sequence[int] = LENGTHS) -> int:
    """Print a figure for each question; returns how many gradients differ that should not, or are zero."""
    weights = {f"adapter-{seed}": new_adapter(base, rank, seed) for seed, rank in enumerate(RANKS)}
    samples = {
        name: tuple(sample(base, length, 100 * seed + index) for index, length in enumerate(lengths))
        for seed, name in enumerate(weights)
    }

    def segment(name: str, own: Sequence[Sample]) -> Segment:
        return Segment(name, tuple(own), Reinforce(), float(sum(lengths)))

    def alone() -> list[Tensor]:
        return [
            found
            for name, own in weights.items()
            for found in gradients(base, {name: own}, [[segment(name, samples[name])]])
        ]

    first = alone()
    company = [segment(name, samples[name]) for name in reversed(weights)]
    cut = [[segment(name, [example])] for name, own in samples.items() for example in own]
    turned = [[segment(name, own[::-1])] for name, own in samples.items()]
    total = 0
    for question, found, promised in (
        ("twice", alone(), True),
        ("in company", gradients(base, weights, [company]), True),
        ("cut into single samples", gradients(base, weights, cut), in_whole_numbers(base)),
        ("whose samples come in another order", gradients(base, weights, turned), in_whole_numbers(base)),
    ):
        count = sum(not torch.equal(gradient, other) for gradient, other in zip(found, first, strict=True))
        say(unequal(f"{shape}: gradients of adapters, {question}", count, len(first), executor_of(base)))
        total += count * promised
    return total + sum(not bool(gradient.any()) for gradient in first)
