"""From what a job names to something that scores: built-in, `file.py:function`, `module:function`, or a function.

Runs in reward processes. Two ways of writing a reward are understood, told apart by parameter names:

    def score(problem, completion) -> float                      # ours, sync or async
    def score(prompts, completions, **columns) -> list[float]    # TRL's, https://huggingface.co/docs/trl/rewards
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from motet.errors import RewardError
from motet.tasks.reasoning import ScorerSpec, build_scorer
from motet.tasks.rewards import BUILTIN, check_args
from motet.types import Problem

SCORER = "scorer"
# What TRL passes besides columns. Tokens are not for rewards here; the trainer's state is None, as before training.
_TRL_ONLY = ("completion_ids", "prompt_ids", "prompts_ids")


class RewardSource(Protocol):
    """The fields of a `RewardConfig` that say which function it is."""

    @property
    def name(self) -> str:
        """Built-in name, `file.py:function` or `module:function`."""
        ...

    @property
    def args(self) -> Mapping[str, Any]:
        """Keyword arguments."""
        ...

    @property
    def function(self) -> Any:
        """A function object, which wins over the name."""
        ...


@dataclass(frozen=True)
class LoadedReward:
    """A reward that is ready to be called."""

    call: Callable[[Problem, Sequence[str]], Any]
    """Raw values, one per completion; for `async def` an awaitable of one value for one completion."""
    batched: bool
    """Takes all completions of a problem in one call (TRL's signature)."""
    is_async: bool


def resolve(source: RewardSource, scorer: ScorerSpec | None = None) -> LoadedReward:
    """Find the function and look at how it wants to be called.

    Raises:
        RewardError: nothing has that name, it does not load, or its parameters fit neither signature.
    """
    if source.function is not None:
        return adapted(source.function, source.args, source.name)
    if source.name == SCORER:
        if scorer is None:
            raise RewardError("only reasoning-gym:NAME data has a scorer of its own; name a reward, such as `exact`")
        return adapted(build_scorer(scorer), source.args, source.name)
    if source.name in BUILTIN:
        loaded = adapted(BUILTIN[source.name], source.args, source.name)
        try:
            check_args(source.name, source.args)
        except Exception as error:  # a pattern that is none, a type that does not compare: whatever args may hold
            raise RewardError(f"reward {source.name!r}: args {dict(source.args)}: {error}") from error
        if source.name == "math":
            importlib.import_module("math_verify")  # slow to import: not on the first completion's CPU time
        return loaded
    return adapted(find(source.name), source.args, source.name)


def find(name: str) -> Any:
    """The function that `file.py:function` or `module:function` names.

    Raises:
        RewardError: there is none, or its file does not load.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        known = [*BUILTIN, SCORER]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(
            f"there is no reward {name!r}: {hint}Built in are {', '.join(known)}; "
            "your own is `file.py:function` or `module:function`"
        )
    module = load_file(place) if place.endswith(".py") else _load_module(place)
    found = functools.reduce(lambda value, part: getattr(value, part, None), attribute.split("."), module)
    if found is None:
        functions = [item for item, value in vars(module).items() if callable(value) and not item.startswith("_")]
        near = difflib.get_close_matches(attribute, functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(functions) or 'no functions'}"
        raise RewardError(f"reward {name!r}: {place} has no function {attribute!r}{hint}")
    return found


def load_file(place: str) -> Any:
    """The module that a file of rewards makes.

    Raises:
        RewardError: it is not there, or does not load.
    """
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise RewardError(f"reward file {place!r} does not exist (looked for {path}, from where motet was started)")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file may import its neighbours
    spec = importlib.util.spec_from_file_location(f"motet_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward file {place!r} does not load: {describe(error, str(path))}") from error
    return module


def _load_module(place: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        hint = "A module must be installed, or lie where motet was started"
        raise RewardError(f"reward module {place!r} does not load: {describe(error)}. {hint}") from error


def adapted(function: Any, args: Mapping[str, Any], name: str) -> LoadedReward:
    """A function with its arguments, ready to be called.

    Raises:
        RewardError: it is no function, or its parameters fit neither signature.
    """
    if not callable(function):
        raise RewardError(f"reward {name!r} is {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]  # written in C: taken at its word
    called = function if inspect.isfunction(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    if "completions" in parameters:
        return LoadedReward(_trl_call(function, parameters, args, name), True, is_async)
    by_name = _by_name(parameters, name)

    def call(problem: Problem | None, completion: str) -> Any:
        if by_name:
            return function(problem=problem, completion=completion, **args)
        return function(problem, completion, **args)

    try:
        if parameters:
            given = ((), {"problem": None, "completion": ""}) if by_name else ((None, ""), {})
            inspect.signature(function).bind(*given[0], **given[1], **args)
    except TypeError as error:
        raise RewardError(
            f"reward {name!r} takes {_wanted_args(parameters) or 'no args'}, the job gives {dict(args) or 'none'}: {error}. "
            f"Write them as `{{name: {name}, args: {{…}}}}`. A reward is a function of (problem, completion) and its args that "
            "returns a number, or TRL's, of (prompts, completions) and columns, that returns a list of numbers"
        ) from error
    return LoadedReward(lambda problem, completions: call(problem, completions[0]), False, is_async)


def _by_name(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Whether problem and completion are given by their names, in whatever order a function has them.

    Raises:
        RewardError: one of the two names stands where the other is given.
    """
    both = [parameters.get(word) for word in ("problem", "completion")]
    if all(one is not None and one.kind is not one.POSITIONAL_ONLY for one in both):
        return True
    first, second = (*parameters, "", "")[:2]
    if first == "completion" or second == "problem":
        raise RewardError(
            f"reward {name!r} takes ({first}, {second}), but a reward gets the problem first and then the completion: swap "
            "them, or call them `problem` and `completion`, which may stand in any order"
        )
    return False


def _wanted_args(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The arguments after problem and completion, those without a default first."""
    own = list(parameters.values())[2:]
    return ", ".join(item.name + ("" if item.default is item.empty else f"={item.default!r}") for item in own)


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


def describe(error: BaseException, file: str = "") -> str:
    """One line for a person: what was raised and, where known, in which line of the reward's file."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [place for place in frames if place[0] == file] or [place for place in frames if not place[0].startswith("<")]
    line = f" ({own[-1][0]}:{own[-1][1]})" if own and not isinstance(error, ImportError) else ""
    try:
        text = " ".join(str(error)[:500].split())
    except Exception:  # an exception of the user's whose __str__ fails
        text = ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{line}"
