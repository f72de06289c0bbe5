"""The worker's half of the conversation: requests and answers are lines of JSON on stdin and stdout.

    → {"op": "load"}                                        ← {"ok": {"versions": {…}, "seconds": 3.1}}
    → {"op": "prepare", "work": "decode", "args": {…},
       "warm": true}                                        ← {"ok": {}}          made ready, and run once to warm up
    → {"op": "measure", "work": "decode", "args": {…}}      ← {"ok": {"seconds": 3.9, "units": 4096, …}}
    → {"op": "release", "work": "decode", "args": {…}}      ← {"ok": {}}

A failure is {"error": why}; a work that this program does not offer is {"unavailable": why}. Only the standard library is
needed, because each worker runs in the environment of the program that it measures.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import metadata
from typing import Any

Repeat = Callable[[], dict[str, Any]]
"""One repeat of a work: `seconds` it took, `units` it did, and more figures by name."""
Work = Callable[[dict[str, Any]], AbstractContextManager[Repeat]]
"""Makes a work ready, and tidies up after it: arguments → what is called for each repeat."""

Ready = dict[str, tuple[ExitStack, Repeat]]


class Unavailable(Exception):
    """This program cannot do that work; the text says why."""


def options() -> dict[str, Any]:
    """What the bench gave this worker on its command line."""
    found: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    return found


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages, those that are there."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def serve(load: Callable[[], dict[str, Any]], works: Mapping[str, Work]) -> None:
    """Answer requests until stdin ends; `load` returns what the answer to `load` says besides the seconds."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not land among the answers
    ready: Ready = {}
    for line in sys.stdin:
        answer = _answer(json.loads(line), load, works, ready)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(
    request: dict[str, Any], load: Callable[[], dict[str, Any]], works: Mapping[str, Work], ready: Ready
) -> dict[str, Any]:
    try:
        if request["op"] == "load":
            started = time.perf_counter()
            return {"ok": {**load(), "seconds": time.perf_counter() - started}}
        return {"ok": _perform(request, works, ready)}
    except Unavailable as error:
        return {"unavailable": str(error)}
    except Exception as error:  # the bench goes on without this side and says why
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _perform(request: dict[str, Any], works: Mapping[str, Work], ready: Ready) -> dict[str, Any]:
    key = json.dumps([request["work"], request["args"]], sort_keys=True)
    if request["op"] == "measure":
        return ready[key][1]()
    if request["op"] == "release":
        if key in ready:
            ready.pop(key)[0].close()
        gc.collect()
        return {}
    if request["work"] not in works:
        raise Unavailable(f"there is no work {request['work']!r}")
    with ExitStack() as stack:
        repeat = stack.enter_context(works[request["work"]](request["args"]))
        if request["warm"]:
            repeat()
        ready[key] = (stack.pop_all(), repeat)
    gc.collect()
    return {}


def _die_with_parent() -> None:
    """Linux ends this process when the bench is killed, also while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
