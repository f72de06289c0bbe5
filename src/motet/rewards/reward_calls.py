"""Calls of rewards, in the process that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import resource
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from motet.core.errors import RewardError
from motet.process import wall
from motet.process.own_code import describe
from motet.rewards import mathematics
from motet.rewards import reward_messages as m
from motet.rewards.reward_answers import Answer, Logs
from motet.rewards.reward_forms import Asked, LoadedReward, alone, scored
from motet.rewards.reward_loading import OWN, resolve
from motet.workers.worker_limits import LOAD_CPU_SECONDS, WorkerLimits, over_limit, seed_random

MESSAGES = m.LoadRewards | m.ScoreCompletions
_LOADING_MB = 4096
"""Limit of address space while loading behind a wall."""
_SHARED_MB = 1 << 20
"""The same of a process for all jobs, each of whose calls has its own limit."""
_LOADING = (30.0, 1024)
"""Limits of loading one of Motet's own rewards there: CPU seconds and MB."""
_WAITS_SECONDS = 0.5
"""Time from which on a call that waits is worth more processes."""
_SPARE_MB = 256
"""Memory for the process itself between calls."""
PRINTED = 1 << 24
"""Bytes of the log to which code that others sent may print."""
_NICE = 5


def answer_call(rewards: Sequence[LoadedReward], limits: WorkerLimits, request: m.ScoreCompletions) -> m.Scores:
    """Score the completions of one request."""
    reward, asked = rewards[request.reward], _asked(request)
    seed_random(zlib.crc32(json.dumps([request.problem.id, request.completions]).encode()))
    given = ("reward", request.cpu_seconds, request.memory_mb)

    def call() -> list[float | BaseException | None]:
        # None of a batched reward (TRL's signature): it does not apply
        values = _raw_values(reward, asked)
        return [None if value is None and reward.batched else _number(value) for value in values]

    outcomes, error, exceeded = limits.run(call, *given)
    if outcomes and any(isinstance(outcome, MemoryError) for outcome in outcomes):
        exceeded = "memory"
        error = over_limit(exceeded, *given)
    if outcomes is None or error:
        outcomes = [ValueError()] * len(request.completions)
    values = [outcome if isinstance(outcome, float) else None for outcome in outcomes]
    errors = [error or _reason(outcome) if isinstance(outcome, BaseException) else "" for outcome in outcomes]
    logged = [asked.logs.of(place) for place in range(len(values))]
    metrics, extra = [one for one, _ in logged], [one for _, one in logged]
    return m.Scores(
        values=values,
        errors=errors,
        failed=bool(error),
        exceeded=exceeded,
        metrics=metrics if any(metrics) else [],
        extra=extra if any(extra) else [],
    )


def _answer_shared(limits: WorkerLimits, request: m.ScoreCompletions) -> m.Scores:
    """Score each completion alone by the reward that comes with them; one that hits a limit is the last.

    Nothing is remembered of earlier calls that could change a score.
    """
    source, n, found = request.source, len(request.completions), m.Scores(values=[], errors=[], failed=False)
    assert source is not None

    def load() -> LoadedReward | str:
        try:
            return resolve(source.name, source.args)
        except RewardError as error:
            return str(error)

    reward, error, exceeded = limits.run(load, "reward", *_LOADING)
    if not isinstance(reward, LoadedReward):
        why = reward or error
        return m.Scores(values=[None] * n, errors=[why] * n, failed=False, exceeded=exceeded, refused=why)
    limits.grow()
    if source.name == "math":
        mathematics.forget()
    for place in range(n):
        scores = answer_call([reward], limits, request.only(place))
        if place and scores.exceeded == "memory":  # asked again first, in a fresh process
            break
        values, errors = found.values + scores.values, found.errors + scores.errors
        found = m.Scores(values=values, errors=errors, failed=False, exceeded=scores.exceeded)
        if scores.exceeded:
            break
    return found


def _asked(request: m.ScoreCompletions) -> Asked:
    def of(values: Sequence[Any], place: int, without: Any) -> Any:
        return values[place] if values else without

    answers = [
        Answer(text, of(request.parts, n, None), of(request.transcripts, n, ()), of(request.shown, n, ("", "")))
        for n, text in enumerate(request.completions)
    ]
    return Asked(request.problem, answers, request.state, Logs(len(answers)))


def _raw_values(reward: LoadedReward, asked: Asked) -> list[Any]:
    if reward.batched:
        values = reward.call(asked)
        if reward.is_async:
            values = _loop().run_until_complete(values)
        n, returned = len(asked.answers), type(values).__name__
        if (listed := scored(values, asked)) is not None:
            return listed
        with contextlib.suppress(TypeError):
            if not isinstance(values, str | bytes | Mapping):
                returned = f"{len(values)} value{'' if len(values) == 1 else 's'}"
        # Not the fault of one completion: called for each alone, it could return a list of one, which looks right.
        return [ValueError(f"returned {returned}, not a list of {n} numbers, one for each completion")] * n
    calls = [reward.call(replace(asked, answers=[answer])) for answer in asked.answers]
    values = _loop().run_until_complete(_together(calls)) if reward.is_async else calls
    return [alone(value, asked.logs, place) for place, value in enumerate(values)]


