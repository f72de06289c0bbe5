"""Diagnoses that the answers of a few groups can show: those of `motet check`, and of a job's newest steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NO_SIGNAL = 0.75
"""Share of groups without signal: above it, most of the sampled tokens teach nothing. A healthy start is below one half."""
NEAR = 0.75
"""How near the mean reward is to the highest one seen where little is left to learn, as a part of the range of rewards."""
CUT_OFF = 0.5
"""Share of answers that end at `max_tokens`: above it, rewards mostly judge answers that have no end."""
FORM_FIRST = "teach the form first, on rows with answers (algorithm: sft)"


@dataclass
class Earned:
    """What the answers of a job earned, over all its steps."""

    seen: tuple[float, float] | None = None
    """The lowest and the highest reward of an answer, where a line knows them."""
    parts: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Of each part of the reward: the lowest and the highest mean of a step, and the number of steps."""

    def see(self, line: Mapping[str, Any]) -> None:
        """Take in the next step's line."""
        if known := line.get("reward_range"):
            lowest, highest = self.seen or known
            self.seen = min(lowest, known[0]), max(highest, known[1])
        parts = line.get("reward_parts")
        for name, value in parts.items() if isinstance(parts, Mapping) else ():
            if isinstance(value, int | float) and math.isfinite(value):
                lowest, highest, steps = self.parts.get(name, (value, value, 0))
                self.parts[name] = min(lowest, value), max(highest, value), steps + 1

    def never(self, weights: Mapping[str, float], least: int, what: str = "steps") -> str:
        """Where a part of a summed reward was earned in none of at least so many lines, which the sum does not show."""
        never = [
            f"part {name} was {highest:g} in all {steps} {what}"
            for name, (lowest, highest, steps) in self.parts.items()
            if weights.get(name, 0) > 0 and lowest == highest <= 0 and steps >= least
        ]
        if not never or sum(bool(weight) for weight in weights.values()) < 2:
            return ""
        return (
            f"{' and '.join(never)}: only the rest of the reward is learned; unless it only takes away, {FORM_FIRST}, take "
            "easier problems, or give partial rewards"
        )


def is_near(reward: float, seen: tuple[float, float]) -> bool:
    """Whether a mean reward is near the highest seen; `seen` are the lowest and the highest reward of an answer."""
    lowest, highest = min(seen[0], 0.0), seen[1]
    return reward - lowest >= NEAR * (highest - lowest)


def no_signal(
    share: float, reward: float, spread: float, algorithm: Mapping[str, Any], seen: tuple[float, float] | None = None
) -> str:
    """A warning if most groups teach nothing.

    Args:
        share: of the groups whose rewards are all equal.
        reward: the mean over all groups.
        spread: the standard deviation over all groups.
        algorithm: the job's; a baseline of the whole step, a critic and a teacher learn from such groups too.
        seen: the lowest and the highest reward of an answer so far, where they are known.
    """
    over_groups = algorithm.get("advantage") in ("batch_baseline", "none") or algorithm.get("critic")
    if algorithm.get("teacher") or (over_groups and spread > 0):
        return ""
    if not share >= NO_SIGNAL or math.isnan(reward):  # where no answer has a reward, that is the trouble
        return ""
    says = f"no signal in {share:.0%} of the groups (mean reward {reward:.2g}"
    larger = f"raise algorithm.group_size{it_is(algorithm.get('group_size'))}"
    if seen is None:
        return f"{says}): too hard or too easy for this base; take other problems, give partial rewards, or {larger}"
    if not is_near(reward, seen):
        return (
            f"{says}, far below the highest seen, {seen[1]:.2g}): too hard for this base; take easier problems, give partial "
            f"rewards, or {larger}"
        )
    if seen[1] <= 0 and math.isclose(*seen, abs_tol=1e-9):
        return f"{says}): no answer got more; {FORM_FIRST}, take easier problems, or give partial rewards"
    return (
        f"{says}, near the highest seen, {seen[1]:.2g}): too easy, or no answer earns what is left; take harder problems, or "
        f"{FORM_FIRST}"
    )


def in_thought(inside: float, answers: float, truncated: float, sampling: Mapping[str, Any]) -> str:
    """A warning if most answers end inside their thought, so that they say nothing.

    Args:
        inside: how many of them.
        answers: number of answers.
        truncated: share of answers that end at `max_tokens`.
        sampling: the job's; a string of `stop` ends a thought too.
    """
    if not answers or not inside >= CUT_OFF * answers:
        return ""
    ends = f"{inside:.0f} of {answers:.0f} answers end inside the thought"
    if not truncated >= CUT_OFF * inside / answers:
        if sampling.get("stop"):
            return f"{ends}, where a string of sampling.stop may stand: they say nothing; leave out sampling.stop"
        return f"{ends} and stop there: they say nothing; train on rows with whole thoughts first (algorithm: sft)"
    most = it_is(sampling.get("max_tokens"))
    return f"{ends}: they say nothing that a reward could judge; raise sampling.max_tokens{most}"


def it_is(value: object) -> str:
    """The present value of a field, where it is known."""
    return f" (it is {value:g})" if isinstance(value, int | float) else ""
