"""From the groups of a step to what is trained: advantages, samples, denominators, micro-batches. Pure functions.

Everything here looks at one job's own rollouts only, and at the whole step before it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.algorithms.advantages import advantages, normalisation, select_groups
from motet.algorithms.packing import cut
from motet.algorithms.presets import Algorithm
from motet.config import JobConfig
from motet.errors import JobFailed
from motet.tasks.episode import to_sample
from motet.types import FloatArray, Group, Rollout, Sample, Segment, shared_prompts


@dataclass(frozen=True)
class StepBatch:
    """What one step trains."""

    samples: tuple[Sample, ...]
    """In data order; samples that cannot have a gradient (advantage 0 and no KL term) are left out."""
    weights_S: FloatArray
    denominator: float
    """Of the complete step, samples without a gradient included."""
    groups: int
    """Groups that entered the advantages."""

    def segments(self, job: str, algorithm: Algorithm, temperature: float, budget: int) -> tuple[Segment, ...]:
        """Cut into micro-batches of at most `budget` tokens: a function of these samples alone."""
        spec, lengths = algorithm.loss_spec(temperature), [sample.n_tokens for sample in self.samples]
        return tuple(
            Segment(
                job,
                tuple(self.samples[index] for index in part),
                spec,
                self.denominator,
                self.weights_S[part.start : part.stop],
            )
            for part in cut(lengths, budget, shared_prompts(self.samples))
        )

    def with_logprobs(self, field: str, logprobs: Sequence[FloatArray]) -> StepBatch:
        """The same batch with `reference_logprobs` or `proximal_logprobs` filled in."""
        filled = [
            replace(sample, **{field: values})  # type: ignore[arg-type]
            for sample, values in zip(self.samples, logprobs, strict=True)
        ]
        return replace(self, samples=tuple(filled))


def check_failures(groups: Sequence[Group], limit: float) -> None:
    """Stop a job whose rollouts mostly fail.

    Raises:
        JobFailed: with the commonest reason.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error]
    if rollouts and len(errors) > limit * len(rollouts):
        commonest = max(sorted(set(errors)), key=errors.count)
        raise JobFailed(
            f"{len(errors)} of {len(rollouts)} rollouts have no reward (limit: algorithm.max_failed_fraction = {limit:g}). "
            f"The commonest reason: {commonest}"
        )


def make_step_batch(groups: Sequence[Group], config: JobConfig, algorithm: Algorithm) -> StepBatch:
    """Advantages of the groups and the samples that carry them.

    A group with fewer than two scored rollouts is dropped. With oversampling, the first `groups_per_step` groups that have a
    signal are kept.
    """
    usable = [group for group in groups if len(group.scored) >= 2]
    if config.algorithm.oversampling > 1:
        usable = list(select_groups(usable, config.algorithm.groups_per_step))
    values = advantages([[rollout.reward for rollout in group.scored] for group in usable], algorithm.advantage)
    pairs: list[tuple[Rollout, float]] = []
    for group, group_advantages in zip(usable, values, strict=True):
        pairs.extend(zip(group.scored, (float(value) for value in group_advantages), strict=True))
    if config.algorithm.mask_truncated:
        pairs = [(rollout, value) for rollout, value in pairs if not rollout.truncated]
    lengths = [int(rollout.loss_mask.sum()) for rollout, _ in pairs]
    weights_S, denominator = normalisation(lengths, algorithm.reduction, config.sampling.max_tokens)
    kept = [
        index for index, (_, value) in enumerate(pairs) if lengths[index] > 0 and (value != 0 or algorithm.kl_coef > 0)
    ]
    samples = tuple(to_sample(*pairs[index]) for index in kept)
    return StepBatch(samples, weights_S[kept], denominator, len(usable))


def group_metrics(groups: Sequence[Group]) -> dict[str, float | int | Mapping[str, float]]:
    """What rollouts alone tell about a step or an evaluation."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if not rollout.error]
    rewards = np.array([rollout.reward for rollout in scored], np.float64)
    parts: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.reward_parts.items():
            parts.setdefault(name, []).append(value)
    lengths = [int(rollout.loss_mask.sum()) for rollout in scored]
    return {
        "reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward_std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward_parts": {name: float(np.mean(values)) for name, values in sorted(parts.items())},
        "length": float(np.mean(lengths)) if lengths else float("nan"),
        "truncated": float(np.mean([rollout.truncated for rollout in scored])) if scored else float("nan"),
        "rollouts": len(rollouts),
        "failed": len(rollouts) - len(scored),
    }
