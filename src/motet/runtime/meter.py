"""Whose the device's time was: seconds of decoding and training shared out to those who used them, window by window."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from motet.device import BusyTime

COMPLETIONS = "answers/"
"""What precedes a tenant in the name of its completions."""
IDLE = ""
"""In the place of a name: time in which the device did nothing for anybody."""
_MICRO = 1_000_000


def apportion(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Share out whole units by weights, so that they sum to the total (largest remainder, Hamilton).

    Example: 10 units for {"a": 2, "b": 1} are {"a": 7, "b": 3}. Ties of remainders go by name.

    Args:
        total: units to share out; not negative.
        weights: by name; not negative, at least one of them positive. Nobody gets a whole unit beyond the exact share.
    """
    whole = sum(weights.values())
    shares = {name: total * weight // whole for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (-(total * weights[name] % whole), name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


class Meter:
    """Reads a device's clocks and says whose each microsecond was.

    Seconds of decoding are shared out by the time that the rows of each name took in the window; training calls know theirs.
    What sampling processes tell late is made good in the windows that follow, so every window sums to its length.
    """

    def __init__(self, busy: BusyTime, clock: Callable[[], float] = time.monotonic) -> None:
        self._busy, self._clock = busy, clock
        self._until = self._microseconds(clock())
        decode, self._decoded, self._spent = busy.read()
        self._decode = self._microseconds(decode)
        self._owed: Counter[str] = Counter()
        """Used, and not yet in any window, in microseconds."""

    @staticmethod
    def _microseconds(seconds: float) -> int:
        return int(seconds * _MICRO)

    def window(self) -> dict[str, int]:
        """Microseconds since the last window by name, `IDLE` included; they sum to its length."""
        until = self._microseconds(self._clock())
        length, self._until = until - self._until, until
        decode, decoded, spent = self._busy.read()
        parts = {name: n - self._decoded.get(name, 0) for name, n in decoded.items() if n > self._decoded.get(name, 0)}
        if parts:  # else what was decoded belongs to the tokens that come next
            used = self._microseconds(decode) - self._decode
            self._owed.update(apportion(used, parts))
            self._decode += used
        for name, seconds in spent.items():
            self._owed[name] += self._microseconds(seconds) - self._microseconds(self._spent.get(name, 0.0))
        self._decoded, self._spent = decoded, spent
        owed = {name: units for name, units in self._owed.items() if units > 0}
        given = owed if sum(owed.values()) <= length else apportion(length, owed)
        self._owed.subtract(given)
        idle = length - sum(given.values())
        return {name: units for name, units in {**given, IDLE: idle}.items() if units}
