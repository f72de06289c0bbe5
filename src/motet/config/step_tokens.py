"""The tokens of a step: the most that a job's may have, and the limit on them (`limits.step_tokens`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.algorithms.client import ClientDriven
from motet.algorithms.kto import Kto
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.rows import RowAlgorithm
from motet.config.job import JobConfig
from motet.core.errors import LimitError

Integers = NDArray[np.integer]
_RAISED = "an admin raises it with motet tenants limit --step-tokens"
MOST_BYTES, _LEAST_OF_A_ROW = 2**26, 2**11
"""Most bytes of the rows, as JSON, that a job's steps or an evaluation have in memory at once; and what a short row counts."""


@dataclass
class StepLimits:
    """The most tokens of a step on a host."""

    usual: int = 0
    """What the base does in ten minutes (`hosts.base_speed`); 0 if it is not known."""
    given: dict[str, int | Literal["auto"] | None] = field(default_factory=dict)
    """By tenant; those without have no limit."""

    def of(self, tenant: str) -> int | None:
        """The most tokens of a step of a tenant's jobs; None if there is no limit."""
        most = self.given.get(tenant)
        return self.usual or None if most == "auto" else most


def tokens_of_step(
    job: JobConfig, longest: int = 0, context: int = 0, held_out: int | None = None, judged: int = 0
) -> tuple[int, int]:
    """The most tokens of a step, and those of the evaluation beside it.

    Each rollout counts with its prompt as often as it is sampled or trained, and judging by the base. Rewards, references and
    values are not counted apart: they take a pass without a gradient over the same tokens.

    Args:
        job: a job that samples, learns from rows, or is driven by a client, whose commands are counted one by one.
        longest: tokens of its longest prompt, or the most of a row in all its examples; 0 before its data is read.
        context: tokens of the base's longest sequence, which all turns of a rollout have together; 0 if it is not known.
        held_out: its held-out rows; None before its data is read.
        judged: tokens that the base reads and writes to judge a rollout.
    """
    algorithm, held_out = job.algorithm, job.data.held_out_of(None) if held_out is None else held_out
    if isinstance(algorithm, ClientDriven):
        return 0, 0
    if isinstance(algorithm, RowAlgorithm):
        row = max(1, longest) * (1 + isinstance(algorithm, Kto))  # the next row's answer is paired with its prompt too
        return algorithm.rows_per_step * row, held_out * row
    assert isinstance(algorithm, PolicyGradient)
    rollout = int(min(longest + job.environment.turns * job.sampling.max_tokens, context or math.inf))
    n, width = algorithm.groups_per_step, round(algorithm.groups_per_step * algorithm.oversampling)
    sampled = math.ceil(width * algorithm.over_provision) * (rollout + judged)
    return algorithm.group_size * (sampled + n * rollout * passes(job)), held_out * job.eval.n * (rollout + judged)


def passes(job: JobConfig) -> int:
    """How often a step trains on its rollouts."""
    return job.rl.updates * (1 if job.rl.needs_values is None else 2)


def check_step(
    job: JobConfig, most: int, longest: int = 0, context: int = 0, held_out: int | None = None, judged: int = 0
) -> None:
    """Raise LimitError if a step may have more than `most` tokens; the message has the number that fits."""
    trained, evaluated = tokens_of_step(job, longest, context, held_out, judged)
    if trained + evaluated <= most:
        return
    rows = isinstance(job.algorithm, RowAlgorithm)
    name = "rows_per_step" if rows else "groups_per_step"
    fits = (most - evaluated) * getattr(job.algorithm, name) // trained
    held_out_fields = "data.holdout" if rows else "data.holdout, eval.n or sampling.max_tokens"
    lower = f"algorithm.{name}: {fits} fits" if fits > 0 else f"lower {held_out_fields}"
    beside = f", {evaluated} of these in its evaluation" if evaluated else ""
    raise LimitError(
        f"step_tokens: a step of this job has up to {trained + evaluated} tokens{beside}, and {most} may be in a step here; "
        f"{lower}, or {_RAISED}",
        403,
    )


def check_decoded(job: JobConfig, sizes_N: Integers, held_out_N: Integers) -> None:
    """Raise LimitError if rows that are decoded at once are too large; the message has the number that fits.

    Args:
        job: a job whose steps take the largest rows, at worst.
        sizes_N: bytes of the rows that it is trained on.
        held_out_N: bytes of those that it holds out.
    """
    algorithm = job.algorithm
    if isinstance(algorithm, RowAlgorithm):
        name, n, of_each = "rows_per_step", algorithm.rows_per_step, 1.0
    else:
        assert isinstance(algorithm, PolicyGradient)
        name, n = "groups_per_step", algorithm.groups_per_step
        of_each = (algorithm.lag + 1) * algorithm.oversampling * algorithm.over_provision
    if len(sizes_N):
        _check_fits(f"algorithm.{name}", n, math.floor(_most_rows(sizes_N) / of_each))
    if len(held_out_N):
        _check_fits("data.holdout", len(held_out_N), _most_rows(held_out_N))


def _check_fits(name: str, wanted: int, fits: int) -> None:
    if fits < wanted:
        cure = f"set it to {fits}" if fits else "lower algorithm.max_off_policy_steps"
        raise LimitError(
            f"{name} is {wanted}, and a job's rows that are in memory at once may have {MOST_BYTES >> 20} MB here; "
            f"{cure}, or leave large columns out of the data",
            403,
        )


def _most_rows(sizes_N: Integers) -> int:
    """How many of the largest rows fit; passes over few rows begin anew."""
    totals = np.cumsum(np.maximum(np.sort(sizes_N)[::-1], _LEAST_OF_A_ROW))
    passes, rest = divmod(MOST_BYTES, int(totals[-1]))
    return passes * len(totals) + int(np.searchsorted(totals, rest, "right"))


def check_calls(job: JobConfig, purpose: str, tokens: int, most: int) -> str:
    """Why no more may be read and sampled for a step or an evaluation after so many tokens; empty if more may."""
    if tokens * (1 + (purpose == "train") * passes(job)) <= most:
        return ""
    fields = "algorithm.groups_per_step" if purpose == "train" else "data.holdout or eval.n"
    return (
        f"step_tokens: the calls of a step's rollouts have read and sampled {tokens} tokens, and {most} may be in a step here, "
        f"training on them included; let calls continue earlier ones, lower {fields}, or {_RAISED}"
    )


def check_command(tokens: int, before: int, most: int) -> str:
    """Why a client's gradient of so many tokens, times their targets, may not follow others of its step; empty if it may."""
    if before + tokens <= most:
        return ""
    done = f" after {before} in this step: call optim_step before it, or" if before and tokens <= most else ":"
    return f"step_tokens: {tokens} tokens{done} send at most {most} for a step; {_RAISED}"
