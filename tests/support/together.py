"""Work that several threads begin at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def at_once(work: Callable[[int], Result], n: int) -> list[Result]:
    """What n threads get that begin together, in the order of their numbers; raises what one of them raises."""
    together = threading.Barrier(n)

    def one(number: int) -> Result:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(one, range(n)))
