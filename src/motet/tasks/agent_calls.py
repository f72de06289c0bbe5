"""Calls of an agent, in the process that runs it: many episodes at once.

An agent is a user's function, `async` or not, with any of the parameters `problem`, `base_url`, `api_key`, `deadline`,
`seed` and the job's `args`. It returns a number, rewards by the ids of calls, or None.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from motet.process.own_code import describe
from motet.tasks import environment_messages as m

_THREADS = 256
"""Most agents that run at once and are not coroutines."""


def answering(
    agent: Callable[..., Any], args: Mapping[str, Any]
) -> Callable[[m.RunAgent], Coroutine[Any, Any, m.AgentReturned]]:
    """What answers the calls of an agent."""
    threads = ThreadPoolExecutor(_THREADS, "motet-agent")

    async def answer(request: m.RunAgent) -> m.AgentReturned:
        try:
            return await _run(agent, args, request, threads)
        except asyncio.CancelledError:  # nobody waits for it, but each call has a reply
            return m.AgentReturned(error="was stopped")

    return answer


async def _run(
    agent: Callable[..., Any], args: Mapping[str, Any], request: m.RunAgent, threads: ThreadPoolExecutor
) -> m.AgentReturned:
    offered = {
        "problem": request.problem,
        "base_url": request.base_url,
        "api_key": request.api_key,
        "deadline": request.deadline,
        "seed": request.seed,
        **args,
    }
    thread: Future[Any] | None = None
    try:
        async with asyncio.timeout(max(0.0, request.deadline - time.time())) as time_left:
            call = functools.partial(agent, **_taken(agent, offered))
            if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
                returned = await call()
            else:
                returned = await asyncio.wrap_future(thread := threads.submit(_called, call))
        if time_left.expired():  # it was interrupted, but continued
            raise TimeoutError
        reward, rewards = _reward(returned)
        return m.AgentReturned(reward, rewards)
    except BaseException as error:  # whatever an agent raises, or the end of its time
        me = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and me is not None and me.cancelling():
            raise  # nobody waits for it
        if isinstance(error, TimeoutError) and time.time() >= request.deadline:
            hangs = thread is not None and thread.running()
            return m.AgentReturned(error=m.LATE, late=True, hangs=hangs)
        return m.AgentReturned(error=describe(error))


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as error:  # no future takes it: its rollout would wait until the end of its time
        raise RuntimeError("agent raised StopIteration").with_traceback(error.__traceback__) from error


def _taken(agent: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(agent).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _reward(returned: Any) -> tuple[float | None, dict[str, float]]:
    if returned is None:
        return None, {}
    if isinstance(returned, Mapping):
        return None, {str(name): _number(value) for name, value in returned.items()}
    return _number(returned), {}


def _number(value: Any) -> float:
    number = float(value) if hasattr(value, "__float__") and not isinstance(value, str) else math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"returned {value!r:.80}: an agent returns a finite number, rewards by the ids of calls, or None"
        )
    return number
