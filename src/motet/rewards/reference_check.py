"""Asks rewards about reference answers: a reward that is deaf to the right answer is told before a job learns from it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Problem
from motet.data.dataset import Dataset
from motet.rewards.reward_answers import ScoreOutcome, columns_of
from motet.rewards.reward_elsewhere import ELSEWHERE, labels_of
from motet.rewards.reward_loading import SCORER
from motet.rewards.reward_pool import RewardPool
from motet.rewards.rewards import BUILTIN, NEED_AN_ANSWER

WRONG = "xyzzy"
"""An answer that is right nowhere."""
CHECKED, NOTED = 24, 8
"""Most rows that `motet check` asks about, and those of a note on a job."""
_NOTED_SECONDS = 10.0
_FORMED = "regex"
"""The reward whose pattern says what stands around the reference."""


async def check(
    pool: RewardPool, job: str, rewards: Sequence[RewardConfig], data: Dataset, named: str | None, ask: bool
) -> list[str]:
    """What is wrong with a job's rewards, one sentence each; those that are scored elsewhere take part if `ask`."""
    kept = [own for own in rewards if own.weight and (ask or own.function is not None or own.name not in ELSEWHERE)]
    return await _asked(pool, job, rewards, kept, data, named, CHECKED)


async def note(
    pool: RewardPool, job: str, rewards: Sequence[RewardConfig], data: Dataset, named: str | None
) -> list[str]:
    """As `check`, by Motet's own rewards alone, on a few rows and for ten seconds."""
    hear = ("exact", "contains")  # whatever the reference is, so that no process is started for them
    kept = [reward for reward in rewards if reward.weight and _reads_reference(reward) and reward.name not in hear]
    kept = [reward.model_copy(update={"cpu_seconds": min(reward.cpu_seconds, 1.0)}) for reward in kept]
    return await _asked(pool, job, rewards, kept, data, named, NOTED)


def _reads_reference(reward: RewardConfig) -> bool:
    """Whether a reward of Motet compares with the reference answer; of others that is not known."""
    if reward.function is not None or reward.name not in (*BUILTIN, SCORER):
        return False
    args = json.dumps(reward.args, default=str)
    return (
        reward.name in (*NEED_AN_ANSWER, SCORER) or "{answer}" in args or (reward.name == "grader" and "item." in args)
    )


async def _asked(
    pool: RewardPool, job: str, rewards: Sequence[RewardConfig], kept: Sequence[RewardConfig], data: Dataset,
    named: str | None, most: int,
) -> list[str]:  # fmt: skip
    rows = [data.train[place] for place in range(0, len(data.train), max(1, len(data.train) // most))][:most]
    rows = [problem for problem in rows if problem.answer.strip()]
    known = [_reads_reference(reward) or reward.name in ELSEWHERE for reward in kept]
    mine = [reward for reward, reads in zip(kept, known, strict=True) if not reads and reward.name not in BUILTIN]
    if not rows or not (any(known) or mine):
        return []
    name, columns = f"{job}.reference", columns_of(data.train, data.holdout, named=named)
    alike = [reward.model_copy(update={"weight": 1.0}) for reward in kept]
    try:
        await pool.register(name, alike, data.scorer, None, columns, job)
    except RewardError:
        return []  # told where the job itself loads them
    outcomes, ends = list[list[ScoreOutcome]](), time.monotonic() + _NOTED_SECONDS
    try:
        for problem in rows:
            boxed = (
                [f"\\boxed{{{problem.answer.strip()}}}"]
                if mine or any(reward.name == "math" for reward in kept)
                else []
            )
            texts = [problem.answer, *boxed, WRONG]
            outcomes.append(await pool.score(name, problem, texts))
            if most == NOTED and time.monotonic() > ends:
                break
    finally:
        await pool.unregister(name)
    told, labels = list[str](), labels_of(kept)
    for label, reward, reads in zip(labels, kept, known, strict=True):
        if reads:  # a box is for mathematics
            part = slice(None, None, 1 if reward.name == "math" or len(outcomes[0]) < 3 else 2)
            given = [[outcome.parts.get(label) for outcome in row[part]] for row in outcomes]
            told += _told(f"the reward {label}", rows, given, outcomes, formed=reward.name == _FORMED)
    if (mine or len(kept) > 1) and len(kept) == sum(bool(reward.weight) for reward in rewards):
        weights = [reward.weight for reward in kept]
        sums = [[_sum(outcome.parts, labels, weights) for outcome in row] for row in outcomes]
        who = "the sum of the rewards" if len(kept) > 1 else f"the reward {labels[0]}"
        told += _told(who, rows, sums, outcomes, formed=any(reward.name == _FORMED for reward in kept))
    return told


def _sum(parts: Mapping[str, float], labels: Sequence[str], weights: Sequence[float]) -> float | None:
    if any(label not in parts for label in labels):
        return None
    return sum(weight * parts[label] for label, weight in zip(labels, weights, strict=True))


def _told(
    who: str,
    rows: Sequence[Problem],
    given: Sequence[Sequence[float | None]],
    outcomes: Sequence[Sequence[ScoreOutcome]],
    *,
    formed: bool,
) -> list[str]:
    """Sentences about what a reward gave to the reference as text, the reference in a box, and the wrong text.

    With `formed`, the reward wants more around the reference, so that it may give 0 to the reference alone.
    """
    deaf, fooled, failing = list[Problem](), list[float](), list[tuple[Problem, str]]()
    for problem, values, row in zip(rows, given, outcomes, strict=False):
        *right, wrong = values
        best = max((value for value in right if value is not None), default=None)
        if wrong is None or best is None:
            failing.append(
                (problem, next((answer.error for answer in reversed(row) if answer.error), "it gave no score"))
            )
        elif best <= 0 and best <= wrong:
            deaf.append(problem)
        elif 0 < best <= wrong:
            fooled.append(wrong)
    n = len(given)
    told = []
    if deaf and not formed:
        told.append(f"{who} gives the reference answer 0 in {len(deaf)} of {n} rows, as {deaf[0].answer!r:.80}")
    if fooled:
        told.append(f"{who} gives the nonsense answer {WRONG!r} {fooled[0]:g} in {len(fooled)} of {n} rows")
    if failing:
        problem, why = failing[0]
        told.append(f"{who} fails in {len(failing)} of {n} rows, as row {problem.id + 1}: {why:.300}")
    return told
