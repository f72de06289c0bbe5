"""The program in which a user's code runs: `python -m motet.workers.worker MODULE PARENT_PID`.

The module loads what the first message names; then the program sends one reply to each call until the input ends. The
code's output goes to standard error, so it cannot be mistaken for replies, and its input is empty. If a call cannot be
interrupted at its limit (`worker_limits`), the kernel ends the process; if it hangs, the parent does (`worker_link`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from msgspec import structs

from motet.core.errors import EngineError, EnvironmentFault, RewardError, WallError
from motet.process import ending, wall
from motet.process.channel import Parent, ProcessFault
from motet.workers import worker_messages as m

Write = Callable[[m.WorkerMessage, m.WorkerReply], None]
"""Sends the reply to a call."""


def main() -> None:
    """Load, then answer until the input ends; then end with all that the code started."""
    wall.end_with(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process, requests, replies = os.getpid(), os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    calls = import_module(sys.argv[1])
    parent = Parent[m.WorkerMessage](calls.MESSAGES, requests, replies)
    sys.stdout = sys.stderr

    def send(message: m.WorkerReply | ProcessFault) -> None:
        if os.getpid() != process:  # a child that the code forked, which returned here
            os._exit(0)
        parent.send(message)

    def write(request: m.WorkerMessage, reply: m.WorkerReply) -> None:
        try:
            send(structs.replace(reply, call=request.call))
        except EngineError as error:  # too long
            if (told := reply.too_long(request, error)) is None:
                raise
            send(structs.replace(told, call=request.call))

    said = "its input ended"
    try:
        _serve(calls.load, parent, write)
    except BaseException as error:  # outside a call, so nobody else reports it
        said = ending.last_words(error)
        raise
    finally:
        with contextlib.suppress(OSError, ValueError, MemoryError):  # usually nobody reads any more
            send(ProcessFault(said))
    sys.stderr.flush()
    with contextlib.suppress(PermissionError):  # behind a wall it started nothing
        os.killpg(os.getpgrp(), signal.SIGKILL)  # also threads of agents that still run


def _serve(load: Callable[[Any], Any], parent: Parent[m.WorkerMessage], write: Write) -> None:
    if (first := parent.first()) is None:
        return
    try:
        loaded, answer = load(first)
    except (RewardError, EnvironmentFault, WallError) as error:
        write(first, m.LoadRefused(str(error)))
        return
    write(first, loaded)
    if inspect.iscoroutinefunction(answer):
        asyncio.run(_answer_at_once(parent, write, answer))
        return
    while (request := parent.first()) is not None:
        write(request, answer(request))


async def _answer_at_once(
    parent: Parent[m.WorkerMessage], write: Write, answer: Callable[[Any], Awaitable[m.WorkerReply]]
) -> None:
    requests, running = parent.queue(), dict[int, asyncio.Task[None]]()

    async def call(request: m.WorkerMessage) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            write(request, await answer(request))

    while (request := await requests.get()) is not None:
        if not isinstance(request, m.StopCall):
            task = running[request.call] = asyncio.create_task(call(request))
            task.add_done_callback(lambda _, number=request.call: running.pop(number))  # type: ignore[misc]
        elif (unwanted := running.get(request.call)) is not None:
            unwanted.cancel()


if __name__ == "__main__":
    main()
