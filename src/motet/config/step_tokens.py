"""The most tokens that a step of a job may have. `limits.step_tokens` limits this number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from motet.algorithms.client import ClientDriven
from motet.algorithms.kto import Kto
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.rows import RowAlgorithm
from motet.config.job import JobConfig
from motet.core.errors import LimitError

_RAISED = "an admin raises it with motet tenants limit --step-tokens"


@dataclass(frozen=True)
class StepTokens:
    """The most tokens of a step."""

    field: str
    """The field of the algorithm that the number is proportional to."""
    units: int
    """Its value."""
    trained: int
    """Prompts that are read, and what is sampled and trained."""
    evaluated: int
    """Of the evaluation of held-out problems beside it."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.trained + self.evaluated

    def check(self, most: int) -> None:
        """Raise LimitError if there are more than `most`; the message has the number that fits."""
        if self.total <= most:
            return
        fits = (most - self.evaluated) * self.units // self.trained if self.trained else 0
        rows = "data.holdout" if self.field == "rows_per_step" else "data.holdout, eval.n or sampling.max_tokens"
        lower = f"algorithm.{self.field}: {fits} fits" if fits > 0 else f"lower {rows}"
        held_out = f", {self.evaluated} of these in its evaluation" if self.evaluated else ""
        raise LimitError(
            f"step_tokens: a step of this job has up to {self.total} tokens{held_out}, and {most} may be in a step here; "
            f"{lower}, or {_RAISED}",
            403,
        )


def tokens_of_step(job: JobConfig, longest: int = 0, context: int = 0, held_out: int | None = None) -> StepTokens:
    """The most tokens of a step: each prompt that is read, each token that is sampled, and each that is trained.

    Rewards, references and values are not counted apart: they take a pass without a gradient over the same tokens.

    Args:
        job: a job that samples, learns from rows, or is driven by a client, whose commands are counted one by one.
        longest: tokens of its longest prompt, or the most of a row in all its examples; 0 before its data is read.
        context: tokens of the base's longest sequence, which all turns of a rollout have together; 0 if it is not known.
        held_out: its held-out rows; None before its data is read.
    """
    algorithm, held_out = job.algorithm, job.data.held_out_of(None) if held_out is None else held_out
    if isinstance(algorithm, ClientDriven):
        return StepTokens("", 0, 0, 0)
    if isinstance(algorithm, RowAlgorithm):
        row = max(1, longest) * (1 + isinstance(algorithm, Kto))  # the next row's answer is paired with its prompt too
        return StepTokens("rows_per_step", algorithm.rows_per_step, algorithm.rows_per_step * row, held_out * row)
    assert isinstance(algorithm, PolicyGradient)
    answers = job.environment.turns * job.sampling.max_tokens
    episode = min(longest + answers, context or math.inf)
    answer = int(min(answers, max(1, episode - longest)))
    width = round(algorithm.groups_per_step * algorithm.oversampling)
    groups, n = math.ceil(width * algorithm.over_provision), algorithm.group_size
    trained = algorithm.groups_per_step * n * int(episode) * algorithm.updates
    trained *= 1 if algorithm.needs_values is None else 2
    sampled = groups * (longest + n * answer)
    evaluated = held_out * (longest + job.eval.n * answer)
    return StepTokens("groups_per_step", algorithm.groups_per_step, sampled + trained, evaluated)


def check_command(tokens: int, before: int, most: int) -> str:
    """Why a client's gradient of so many tokens, times their targets, may not follow others of its step; empty if it may."""
    if before + tokens <= most:
        return ""
    done = f" after {before} in this step: call optim_step before it, or" if before and tokens <= most else ":"
    return f"step_tokens: {tokens} tokens{done} send at most {most} for a step; {_RAISED}"
