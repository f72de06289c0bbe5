"""On-policy distillation: a teacher's probability of each token judges the student's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from motet.algorithms.algorithm import ReferenceServer, StepBatch, is_address
from motet.algorithms.policy_gradient import LossName, OfTokens, PolicyGradient
from motet.core.types import Group


class Distillation(PolicyGradient):
    """The advantage of a token is log teacher − log student: the policy gradient of −KL(student ‖ teacher), token by token.

    Source: generalised knowledge distillation (Agarwal et al. 2024, arXiv 2306.13649) with the reverse KL on the student's
    samples, as MiniLLM (arXiv 2306.08543) and Tinker's recipe take it. Rewards are measured and not learned.
    """

    least_scored: ClassVar[int] = 1
    needs_rewards: ClassVar[bool] = False
    compared_field: ClassVar[str] = "teacher"

    type: Literal["distill"] = "distill"
    teacher: str
    """`base`, a PEFT directory of the same base, or the address of an OpenAI-compatible server that returns
    `prompt_logprobs`, such as vLLM (`http://host:8000`). It must have the tokenizer of the base."""
    teacher_model: str | None = None
    """Name of the model on that server. By default the first that it lists."""
    teacher_key_env: str | None = None
    """Environment variable with the key of that server."""
    loss: LossName = "importance_sampling"
    """The policy loss of a token."""
    group_size: int = Field(4, ge=1, le=10**5)
    """Rollouts of one problem."""

    @model_validator(mode="after")
    def _the_teacher_gives_credit(self) -> Distillation:
        replaced = {"credit": "episode", "advantage": "grpo", "oversampling": 1}
        for field, default in replaced.items():
            if getattr(self, field) != default:
                raise ValueError(f"{field}: the teacher judges each token; leave it out")
        if self.kl.reference != "base" or (self.kl.coef > 0 and self.teacher != "base"):
            raise ValueError("kl: the penalty would be to the teacher, not to another model; leave it out")
        return self

    @property
    def compared_with(self) -> str:
        """The model of reference logprobs."""
        return self.teacher

    @property
    def reference_server(self) -> ReferenceServer | None:
        """The teacher, if it is a server."""
        if not is_address(self.teacher):
            return None
        return ReferenceServer(self.teacher, self.teacher_model, self.teacher_key_env)

    @property
    def needs_reference(self) -> bool:
        """Always: the job learns the teacher's logprobs."""
        return True

    def advantages(self, groups: Sequence[Group], max_tokens: int) -> Sequence[Sequence[OfTokens]]:
        """0 until the teacher's logprobs are known."""
        return [[0.0] * len(group.scored) for group in groups]

    def weighed(self, batch: StepBatch) -> StepBatch:
        """Log teacher − log student of each sampled token."""
        samples = []
        for sample in batch.samples:
            assert sample.reference_logprobs is not None
            gap = np.where(sample.loss_mask, sample.reference_logprobs - sample.logprobs, np.float32(0))
            samples.append(replace(sample, advantages=gap.astype(np.float32)))
        return replace(batch, samples=tuple(samples))
