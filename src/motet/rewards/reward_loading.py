"""Loads the rewards that a job names: built-in ones, `file.py:function`, `module:function`, or a function object.

Runs in reward processes. The forms of functions are in `reward_forms`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from motet.core.errors import RewardError
from motet.data.reasoning import ScorerSpec, build_scorer
from motet.process.own_code import OwnCode
from motet.rewards.reward_answers import Answer
from motet.rewards.reward_forms import LoadedReward, adapted
from motet.rewards.rewards import BUILTIN, READS_PART, check_args

SCORER = "scorer"
NO_SCORER = "only reasoning-gym:NAME data has a scorer; name a reward, such as `exact`"
OWN = OwnCode("reward", RewardError, (*BUILTIN, SCORER))


def resolve(
    name: str,
    args: Mapping[str, Any],
    function: Any = None,
    scorer: ScorerSpec | None = None,
    columns: Collection[str] | None = None,
) -> LoadedReward:
    """Find the function, an object or that of a name, and determine how to call it.

    Args:
        name: of a built-in reward, of code, or `scorer`.
        args: keyword arguments of the job.
        function: the object, if it is not found by name.
        scorer: that of the data, if any.
        columns: those that every row has, if they are known.

    Raises:
        RewardError: nothing has that name, it does not load, its parameters fit no form, or it asks for what no row has.
    """
    if function is None and name == SCORER:
        if scorer is None:
            raise RewardError(NO_SCORER)
        return _reading(adapted(build_scorer(scorer), args, name), "speech")
    if function is None and name in BUILTIN:
        if name == "math":
            importlib.import_module("math_verify")  # slow to import, and must not use the first completion's CPU time
        return built_in(name, args)
    return adapted(OWN.find(name) if function is None else function, args, name, columns)


def built_in(name: str, args: Mapping[str, Any]) -> LoadedReward:
    """A reward that ships with Motet. Raises RewardError if its arguments are wrong."""
    loaded = adapted(BUILTIN[name], args, name)
    try:
        check_args(name, args)
    except Exception as error:  # args may hold anything, such as an invalid pattern
        raise RewardError(f"reward {name!r}: args {dict(args)}: {error}") from error
    return _reading(loaded, args.get("of", "text") if name in READS_PART else "speech")


def _reading(loaded: LoadedReward, of: str) -> LoadedReward:
    """The reward, with a part of the answer as its text."""
    call = loaded.call
    return replace(loaded, call=lambda asked: call(replace(asked, answers=[Answer(asked.answers[0].part(of))])))
