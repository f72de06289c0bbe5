"""Loads the rewards that a job names: built-in ones, `file.py:function`, `module:function`, or a function object.

Runs in reward processes. A reward may have one of these forms, which differ by parameter names:

    def score(problem, completion) -> float                      # ours, sync or async; in any order under these names
    def score(problem, completion, transcript) -> float          # with the whole conversation, a list of messages as mappings
    def score(problem, completions) -> list[float]               # ours, all completions of a problem compared
    def score(prompts, completions, **columns) -> list[float]    # TRL's, https://huggingface.co/docs/trl/rewards
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.core.errors import RewardError
from motet.core.near import close_matches
from motet.core.types import Problem
from motet.process.own_code import OwnCode
from motet.tasks.reasoning import ScorerSpec, build_scorer
from motet.tasks.rewards import BUILTIN, check_args

SCORER = "scorer"
NO_SCORER = "only reasoning-gym:NAME data has a scorer; name a reward, such as `exact`"
OWN = OwnCode("reward", RewardError, (*BUILTIN, SCORER))
# Arguments that TRL passes besides columns. Rewards get no tokens here; the trainer's state is None, as before training.
_TRL_ONLY = ("completion_ids", "prompt_ids", "prompts_ids")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class LoadedReward:
    """A reward, ready to be called."""

    call: Callable[..., Any]
    """Raw values, one per completion; for `async def` an awaitable of one value for one completion."""
    batched: bool
    """Takes all completions of a problem in one call (TRL's signature)."""
    is_async: bool
    sees_all: bool = False
    """Takes the transcript too."""
    compares: bool = False
    """Compares the completions of a problem, so it cannot be called for one alone."""


def resolve(name: str, args: Mapping[str, Any], function: Any = None, scorer: ScorerSpec | None = None) -> LoadedReward:
    """Find the function, an object or that of a name, and determine how to call it; `scorer` is that of the data, if any.

    Raises:
        RewardError: nothing has that name, it does not load, or its parameters fit no form.
    """
    if function is None and name == SCORER:
        if scorer is None:
            raise RewardError(NO_SCORER)
        function = build_scorer(scorer)
    elif function is None and name in BUILTIN:
        if name == "math":
            importlib.import_module("math_verify")  # slow to import, and must not use the first completion's CPU time
        return built_in(name, args)
    return adapted(OWN.find(name) if function is None else function, args, name)


def built_in(name: str, args: Mapping[str, Any]) -> LoadedReward:
    """A reward that ships with Motet. Raises RewardError if its arguments are wrong."""
    loaded = adapted(BUILTIN[name], args, name)
    try:
        check_args(name, args)
    except Exception as error:  # args may hold anything, such as an invalid pattern
        raise RewardError(f"reward {name!r}: args {dict(args)}: {error}") from error
    return loaded


def adapted(function: Any, args: Mapping[str, Any], name: str) -> LoadedReward:
    """A function with its arguments, ready to be called; RewardError if it is no function, or its parameters fit no form."""
    if not callable(function):
        raise RewardError(f"reward {name!r} is {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = None  # written in C: its parameters are unknown
    called = function if inspect.isfunction(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    if parameters is None:
        return LoadedReward(lambda problem, completions: function(problem, completions[0], **args), False, is_async)
    if "environments" in parameters and parameters["environments"].default is inspect.Parameter.empty:
        raise RewardError(
            f"reward {name!r} takes environments, which are not where rewards run: leave it out. What the environment's "
            "get_reward() returns counts without a reward, and self.reward where it has neither that nor step"
        )
    if list(parameters)[:2] == ["problem", "completions"] and not any(
        one.kind is one.VAR_KEYWORD for one in parameters.values()
    ):
        _check_args(parameters, args, name)
        return LoadedReward(
            lambda problem, completions: function(problem, list(completions), **args), True, is_async, compares=True
        )
    if "completions" in parameters:
        return LoadedReward(_trl_call(function, parameters, args, name), True, is_async)
    return LoadedReward(_own_call(function, parameters, args, name), False, is_async, "transcript" in parameters)


def _own_call(
    function: Any, parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any], name: str
) -> Callable[[Problem, Sequence[str]], Any]:
    """Pass problem and completion to the parameters of these names or, if one is missing, to the first two parameters."""
    by_name = _by_name(parameters)
    positional = [key for key, value in parameters.items() if value.kind in _POSITIONAL]
    taken = ""
    if positional[:1] == ["completion"] and not by_name:
        taken = "completion first"
    elif positional[1:2] == ["problem"] and not by_name:
        taken = "problem second"
    elif len(positional) < 2 and not by_name and not any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
        taken = ", ".join(positional) or "nothing"
    if taken:
        usual = "def reward(problem, completion), or TRL's def reward(completions, **columns)"
        raise RewardError(f"reward {name!r} takes {taken}; write {usual}")
    _check_args(parameters, args, name)

    def call(problem: Problem, completions: Sequence[str], *transcript: Any) -> Any:
        more = {"transcript": transcript[0], **args} if transcript else args
        if by_name:
            return function(problem=problem, completion=completions[0], **more)
        return function(problem, completions[0], **more)

    return call


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> bool:
    both = [parameters[key] for key in ("problem", "completion") if key in parameters]
    return len(both) == 2 and not any(one.kind is one.POSITIONAL_ONLY for one in both)


def own_parameters(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """The parameters of a reward in Motet's form besides problem and completion."""
    taken = ("problem", "completion") if _by_name(parameters) else tuple(parameters)[:2]
    return {
        key: value
        for key, value in parameters.items()
        if key not in (*taken, "transcript") and value.kind not in (value.VAR_KEYWORD, value.VAR_POSITIONAL)
    }


def _check_args(parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any], name: str) -> None:
    own = own_parameters(parameters)
    missing = [key for key, value in own.items() if value.default is value.empty and key not in args]
    if missing:
        wanted = ", ".join(f"{key}: …" for key in missing)
        raise RewardError(
            f"reward {name!r} needs args that the job does not give: write {{name: {name}, args: {{{wanted}}}}}"
        )
    unknown = [key for key in args if key not in own]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        near = close_matches(unknown[0], own, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(own) or 'none'}"
        raise RewardError(f"reward {name!r} has no argument {unknown[0]!r}; {hint}")


def _trl_call(
    function: Any, parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any], name: str
) -> Callable[[Problem, Sequence[str]], Any]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {key for key, value in parameters.items() if value.default is value.empty and value.kind not in variadic}
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for tokens in _TRL_ONLY:
        if tokens in required:
            raise RewardError(f"reward {name!r} requires {tokens}, but rewards get text, not tokens: give a default")

    def call(problem: Problem, completions: Sequence[str]) -> Any:
        n = len(completions)
        given: dict[str, Any] = {column: [value] * n for column, value in problem.metadata.items()}
        given.setdefault("answer", [problem.answer] * n)
        if problem.conversational:
            prompt: Any = [{"role": message.role, "content": message.content} for message in problem.messages]
            given["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
        else:
            prompt = "\n\n".join(message.content for message in problem.messages)
            given["completions"] = list(completions)
        given |= {"prompts": [prompt] * n, "trainer_state": None, **args}
        missing = required - given.keys()
        if missing:
            columns = ", ".join(problem.metadata)
            raise TypeError(f"it asks for the column {min(missing)!r}; the data's columns are {columns}")
        return function(**{key: value for key, value in given.items() if open_ended or key in parameters})

    return call
