"""Algorithms that learn from groups of scored rollouts: their settings, their advantages and their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from motet.algorithms.advantages import AdvantageKind, Reduction, advantages, normalisation, select_groups
from motet.algorithms.algorithm import Algorithm, ReferenceName, StepBatch
from motet.algorithms.credit import placed, turn_advantages
from motet.core.batch import LossInputs, Sample, TokenLosses
from motet.core.settings import Config
from motet.core.types import Branch, FloatArray, Group, Rollout

if TYPE_CHECKING:
    from motet.algorithms.critic import CriticConfig

LossName = Literal["ppo_clip", "importance_sampling", "cispo", "gspo", "reinforce"]

OfTokens = float | FloatArray | Sequence[FloatArray]
"""The advantage of a rollout: one for all tokens, one for each token of its only branch [T], or one array for each branch."""

SEQUENCE_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
"""Clip range of sequence ratios, from GSPO's experiments (arXiv 2507.18071, section 5.1)."""


class KLConfig(Config):
    """Penalty that keeps the policy near a reference."""

    coef: float = Field(0.0, ge=0, le=1e6)
    """Weight of the penalty; 0 turns it off. For policies that must keep what the base can do."""
    type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator, after Schulman's note on approximating KL divergence."""
    reference: ReferenceName = "base"
    """What the policy is kept near, and what the metric `kl_base` compares with: `base` (the model without an adapter), `start`
    (the adapter as the job begins with it), or a PEFT directory."""


