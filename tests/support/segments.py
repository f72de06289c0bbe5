"""What trainers are tested with: samples, segments, steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet.algorithms import Reinforce
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Batch, Loss, Sample, Segment
from motet.core.types import SamplingParams
from motet.model.distribution import Distribution, draw
from motet.model.lora_model import LoraModel
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny

SHAPES = {  # name: rank, alpha, prompt and completion lengths; trained together, each of another kind
    "a": (8, 16.0, [(5, 30), (40, 9), (1, 1)]),
    "b": (8, 4.0, [(17, 53)]),
    "c": (3, 32.0, [(2, 5), (2, 6), (30, 40), (9, 1)]),
}


LR = 1e-3
ADAMW = AdamW(LR, eps=1e-4, clip_norm=0.5, weight_decay=0.1)


def make_samples(lengths: Sequence[tuple[int, int]], seed: int) -> tuple[Sample, ...]:
    numbers = np.random.default_rng(seed)
    found = []
    for place, (prompt, completion) in enumerate(lengths):
        mask = np.arange(prompt + completion) >= prompt
        found.append(
            Sample(
                token_ids=tiny.tokens(prompt + completion, seed=100 * seed + place).numpy().astype(np.int32),
                loss_mask=mask,
                logprobs=(numbers.uniform(-6, -4, len(mask)) * mask).astype(np.float32),
                advantages=(numbers.normal(size=len(mask)) * mask).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return tuple(found)


SAMPLE_TYPES = ("int32", "bool", "float32", "float32", "int32", "float32")
"""Of tokens, mask, logprobs, advantages, versions and weights."""


def types(sample: Sample) -> tuple[str, ...]:
    """Types of the arrays that every sample has."""
    weights = np.ones(0, np.float32) if sample.weights is None else sample.weights
    arrays = (sample.token_ids, sample.loss_mask, sample.logprobs, sample.advantages, sample.versions, weights)
    return tuple(str(array.dtype) for array in arrays)


REINFORCE = Reinforce()


def branching_samples(prompt: int, seed: int) -> tuple[Sample, ...]:
    """A rollout of three branches, each of which leaves the one before at another place, and a second rollout of the problem.

    What an earlier branch trains is read by later ones, and the second rollout begins with the tokens that the first sampled.
    """
    first, *others = make_samples([(prompt, 40), (prompt, 30), (prompt, 21), (prompt, 33)], seed=seed)
    samples, parted = [first], (prompt + 25, prompt + 9, prompt + 12)
    for other, place in zip(others, parted, strict=True):
        token_ids = np.concatenate([samples[-1].token_ids[:place], other.token_ids[place:]])
        token_ids[place] = (samples[-1].token_ids[place] + 1) % 50
        trained = other.loss_mask & (np.arange(other.n_tokens) >= (prompt if other is others[-1] else place))
        samples.append(replace(other, token_ids=token_ids, loss_mask=trained))
    return tuple(samples)


def make_segment(name: str, loss: Loss = REINFORCE, temperature: float = 0.8) -> Segment:
    samples = make_samples(SHAPES[name][2], seed=ord(name))
    return Segment(name, samples, loss, float(sum(sample.n_trainable for sample in samples)), temperature)


def long_batch(names: str) -> Batch:
    """About 340 rows for each adapter, in sequences of all lengths: with three, several blocks for each of four threads."""
    found, numbers = [], np.random.default_rng(0)
    for name in names:
        lengths = [(int(n), int(n) + 7) for n in numbers.integers(2, 50, 6)]
        found.append(Segment(name, make_samples(lengths, seed=ord(name)), REINFORCE, 500.0))
    return Batch(tuple(found))


def make_trainer(
    base: LoraModel,
    names: str = "abc",
    *,
    recompute: bool = False,
    kept_tokens: int | None = None,
    targets: str | list[str] = "all-linear",
    inputs: Path | None = None,
) -> TorchTrainer:
    """Adapters whose B is random, so that both halves have gradients."""
    trainer = TorchTrainer(base, slots=8, kept_tokens=0 if recompute else kept_tokens, inputs=inputs)
    for name in names:
        rank, alpha, _ = SHAPES[name]
        trainer.add_adapter(name, AdapterConfig(rank=rank, alpha=alpha, target_modules=targets), seed=ord(name))
        inside.arena(trainer, name).set_masters(
            tiny.adapter_masters(base, rank=rank, seed=ord(name), targets=targets)[1]
        )
    return trainer


def gradient(trainer: TorchTrainer, name: str) -> torch.Tensor:
    return inside.arena(trainer, name).gradient.clone()


def masters(trainer: TorchTrainer, name: str) -> torch.Tensor:
    return inside.arena(trainer, name).masters.detach().clone()


def run_steps(trainer: TorchTrainer, batches: Sequence[Batch], steps: int = 2) -> dict[str, Any]:
    """Everything a job can see of its training."""
    seen: dict[str, list[Any]] = {}
    for _ in range(steps):
        for batch in batches:
            for segment, (forward, trained) in zip(
                batch.segments, zip(trainer.forward(batch), trainer.forward_backward(batch), strict=True), strict=True
            ):
                logprobs = [some.tobytes() for some in trained.logprobs]
                assert logprobs == [some.tobytes() for some in forward]
                seen.setdefault(segment.adapter, []).extend([trained.stats, logprobs])
        for name, found in seen.items():
            found.append(gradient(trainer, name).numpy().tobytes())
            found.append(trainer.optim_step(name, ADAMW))
            found.append(masters(trainer, name).numpy().tobytes())
    return seen


def sampler_logprobs(base: LoraModel, weights: Any, sample: Sample, temperature: float) -> np.ndarray[Any, Any]:
    """What the sampler would have noted: the token is forced by the uniform number in the middle of its share."""
    logits = tiny.packed_logits(base, [(weights, torch.from_numpy(sample.token_ids).long())])[0]
    places = np.flatnonzero(sample.loss_mask)
    found = np.zeros(sample.n_tokens, np.float32)
    for place in places:
        rows = logits[place - 1].expand(4, -1)
        token = int(sample.token_ids[place])
        probs = torch.softmax(rows[0].double() / temperature, -1)
        middle = float(torch.cumsum(probs, 0)[token] - probs[token] / 2)
        params = [SamplingParams(temperature=temperature)] * 4
        drawn = draw if base.math is None else base.math.draw
        tokens, logprobs, _ = drawn(rows, params, torch.full((4,), middle, dtype=torch.float64))
        if int(tokens[0]) != token:  # too unlikely for its share to be hit
            assert probs[token] < 1e-5
            logprobs = Distribution.of(rows, [temperature], base.math).logprobs(torch.full((4,), token))
        found[place] = logprobs[0]
    return found


def plain_loss(model: Any, segment: Segment) -> torch.Tensor:
    """What a segment of `REINFORCE` loses, in plain PyTorch."""
    total = torch.zeros(())
    for sample in segment.samples:
        ids = torch.from_numpy(sample.token_ids).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / segment.temperature
        logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(sample.loss_mask)[1:]
        advantages = torch.from_numpy(sample.advantages)[1:][mask]
        total = total - (advantages * logprobs[mask]).sum() / segment.denominator
    return total
