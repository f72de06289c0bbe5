"""What the settings of a job do, where that is not what they seem to do: one sentence each, with the value to set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from motet.algorithms.dapo import Dapo
from motet.algorithms.kto import Kto
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.rows import RowAlgorithm
from motet.config.job import JobConfig
from motet.core.settings import Config

_MANY_PASSES, _FEW_PASSES = 10, 3
"""Passes over the rows from which on they are told, and those that are proposed instead."""
_UNLIKE = 2.0
"""How much more one kind of ratings may weigh than the other; the paper (section 4.2) stays within 4/3."""


def told(config: JobConfig, rows: int, liked: Mapping[bool, int]) -> Iterator[str]:
    """What `motet check` and the notes of a run say of a job's settings.

    Args:
        config: the job.
        rows: how many it trains on.
        liked: for `kto`, how many of them are liked (True) and not.
    """
    algorithm, of_eval = config.algorithm, config.eval
    if isinstance(algorithm, PolicyGradient):
        yield from _of_policy(algorithm)
    if of_eval.n > 1 and (of_eval.temperature == 0 or of_eval.top_k == 1):
        yield f"eval.n: the {of_eval.n} answers to a problem are the same at temperature 0; set eval.n to 1"
    if isinstance(algorithm, RowAlgorithm):
        if fields := [f"sampling.{name}" for name in config.sampling.model_fields_set if _set(config.sampling, name)]:
            yield f"{', '.join(sorted(fields))}: {algorithm.type} samples nothing; leave it out"
        n = algorithm.rows_per_step
        if rows and (passes := config.steps * n / rows) > _MANY_PASSES:
            yield (
                f"steps: {config.steps} steps of {n} rows are {passes:.0f} passes over {rows} rows; set steps to "
                f"{math.ceil(_FEW_PASSES * rows / n)} for {_FEW_PASSES}"
            )
    if isinstance(algorithm, Kto):
        yield from _of_ratings(algorithm, liked.get(True, 0), liked.get(False, 0))


def _set(section: Config, name: str) -> bool:
    """Whether a field was set to another value than its default."""
    return name in section.model_fields_set and getattr(section, name) != type(section).model_fields[name].default


def _of_policy(algorithm: PolicyGradient) -> Iterator[str]:
    kl = algorithm.kl
    if type(algorithm).token_losses is PolicyGradient.token_losses:  # an own loss may read others
        for name in ("clip_low", "clip_high") if algorithm.loss not in ("ppo_clip", "gspo") else ():
            if _set(algorithm, name):
                capped = algorithm.loss == "cispo" and name == "clip_high"
                cure = "set algorithm.importance_cap, the most that a ratio counts" if capped else "leave it out"
                yield f"algorithm.{name}: the loss {algorithm.loss} does not read it; {cure}"
        if _set(algorithm, "importance_cap") and algorithm.loss != "cispo" and not algorithm.correct_sampler:
            yield "algorithm.importance_cap: only cispo and correct_sampler read it; leave it out, or set clip_high"
    if kl.coef == 0 and (fields := [name for name in ("type", "reference") if _set(kl, name)]):
        yield f"algorithm.kl.{fields[0]}: there is no penalty, as algorithm.kl.coef is 0; set it, such as to 0.01"
    if kl.type == "k1":
        yield "algorithm.kl.type: as a penalty k1 adds only noise, its expected gradient is 0; set it to k2 or k3"
    if isinstance(algorithm, Dapo) and algorithm.overlong_buffer and algorithm.oversampling == 1:
        yield (
            "algorithm.oversampling: at 1, groups whose answers are all right or all wrong learn by overlong_buffer to be "
            "short, and nothing else; set it to 1.5 or more"
        )


def _of_ratings(algorithm: Kto, liked: int, disliked: int) -> Iterator[str]:
    n = liked + disliked
    if n and not (liked and disliked):
        yield f"all {n} rows have the label {str(bool(liked)).lower()}: ratings need both; add rows, or learn by sft"
        return
    weights = algorithm.liked_weight * liked, algorithm.disliked_weight * disliked
    if min(weights) * _UNLIKE < max(weights) and min(weights) > 0:
        more, fewer = ("liked", "disliked") if weights[0] > weights[1] else ("disliked", "liked")
        value = getattr(algorithm, f"{fewer}_weight") * max(weights) / min(weights)
        yield (
            f"{liked} of {n} rows are liked, so that {more} ones weigh {max(weights) / min(weights):.1f} times as much; "
            f"set algorithm.{fewer}_weight to {value:.3g}"
        )