class PolicyGradient(Algorithm):
    """Reinforcement learning from groups of rollouts.

    Derive your own from this or from an algorithm below. Add fields, and override what differs: `advantages`,
    `token_losses`, or the whole `batch`.
    """

    least_scored: ClassVar[int] = 2
    """The least number of rollouts with a reward that a group needs."""
    compared_field: ClassVar[str] = "kl.reference"

    advantage: AdvantageKind = "grpo"
    """How rewards become advantages: `grpo` divides by the group's standard deviation, `centered` does not."""
    credit: Literal["episode", "return_to_go"] = "episode"
    """What a turn is worth if there are several. `episode`: what the whole rollout is worth. `return_to_go`: the rewards of
    the turn and of later turns, compared with the mean of the group at that turn. A rollout that ended before counts as
    0."""
    discount: float = Field(1.0, gt=0, le=1)
    """With `return_to_go`, a reward is multiplied by this for each turn that it comes later."""
    loss: LossName = "ppo_clip"
    """The policy loss of a token (`gspo`: of a sequence)."""
    reduction: Reduction = "token"
    """What token losses are averaged over: `token`, all tokens of the step; `sequence`, each sequence and then sequences;
    `constant`, `max_tokens` for each answer."""
    group_size: int = Field(8, ge=2, le=10**5)
    """Rollouts of one problem. Raise it for rewards that few answers get."""
    groups_per_step: int = Field(16, ge=1, le=10**6)
    """Problems of one step. Raise it for less noise, lower it for more steps in the same time."""
    max_off_policy_steps: int = Field(0, ge=0, le=10**4)
    """Step s samples from version max(0, s − this value); 0 is on-policy."""
    in_flight: Literal["finish", "continue"] = "finish"
    """What happens to open rollouts when a newer version is ready. `finish`: they finish under their version. `continue`:
    they continue under the new one, and each token keeps its version; the job is then not exact. Needs
    max_off_policy_steps."""
    over_provision: float = Field(1.0, ge=1, le=4)
    """Start this many times the groups of a step, train on the first to finish, and use the rest in the next step. A step
    then does not wait for its slowest answers. The job is then not exact."""
    updates_per_batch: int = Field(1, ge=1, le=10**4)
    """Optimizer updates on each rollout batch. Raise it where sampling takes most of the time."""
    clip_low: float = Field(0.2, ge=0)
    """Ratios below 1 − clip_low get no gradient from negative advantages. The default for the loss `gspo` is 3e-4."""
    clip_high: float = Field(0.28, ge=0)
    """Ratios above 1 + clip_high get no gradient from positive advantages. The default for the loss `gspo` is 4e-4."""
    kl: KLConfig = KLConfig()
    """KL penalty to a reference."""
    importance_cap: float = Field(2.0, gt=0)
    """Upper bound of truncated importance weights and of the ratio of CISPO."""
    correct_sampler: bool = False
    """Truncated importance sampling: correct for a sampler that differs from the trainer (remote engines, staleness)."""
    oversampling: float = Field(1.0, ge=1, le=8)
    """Dynamic sampling: a step has this many times groups_per_step problems and samples them in data order until
    groups_per_step groups have a signal."""
    share_prefixes: bool = False
    """Train shared prefixes of branches, and of rollouts in a group, once. This saves work for agents that rewrite their
    history. Logprobs keep their bits; gradients, and so the bytes of the adapter, agree within rounding."""
    mask_truncated: bool = False
    """Leave answers that reached max_tokens, and episodes that filled the context, out of the loss."""
    max_failed_fraction: float = Field(0.25, ge=0, le=1)
    """The job fails if more than this fraction of the rollouts of a step have no reward. Raise it for rewards on a network."""

    @model_validator(mode="after")
    def _clip_goes_with_the_loss(self) -> PolicyGradient:
        """Set the clip range of sequence ratios, which are geometric means over tokens and stay near 1.

        The fields count as left out, so a copy with another loss has the range of that loss.
        """
        if self.loss == "gspo":
            left_out = {name: value for name, value in SEQUENCE_CLIP.items() if name not in self.model_fields_set}
            self.__dict__.update(left_out)
        return self

    @model_validator(mode="after")
    def _has_newer_versions(self) -> PolicyGradient:
        if self.in_flight == "continue" and self.max_off_policy_steps == 0:
            raise ValueError(
                "in_flight: continue needs max_off_policy_steps of 1 or more: on-policy, no version comes while a "
                "step is sampled"
            )
        return self

    @model_validator(mode="after")
    def _discounts_turns(self) -> PolicyGradient:
        if self.credit == "episode" and self.discount != 1:
            raise ValueError("discount is of rewards of turns: set credit: return_to_go, or leave it out")
        return self

    @property
    def updates(self) -> int:
        """Optimizer steps of each adapter in a step."""
        return self.updates_per_batch

    @property
    def lag(self) -> int:
        """The largest number of versions between the sampled data and the trained version."""
        return self.max_off_policy_steps

    @property
    def same_groups(self) -> bool:
        """Not where a step takes the groups that are done first."""
        return self.over_provision == 1

    @property
    def compared_with(self) -> str:
        """The model of reference logprobs."""
        return self.kl.reference

    @property
    def needs_reference(self) -> bool:
        """Whether samples must carry the reference's logprobs."""
        return self.kl.coef > 0

    @property
    def needs_values(self) -> CriticConfig | None:
        """The critic, which turns the token rewards from `advantages` into advantages; it takes its own slot."""
        return None

    @property
    def keeps_all(self) -> bool:
        """Whether samples without an advantage are trained too: a critic learns from them."""
        return self.needs_reference or self.needs_values is not None

    def companions(self, *, started: bool) -> int:
        """A critic is an additional adapter."""
        return super().companions(started=started) + (self.needs_values is not None)

    @property
    def needs_proximal(self) -> bool:
        """Whether samples must carry the logprobs of the policy at the start of the step."""
        return self.correct_sampler

    def advantages(self, groups: Sequence[Group], max_tokens: int) -> Sequence[Sequence[OfTokens]]:
        """For each scored rollout of each group one advantage, or one for each of its tokens."""
        if self.credit == "return_to_go":
            of_turns = turn_advantages(groups, self.advantage, self.discount)
            return [
                [placed(rollout, own) for rollout, own in zip(group.scored, values, strict=True)]
                for group, values in zip(groups, of_turns, strict=True)
            ]
        rewards = [[rollout.reward for rollout in group.scored] for group in groups]
        return [values.tolist() for values in advantages(rewards, self.advantage)]

    def weighed(self, batch: StepBatch) -> StepBatch:
        """The samples, after they got reference logprobs if `needs_reference` is set."""
        return batch

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Loss of each trainable token of a segment [N], and whether the clip touched it [N]; runs in the trainer."""
        from motet.algorithms.losses import PolicyLoss, policy_losses

        settings = PolicyLoss(
            name=self.loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            importance_cap=self.importance_cap,
            correct_sampler=self.correct_sampler,
            kl_coef=self.kl.coef,
            kl_type=self.kl.type,
        )
        return policy_losses(settings, inputs)

    def batch(self, groups: Sequence[Group], max_tokens: int) -> StepBatch:
        """Make the samples of a step's groups, with advantages, weights and denominator.

        A group with fewer than `least_scored` scored rollouts is dropped. With oversampling, the first `groups_per_step` groups
        that have a signal are kept.
        """
        usable = [group for group in groups if len(group.scored) >= self.least_scored]
        if self.oversampling > 1:
            usable = list(select_groups(usable, self.groups_per_step))
        pairs: list[tuple[Rollout, OfTokens]] = []
        for group, values in zip(usable, self.advantages(usable, max_tokens), strict=True):
            pairs.extend(zip(group.scored, values, strict=True))
        if self.mask_truncated:
            pairs = [(rollout, value) for rollout, value in pairs if not rollout.truncated]
        weights_S, denominator = normalisation([rollout.sampled for rollout, _ in pairs], self.reduction, max_tokens)
        samples = tuple(
            to_sample(branch, value, float(weight))
            for (rollout, of_tokens), weight in zip(pairs, weights_S, strict=True)
            for branch, value in zip(rollout.branches, _of_branches(rollout, of_tokens), strict=True)
            if branch.sampled and (np.any(value) or self.keeps_all)
        )
        return StepBatch(samples, denominator, len(usable), self.share_prefixes)


def _of_branches(rollout: Rollout, of_tokens: OfTokens) -> Sequence[float | FloatArray]:
    if isinstance(of_tokens, float | int | np.ndarray):
        return [of_tokens] * len(rollout.branches)
    return of_tokens


def to_sample(branch: Branch, advantage: float | FloatArray, weight: float = 1.0) -> Sample:
    """A branch as a trainable sequence: every sampled token has the advantage and weight, others have 0."""
    advantages = np.where(branch.loss_mask, np.float32(advantage), np.float32(0)).astype(np.float32)
    weights = None if weight == 1.0 else np.where(branch.loss_mask, np.float32(weight), np.float32(0))
    return Sample(branch.token_ids, branch.loss_mask, branch.logprobs, advantages, branch.versions, weights)
