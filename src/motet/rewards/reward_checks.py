"""Checks of a job's rewards before anything is loaded: their arguments, and whether the data has what they read."""

from __future__ import annotations

from collections.abc import Sequence

from motet.config import RewardConfig
from motet.core.errors import DataError, RewardError
from motet.core.nested import MISSING, names_of, value_at
from motet.data.dataset import Dataset
from motet.rewards import judge_http, reward_elsewhere
from motet.rewards.numbers import last_number
from motet.rewards.reward_forms import adapted
from motet.rewards.reward_loading import NO_SCORER, OWN, SCORER, built_in
from motet.rewards.reward_walls import Walls
from motet.rewards.reward_workers import load_request
from motet.rewards.rewards import BUILTIN, NEED_AN_ANSWER


def check_rewards(rewards: Sequence[RewardConfig], columns: Sequence[str] | None) -> bool:
    """Whether a process must load a person's code. Raises RewardError if a reward is wrong, and says what to do."""
    own, here = False, []
    for reward in rewards:
        if reward.function is None and reward.name in reward_elsewhere.ELSEWHERE:
            if reward.name == "worker":
                raise reward_elsewhere.needs_a_service(reward.name)
            (judge_http if reward.name == "judge" else reward_elsewhere).check(reward)
            continue
        if reward.function is not None:
            adapted(reward.function, reward.args, reward.name, columns)
        elif ":" in reward.name:
            own = True
        elif reward.name in BUILTIN:
            built_in(reward.name, reward.args)
        elif reward.name != SCORER:
            OWN.find(reward.name)
        Walls().around(reward)
        here.append(reward)
    if here:
        load_request(here, None, walled=False)
    return own


def check_answers(rewards: Sequence[RewardConfig], data: Dataset, source: str) -> None:
    """Raise DataError or RewardError if data lacks what rewards read, and say what and where."""
    named = [reward.name for reward in rewards if reward.function is None]
    if SCORER in named and data.scorer is None:
        raise RewardError(NO_SCORER)
    needy = [name for name in named if name in NEED_AN_ANSWER]
    if needy and not any(problem.answer for problem in data.train):
        columns = ", ".join(names_of(data.train[0].metadata)) or "none"
        raise DataError(
            f"reward {needy[0]!r} compares with a reference answer, and no row of {source} has one; name its column in "
            f"data.answer (other columns: {columns}), or take another reward"
        )
    if "numeric" in named and all(last_number(problem.answer) is None for problem in data.train):
        raise DataError(
            f"reward 'numeric' compares numbers, and no answer of {source} has one, such as {data.train[0].answer!r:.80}; "
            f"name a column with numbers in data.answer (columns: {', '.join(names_of(data.train[0].metadata))}), write them "
            "in digits, or take another reward"
        )
    for reward in rewards:
        column = str(reward.args.get("column", "tests"))  # args may hold anything
        if (
            reward.name == "code"
            and reward.function is None
            and not any(value_at(row.metadata, column) not in (None, MISSING, "", []) for row in data.train)
        ):
            raise DataError(
                f"reward 'code': no row of {source} has tests in the column {column!r:.80}; name theirs in args (column: …; "
                f"the columns: {', '.join(names_of(data.train[0].metadata)) or 'none'})"
            )
