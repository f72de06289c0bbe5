"""The process in which rewards run: `python -m motet.tasks.reward_process PARENT_PID`, one JSON object a line each way.

First line in: what to load; first line out: `{"together": […]}`, for each reward whether it takes all completions of a
problem in one call, or `{"error": …}`. Then one request, one reply, until the input ends.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import sys
import zlib
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motet import wall
from motet.errors import RewardError, WallError
from motet.own_code import describe
from motet.tasks.reasoning import ScorerSpec
from motet.tasks.reward_loading import OWN, LoadedReward, resolve
from motet.tasks.worker_process import CpuLimitError, Limits, Read, Write, run, seed_random
from motet.types import Message, Problem

if TYPE_CHECKING:
    import asyncio

_LOADING_MB = 4096
"""Address space that loading may take behind a wall."""
_SPARE_MB = 256
"""What the process itself may take between calls."""


@dataclass(frozen=True)
class _Source:
    name: str
    args: Mapping[str, Any]
    function: Any


def answer_call(rewards: Sequence[LoadedReward], limits: Limits, request: Mapping[str, Any]) -> dict[str, Any]:
    """Score the completions of one request.

    Returns `values` and `errors`, one of each per completion (neither where the reward does not apply), `failed` when the call
    as a whole went wrong, and `exceeded` (`cpu` or `memory`) when this process should not be trusted with another call.
    """
    problem = problem_of(request["problem"])
    completions: list[str] = request["completions"]
    reward = rewards[request["reward"]]
    seed_random(zlib.crc32(json.dumps([problem.id, completions]).encode()))
    error, exceeded = "", ""
    outcomes: list[Any] = []
    try:
        with limits.of(request["cpu_seconds"], request["memory_mb"]):
            outcomes = [_outcome(reward, value) for value in _raw_values(reward, problem, request)]
    except CpuLimitError:
        exceeded = "cpu"
    except MemoryError:
        exceeded = "memory"
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # a reward may call sys.exit too
        error = describe(raised)
    if limits.fired:  # also where the reward swallowed the exception and returned something
        exceeded = "cpu"
    if any(isinstance(outcome, MemoryError) for outcome in outcomes):
        exceeded = "memory"
    if exceeded == "cpu":
        error = f"took more than {request['cpu_seconds']:g} s of CPU time (reward field cpu_seconds)"
    elif exceeded == "memory":
        error = f"took more than {request['memory_mb']} MB of memory (reward field memory_mb)"
    if error:
        outcomes = [ValueError()] * len(completions)
    values = [outcome if isinstance(outcome, float) else None for outcome in outcomes]
    errors = [error or _reason(outcome) if isinstance(outcome, BaseException) else "" for outcome in outcomes]
    return {"values": values, "errors": errors, "failed": bool(error), "exceeded": exceeded}


def _raw_values(reward: LoadedReward, problem: Problem, request: Mapping[str, Any]) -> list[Any]:
    completions: list[str] = request["completions"]
    if reward.batched:
        values = reward.call(problem, completions)
        if reward.is_async:
            values = _loop().run_until_complete(values)
        n, returned = len(completions), type(values).__name__
        listed = isinstance(values, Sized) and isinstance(values, Iterable)
        if listed and not isinstance(values, str | bytes | Mapping):
            if len(values) == n:
                return list(values)
            returned = f"{len(values)} value{'' if len(values) == 1 else 's'}"
        # No fault of a single completion: asked about each alone, it could return a list of one and look right.
        return [ValueError(f"returned {returned}, not a list of {n} numbers, one for each completion")] * n
    transcripts: list[Any] = request.get("transcripts") or [()] * len(completions)
    pairs = zip(completions, transcripts, strict=True)
    calls = (reward.call(problem, [text], *[seen] * reward.sees_all) for text, seen in pairs)
    return _loop().run_until_complete(_together(list(calls))) if reward.is_async else list(calls)


async def _together(calls: list[Awaitable[Any]]) -> list[Any]:
    import asyncio

    return await asyncio.gather(*calls, return_exceptions=True)


def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process: async rewards keep clients and locks that belong to theirs."""
    global _event_loop  # noqa: PLW0603
    if _event_loop is None:
        import asyncio  # only where a reward needs it: every replaced process pays for its imports

        _event_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(_event_loop)
    return _event_loop


_event_loop: asyncio.AbstractEventLoop | None = None


def _outcome(reward: LoadedReward, value: Any) -> float | BaseException | None:
    """A number, what is wrong with it, or None: in TRL's signature, that the reward does not apply."""
    return None if value is None and reward.batched else _number(value)


def _number(value: Any) -> float | BaseException:
    """A finite float, or what is wrong with the value."""
    if isinstance(value, BaseException):
        return value
    if value is None:
        return ValueError("returned None, not a number")
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        return ValueError(f"returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return ValueError(f"returned {type(value).__name__} that is not a number: {describe(error)}")
    return number if math.isfinite(number) else ValueError(f"returned {number}, not a finite number")


def _reason(outcome: BaseException) -> str:
    text = str(outcome) if type(outcome) is ValueError else ""
    return text if text.startswith("returned ") else describe(outcome)


def problem_of(value: Mapping[str, Any]) -> Problem:
    """A problem as the parent wrote it (`dataclasses.asdict`)."""
    messages = tuple(Message(**message) for message in value["messages"])
    return Problem(**{**value, "messages": messages})


def load(request: Mapping[str, Any]) -> list[LoadedReward]:
    """Load what the first line asks for. Files of functions are loaded before the wall goes up, what a job gives them after it.

    Raises:
        RewardError: a reward cannot be loaded.
        WallError: it has to be loaded behind a wall, and there is none.
    """
    sys.path[:] = request["sys_path"]
    scorer = ScorerSpec.from_json(request["scorer"]) if request["scorer"] else None
    functions = [_function(item["name"], item["function"]) for item in request["rewards"]]
    if request["wall"]:
        wall.enter(_LOADING_MB + request["memory_mb"])
    loaded = [
        resolve(_Source(item["name"], item["args"], function), scorer)
        for item, function in zip(request["rewards"], functions, strict=True)
    ]
    if any(reward.is_async for reward in loaded):
        _loop()
    if request["wall"]:
        wall.limit_memory(_SPARE_MB + request["memory_mb"])
    return loaded


def _function(name: str, pickled: str | None) -> Any:
    """What somebody wrote themselves; None for a reward that ships with Motet."""
    if pickled is None:
        return OWN.find(name) if ":" in name else None
    try:
        # The bytes come from the process of the person whose function it is, over a private pipe.
        return pickle.loads(base64.b64decode(pickled))  # noqa: S301
    except Exception as error:  # unpickling imports, and runs, what the function stands on
        raise RewardError(f"reward {name!r} cannot be unpickled: {describe(error)}") from error


def serve(read: Read, write: Write) -> None:
    """Load, then answer calls until the input ends."""
    try:
        rewards = load(json.loads(read()))
    except (RewardError, WallError) as error:
        write({"error": str(error)})
        return
    write({"together": [reward.batched or reward.is_async for reward in rewards]})
    limits = Limits()
    while line := read():
        write(answer_call(rewards, limits, json.loads(line)))


if __name__ == "__main__":
    run(serve)
