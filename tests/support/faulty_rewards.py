"""Rewards with the faults that people's code has. A module of its own, so that reward processes import little."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import sys
import time


def misbehave(problem, completion):
    """What the completion says is what this reward does; each is a fault that users' code has."""
    if completion == "loop":
        while True:
            pass
    elif completion == "stubborn loop":
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
    elif completion == "swallow":
        try:
            while True:
                pass
        except BaseException:
            return 1.0
    elif completion == "sleep":
        time.sleep(1000)
    elif completion == "flood":
        return len(bytearray(3 << 30))
    elif completion == "leak":
        LEAK.append(bytearray(80 << 20))
    elif completion == "raise":
        raise KeyError("no such thing")
    elif completion == "long message":
        raise ValueError("x" * 10**7)
    elif completion == "exit":
        os._exit(3)
    elif completion == "sys.exit":
        sys.exit(0)
    elif completion == "segfault":
        ctypes.string_at(0)
    elif completion == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif completion == "fork":
        if os.fork() == 0:
            return 99.0  # the child comes back, too
    elif completion == "print":
        print('{"values": [99.0], "errors": [""], "failed": false, "exceeded": ""}', flush=True)
        os.write(1, b'{"values": [99.0]}\n')
        print("{}", file=sys.__stdout__)
        print("x" * 10**6)
    elif completion == "input":
        return float(len(sys.stdin.read()))
    elif completion == "random":
        return random.random()
    elif completion == "hash":
        return float(hash("a string") % 1000)
    elif completion.startswith("value "):
        return {
            "nan": math.nan,
            "inf": math.inf,
            "none": None,
            "text": "1.0",
            "huge": 10**400,
            "large": 1e308,
            "true": True,
        }[completion[6:]]
    return 1.0


LEAK: list[bytearray] = []


WAITING: list[str] = []


async def in_threes(problem, completion):
    """Ends once two others wait at the same time."""
    import asyncio

    if completion == "raise":
        raise ValueError("no")
    WAITING.append(completion)
    while len(WAITING) < 3:
        await asyncio.sleep(0.01)
    return float(len(completion))


def _all_are_here(place, name, n):
    """Whether n calls, in whatever processes, have begun."""
    with open(os.path.join(place, name), "w"):
        return len(os.listdir(place)) >= n


async def in_company(problem, completion, place, n):
    """Ends once n calls wait at the same time."""
    import asyncio

    if completion == "raise":
        raise ValueError("no")
    while not _all_are_here(place, f"{problem.id}-{completion}", n):
        await asyncio.sleep(0.01)
    return float(problem.id) + random.random()


async def in_company_batched(prompts, completions, id, place, n, **kwargs):
    import asyncio

    while not _all_are_here(place, str(id[0]), n):
        await asyncio.sleep(0.01)
    return [float(id[0]) + len(text) / 10 for text in completions]


def in_company_later(problem, completion, place, n):
    """Waits a second at the first call; then as `in_company`."""
    if completion == "first":
        time.sleep(1)
    while completion != "first" and not _all_are_here(place, str(problem.id), n):
        time.sleep(0.01)
    return float(problem.id)


def computes(problem, completion):
    until = time.process_time() + 0.8
    while time.process_time() < until:
        pass
    return 1.0


def relative(prompts, completions, level, **kwargs):
    """TRL's signature; compares the completions of a group, and fails as a whole for one of them."""
    if "bad" in completions:
        raise ValueError("bad completion")
    if "loop" in completions:
        while True:
            pass
    longest = max(len(text) for text in completions)
    return [len(text) / longest for text in completions]


def none_of_my_business(completions, **kwargs):
    return [None if text == "none" else 1.0 for text in completions]


def counting(completions, says, calls, **kwargs):
    """Returns what it is told to, and writes down how often it was asked."""
    with open(calls, "a") as file:
        file.write(f"{len(completions)}\n")
    return says
