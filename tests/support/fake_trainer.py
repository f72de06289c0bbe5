"""A trainer without torch: `FakeTrainer` trains the fake base's adapters with exact policy gradients and AdamW, in numpy.

Rewards really rise, and a wrong sample changes the weights, so tests of the surrounding code can compare bytes. Use it
for pipelines, commits and resumption, not for claims about neural networks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from motet.algorithms.policy_gradient import PolicyGradient
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Batch, LossStats, Optimizer, OptimStats, Sample, Segment, Trained
from motet.core.errors import AdapterError
from motet.core.types import FloatArray
from tests.support.fake_base import (
    VOCABULARY,
    FakeAdapter,
    FakePolicy,
    Vector,
    read_adapter,
    read_tensors,
    write_adapter,
    write_files,
)

OPTIMIZER = "optimizer.safetensors"


@dataclass
class _Slot:
    """One adapter and AdamW's state."""

    adapter: FakeAdapter
    gradient: Vector = field(default_factory=lambda: np.zeros(VOCABULARY))
    first: Vector = field(default_factory=lambda: np.zeros(VOCABULARY))
    second: Vector = field(default_factory=lambda: np.zeros(VOCABULARY))
    count: int = 0


class FakeTrainer:
    """A `Trainer` over the fake base, of at most `slots` adapters; a forward pass blocks the device for `seconds`."""

    def __init__(self, *, slots: int = 16, seconds: float = 0.0) -> None:
        self.slots = slots
        self.batches: list[tuple[str, ...]] = []
        """The adapters of each trained batch, one name per segment."""
        self._seconds = seconds
        self._slots: dict[str, _Slot] = {}

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        """Take a slot for a new adapter; a head is refused, because it needs hidden states."""
        if head:
            raise AdapterError("the fake base has no hidden states for a critic")
        if name in self._slots or len(self._slots) >= self.slots:
            raise AdapterError(f"adapter {name!r} is there already, or all {self.slots} slots are taken")
        self._slots[name] = _Slot(FakeAdapter.fresh(shape.rank, shape.alpha, seed))

    def remove_adapter(self, name: str) -> None:
        """Release the slot."""
        self._slot(name)
        del self._slots[name]

    def weights(self, name: str) -> FakeAdapter:
        """The version in use; immutable."""
        return self._slot(name).adapter

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        """Add the gradient of each segment to its adapter; sums and logprobs of each."""
        time.sleep(self._seconds)
        self.batches.append(tuple(segment.adapter for segment in batch.segments))
        stats = [self._learn(segment, self._slot(segment.adapter)) for segment in batch.segments]
        return tuple(map(Trained, stats, self._logprobs(batch, base=False)))

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        """Logprobs [T] per sample per segment, no gradient; `base=True` disables the adapters (the KL reference)."""
        time.sleep(self._seconds)
        return self._logprobs(batch, base=base)

    def _logprobs(self, batch: Batch, *, base: bool) -> tuple[tuple[FloatArray, ...], ...]:
        of_segments = []
        for segment in batch.segments:
            policy = FakePolicy(None if base else self._slot(segment.adapter).adapter)
            logprobs = [policy.logprobs(sample.token_ids, segment.temperature) for sample in segment.samples]
            masks = [sample.loss_mask for sample in segment.samples]
            of_segments.append(
                tuple(np.where(mask, some, np.float32(0)) for some, mask in zip(logprobs, masks, strict=True))
            )
        return tuple(of_segments)

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        """Clip, step and clear the gradient of one adapter; the next version can then be published."""
        adamw = optimizer
        assert isinstance(adamw, AdamW)
        slot, lr = self._slot(name), adamw.lr
        gradient, slot.gradient = slot.gradient, np.zeros(VOCABULARY)
        norm = float(np.sqrt((gradient**2).sum()))
        if not np.isfinite(norm):
            return OptimStats(norm, lr, skipped=True)
        gradient = gradient * min(1.0, adamw.clip_norm / max(norm, 1e-12))
        beta_1, beta_2 = adamw.betas
        slot.count += 1
        slot.first = beta_1 * slot.first + (1 - beta_1) * gradient
        slot.second = beta_2 * slot.second + (1 - beta_2) * gradient**2
        update = slot.first / (1 - beta_1**slot.count)
        update = update / (np.sqrt(slot.second / (1 - beta_2**slot.count)) + adamw.eps)
        decayed = slot.adapter.b * (1 - lr * adamw.weight_decay)
        slot.adapter = replace(slot.adapter, b=decayed - lr * update)
        return OptimStats(norm, lr, skipped=False)

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
        """Write the adapter under PEFT's file names, with `optimizer` also the optimizer's state; the directory exists."""
        slot = self._slot(name)
        write_adapter(directory, slot.adapter)
        if optimizer:
            state = {
                "first": slot.first,
                "second": slot.second,
                "count": np.array([slot.count]),
                "gradient": slot.gradient if gradient else np.zeros(VOCABULARY),
            }
            write_files(directory, {OPTIMIZER: save(state)})

    def load_adapter(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read what `save_adapter` wrote.

        Raises:
            AdapterError: missing, damaged, or of another shape.
        """
        slot, adapter = self._slot(name), read_adapter(directory)
        if (adapter.rank, adapter.alpha) != (slot.adapter.rank, slot.adapter.alpha):
            raise AdapterError(f"{directory} has rank {adapter.rank} and alpha {adapter.alpha:g}; set adapter to these")
        state = read_tensors(directory / OPTIMIZER) if optimizer else None
        slot.adapter = adapter
        if state is not None:
            slot.first, slot.second, slot.count = state["first"], state["second"], int(state["count"][0])
            slot.gradient = state["gradient"]

    def _slot(self, name: str) -> _Slot:
        if name not in self._slots:
            raise AdapterError(
                f"there is no adapter {name!r} in the trainer; there are: {', '.join(self._slots) or 'none'}"
            )
        return self._slots[name]

    def _learn(self, segment: Segment, slot: _Slot) -> LossStats:
        """The unclipped surrogate −A · ratio, plus the k3 penalty to the base if configured."""
        policy, total = FakePolicy(slot.adapter), LossStats()
        scale = slot.adapter.scale * slot.adapter.a
        for sample in segment.samples:
            with np.errstate(all="ignore"):  # an overflow shows in the gradient's norm
                stats, gradient = _sample_gradient(policy, segment, sample)
                slot.gradient = slot.gradient + scale * gradient
            total = total + stats
        return total


def _sample_gradient(policy: FakePolicy, segment: Segment, sample: Sample) -> tuple[LossStats, Vector]:
    """Statistics of one sample, and the gradient [V] of its weighted loss by the logit shift.

    The loss is the unclipped surrogate −A · ratio with the k3 penalty to the base, or cross entropy.
    """
    temperature = segment.temperature
    places = np.flatnonzero(sample.loss_mask)
    logprobs = policy.logprobs(sample.token_ids, temperature)[places].astype(np.float64)
    advantages, sampler = sample.advantages[places].astype(np.float64), sample.logprobs[places].astype(np.float64)
    ratios = np.exp(logprobs - sampler)
    kl_base, kl_tokens = 0.0, 0
    if isinstance(segment.loss, PolicyGradient):
        losses, slopes = -advantages * ratios, -advantages * ratios
        if sample.reference_logprobs is not None:
            gap = sample.reference_logprobs[places].astype(np.float64) - logprobs
            k3 = np.exp(gap) - gap - 1
            kl_base, kl_tokens = float(k3.sum()), len(places)
            coef = segment.loss.kl.coef
            losses, slopes = losses + coef * k3, slopes + coef * (1 - np.exp(gap))
    else:
        losses, slopes = -logprobs, -np.ones(len(places))
    weights = (np.ones(len(places)) if sample.weights is None else sample.weights[places]) / segment.denominator
    losses, slopes = losses * weights, slopes * weights
    gradient, entropy = np.zeros(VOCABULARY), 0.0
    for place, slope in zip(places, slopes, strict=True):
        row = policy.row(int(sample.token_ids[place - 1]), temperature)
        probabilities = np.exp(row)
        entropy -= float((probabilities * row).sum())
        gradient -= slope * probabilities
        gradient[sample.token_ids[place]] += slope
    stats = LossStats(
        tokens=len(places),
        loss=float(losses.sum()),
        entropy=entropy,
        ratio=float(ratios.sum()),
        ratio_max=float(ratios.max(initial=0.0)),
        kl_sampler=float((ratios - 1 - (logprobs - sampler)).sum()),
        kl_base=kl_base,
        kl_base_tokens=kl_tokens,
        logprob_gap=float(np.abs(logprobs - sampler).max(initial=0.0)),
    )
    return stats, gradient / temperature