async def _together(calls: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the whole process: clients and locks of async rewards belong to a loop."""
    global _event_loop  # noqa: PLW0603
    if _event_loop is None:
        _event_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(_event_loop)
    return _event_loop


_event_loop: asyncio.AbstractEventLoop | None = None


# Types that people return for a number, and what the number is.
_INSTEAD: dict[type, str] = {
    str: ", such as float(text)",
    tuple: ", which is one of its values",
    list: ", which is one of its values; a function with `completions` returns one for each",
    dict: ", which is one of its values; a function with verl's `solution_str` may return a dictionary with `score`",
}


def _number(value: Any) -> float | BaseException:
    """A finite float, or an error that describes the value."""
    if isinstance(value, BaseException):
        return value
    if value is None:
        return ValueError("returned None, not a number: return 0.0 for no reward; a path without `return` gives None")
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        return ValueError(
            f"returned {type(value).__name__}, not a number: return a float{_INSTEAD.get(type(value), '')}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return ValueError(f"returned {type(value).__name__} that is not a number: {describe(error)}")
    return number if math.isfinite(number) else ValueError(f"returned {number}, not a finite number")


def _reason(outcome: BaseException) -> str:
    text = str(outcome) if type(outcome) is ValueError else ""
    return text if text.startswith("returned ") else describe(outcome)


def _load_sent(request: m.LoadRewards) -> list[LoadedReward]:
    """Load code that others sent: behind the wall, without threads, and within the limits of a call."""
    os.nice(_NICE)  # others' engines and rewards come first
    with contextlib.suppress(OSError):  # and where memory is short, this process ends, not they
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    wall.enter(2 * (_SPARE_MB + request.memory_mb), most_written=PRINTED, threads=False)

    def find() -> list[LoadedReward]:
        return [
            resolve(sent.name, sent.args, OWN.find(sent.name, sent.code), request.scorer, request.columns)
            for sent in request.rewards
        ]

    loaded, error, _ = WorkerLimits().run(find, "reward", LOAD_CPU_SECONDS, request.memory_mb)
    if loaded is None:
        raise RewardError(error)
    wall.limit_memory(_SPARE_MB + request.memory_mb)
    return loaded


def _load(request: m.LoadRewards) -> list[LoadedReward]:
    functions = [_function(source) for source in request.rewards]
    if request.walled:
        wall.enter(_LOADING_MB + request.memory_mb)
    loaded = [
        resolve(source.name, source.args, function, request.scorer, request.columns)
        for source, function in zip(request.rewards, functions, strict=True)
    ]
    if any(reward.is_async for reward in loaded):
        _loop()
    if request.walled:
        wall.limit_memory(_SPARE_MB + request.memory_mb)
    return loaded


def _function(source: m.RewardSource) -> Any:
    """A user's function; None for a reward of Motet."""
    if source.pickled is None:
        return OWN.find(source.name) if ":" in source.name else None
    try:
        # The bytes come from the process of the function's owner, over a private pipe.
        return pickle.loads(source.pickled)  # noqa: S301
    except Exception as error:  # unpickling imports and runs the function's modules
        raise RewardError(f"reward {source.name!r} cannot be unpickled: {describe(error)}") from error


def load(first: m.LoadRewards) -> tuple[m.RewardsLoaded, Callable[[m.ScoreCompletions], m.Scores]]:
    """Load rewards: files of functions before entering the wall, a job's arguments after it.

    Raises RewardError if one cannot be loaded, WallError if it has to be loaded behind a wall and there is none.
    """
    sys.path[:] = first.import_path
    load_own = _load_sent if first.of_others else _load
    rewards = load_own(first) if first.rewards else []  # those of Motet come with their calls
    limits = WorkerLimits()
    if first.walled and not rewards:
        wall.enter(_SHARED_MB)

    def answer(request: m.ScoreCompletions) -> m.Scores:
        idle, used = _idle_seconds(), _used_seconds()
        reply = answer_call(rewards, limits, request) if rewards else _answer_shared(limits, request)
        waited = _idle_seconds() - idle
        return structs.replace(reply, waits=waited > max(_WAITS_SECONDS, _used_seconds() - used))

    together = tuple(reward.batched or reward.is_async for reward in rewards)
    sees_all = tuple(reward.sees_all for reward in rewards)
    compares, waits = tuple(reward.compares for reward in rewards), any(reward.is_async for reward in rewards)
    tokens, state = tuple(reward.reads_tokens for reward in rewards), tuple(reward.reads_state for reward in rewards)
    return m.RewardsLoaded(together, sees_all, compares, waits, tokens, state), answer


def _idle_seconds() -> float:
    """A clock that stands still while this process or its children compute, or wait for a processor.

    It does not run where the system does not tell, and behind a wall, from where there is nothing to wait for.
    """
    try:
        with open("/proc/self/schedstat", "rb") as file:
            running, queued = (int(part) / 1e9 for part in file.read().split()[:2])
    except OSError:
        return 0.0
    return time.monotonic() - max(_used_seconds(), running) - queued


def _used_seconds() -> float:
    """Seconds of the processor that this process and its children had."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
