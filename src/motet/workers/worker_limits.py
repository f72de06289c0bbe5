"""Limits of one call of a user's code in CPU time and memory, inside the process that runs it."""

from __future__ import annotations

import math
import random
import resource
import signal
from collections.abc import Callable
from typing import TypeVar

from numpy import random as numpy_random  # numpy 2.5 imports it when it is first used, which may be behind the wall

from motet.process import wall
from motet.process.own_code import describe
from motet.workers.worker_messages import Limit

_GRACE_SECONDS = 1  # between the exception in Python and the kernel's SIGXCPU
LOAD_CPU_SECONDS = 30.0
"""CPU time for loading code that others sent."""
_AGAIN_SECONDS = 0.2  # code that swallows the exception gets it again

Result = TypeVar("Result")


class CpuLimitError(BaseException):
    """CPU time is used up. Not an `Exception`, so that a user's `except Exception` does not catch it."""


class WorkerLimits:
    """Limits of one call at a time."""

    def __init__(self) -> None:
        self.baseline = wall.address_space()
        self.fired = False
        self._cpu_seconds = 0.0
        self._memory_mb = 0
        signal.signal(signal.SIGPROF, self._on_cpu_time)

    def grow(self) -> None:
        """Count what the process has now as its own, not as its next call's."""
        self.baseline = wall.address_space()

    def run(
        self, call: Callable[[], Result], kind: str, cpu_seconds: float, memory_mb: int
    ) -> tuple[Result | None, str, Limit]:
        """The result of a user's code that `call` runs, or its error, and the limit that it hit.

        `kind`, `reward` or `environment`, is the section of the job that has the limits.
        """
        self._cpu_seconds, self._memory_mb = cpu_seconds, memory_mb
        exceeded: Limit = ""
        try:
            with self:
                result = call()
            if not self.fired:  # it may have swallowed the exception and returned something
                return result, "", ""
        except CpuLimitError:
            exceeded = "cpu"
        except MemoryError:
            exceeded = "memory"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # it may call sys.exit too
            if not self.fired:
                return None, describe(error), ""
        exceeded = "cpu" if self.fired else exceeded
        return None, over_limit(exceeded, kind, cpu_seconds, memory_mb), exceeded

    def __enter__(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        last = used.ru_utime + used.ru_stime + self._cpu_seconds + _GRACE_SECONDS
        _soft_limit(resource.RLIMIT_CPU, math.ceil(last))
        if self.baseline:
            _soft_limit(resource.RLIMIT_AS, self.baseline + self._memory_mb * (1 << 20))
        self.fired = False
        signal.setitimer(signal.ITIMER_PROF, self._cpu_seconds, _AGAIN_SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _soft_limit(resource.RLIMIT_CPU, None)
        _soft_limit(resource.RLIMIT_AS, None)

    def _on_cpu_time(self, *_: object) -> None:
        self.fired = True
        raise CpuLimitError


def over_limit(exceeded: Limit, kind: str, cpu_seconds: float, memory_mb: int) -> str:
    """The message for a call that hit a limit."""
    if exceeded == "cpu":
        return f"took more than {cpu_seconds:g} s of CPU time ({kind} field cpu_seconds)"
    return f"took more than {memory_mb} MB of memory ({kind} field memory_mb)"


def _soft_limit(which: int, limit: int | None) -> None:
    """Set the soft limit only: without privileges, a lowered hard limit cannot be raised again."""
    hard = resource.getrlimit(which)[1]
    wanted = hard if limit is None else limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (wanted, hard))


def seed_random(seed: int) -> None:
    """Seed the random generators, so that equal calls draw equal numbers, whatever was called before."""
    random.seed(seed)
    numpy_random.seed(seed)  # noqa: NPY002  # the global state is the one that such code uses
