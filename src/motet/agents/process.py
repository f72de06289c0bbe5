"""The process in which an agent runs: `python -m motet.agents.process`. Many episodes run in it at once.

An agent is a user's function, `async` or not, with any of the parameters `problem`, `base_url`, `api_key`, `deadline`,
`seed` and the job's `args`. It returns a number, rewards by the ids of calls, or None.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from motet.agents import messages as m
from motet.core.errors import EnvironmentFault
from motet.process.channel import Parent, ProcessFault
from motet.process.ending import last_words
from motet.process.own_code import OwnCode, describe

OWN = OwnCode("environment", EnvironmentFault, ("single", "retry"))
_THREADS = 256
"""Most agents that run at once and are not coroutines."""


def main() -> None:
    """Load the agent, then run episodes until the input ends."""
    parent: Parent[m.ToProcess] = Parent(m.ToProcess)
    first = parent.first()
    if not isinstance(first, m.LoadAgent):
        return
    sys.path[:] = first.import_path
    try:
        agent = OWN.find(first.name)
    except EnvironmentFault as error:
        parent.send(m.AgentRefused(str(error)))
        return
    parent.send(m.AgentLoaded())
    said = "its input ended"
    try:
        asyncio.run(_serve(parent, agent, first.args))
    except BaseException as error:  # outside an episode, so nobody else reports it
        said = last_words(error)
        raise
    finally:
        with contextlib.suppress(OSError, ValueError):  # usually nobody reads any more
            parent.send(ProcessFault(said))
    sys.stderr.flush()
    # end although threads of agents may still run, and with all that agents started
    os.killpg(os.getpgrp(), signal.SIGKILL)


async def _serve(parent: Parent[m.ToProcess], agent: Callable[..., Any], args: Mapping[str, Any]) -> None:
    requests, running = parent.queue(), dict[int, asyncio.Task[None]]()
    threads = ThreadPoolExecutor(_THREADS, "motet-agent")
    while isinstance(request := await requests.get(), m.RunAgent | m.StopAgent):
        if isinstance(request, m.RunAgent):
            task = running[request.episode] = asyncio.create_task(_run(parent, agent, args, request, threads))
            task.add_done_callback(lambda _, episode=request.episode: running.pop(episode))  # type: ignore[misc]
        elif (unwanted := running.get(request.episode)) is not None:
            unwanted.cancel()


async def _run(
    parent: Parent[m.ToProcess],
    agent: Callable[..., Any],
    args: Mapping[str, Any],
    request: m.RunAgent,
    threads: ThreadPoolExecutor,
) -> None:
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
        parent.send(m.AgentReturned(request.episode, reward, rewards))
    except BaseException as error:  # whatever an agent raises, or the end of its time
        me = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and me is not None and me.cancelling():
            raise  # nobody waits for it
        if isinstance(error, TimeoutError) and time.time() >= request.deadline:
            hangs = thread is not None and thread.running()
            parent.send(m.AgentReturned(request.episode, error=m.LATE, late=True, hangs=hangs))
        else:
            parent.send(m.AgentReturned(request.episode, error=describe(error)))


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


if __name__ == "__main__":
    main()
