"""Counts work instead of time: calls of Python functions, and files that are opened.

with calls() as counted:
    merge(waiting, budget)
assert counted["merge.<locals>.place"] < 1000
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def calls(*, own_thread: bool = False) -> Iterator[Counter[str]]:
    """How often each function is called meanwhile in this thread and in those that begin meanwhile, by qualified name.

    Built-in functions count too, such as `fsync` and `lstat`. With `own_thread`, other threads do not count.
    """
    counted = Counter[str]()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counted[argument.__name__] += 1

    before = sys.getprofile()
    threading.setprofile(None if own_thread else watch)
    sys.setprofile(watch)
    try:
        yield counted
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
