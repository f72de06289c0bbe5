"""Device time by user: each window's seconds of decoding and training are divided among those who used them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from motet.core.device import BusyTime

COMPLETIONS = "answers/"
"""Prefix of a tenant in the name of its completions."""
IDLE = ""
"""The name for time in which the device was idle."""
_MICRO = 1_000_000


def apportion(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Divide whole units by weights so that they sum to the total (largest remainder, Hamilton).

    Example: 10 units for {"a": 2, "b": 1} are {"a": 7, "b": 3}. Ties of remainders are broken by name.

    Args:
        total: units to divide; not negative.
        weights: by name; not negative, at least one positive. Each result is its exact share, rounded up or down.
    """
    whole = sum(weights.values())
    shares = {name: total * weight // whole for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (-(total * weights[name] % whole), name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


class Meter:
    """Reads a device's clocks and assigns each microsecond to a user.

    Decoding is divided by the row time of each name in the window; training calls know their user. Late reports of
    sampling processes are added to later windows, so every window still sums to its length.
    """

    def __init__(self, busy: BusyTime, clock: Callable[[], float] = time.monotonic) -> None:
        self._busy, self._clock = busy, clock
        self._until = self._microseconds(clock())
        self._decode = self._microseconds(busy.take()[0])
        self._owed: Counter[str] = Counter()
        """Microseconds used but not yet in any window."""

    @staticmethod
    def _microseconds(seconds: float) -> int:
        return round(seconds * _MICRO)

    def window(self) -> dict[str, int]:
        """Microseconds by name since the last window, including `IDLE`; they sum to its length."""
        until = self._microseconds(self._clock())
        length, self._until = until - self._until, until
        decode, decoded, spent = self._busy.take()
        if any(decoded.values()):  # otherwise the decoding belongs to tokens that are reported later
            used = self._microseconds(decode) - self._decode
            self._owed.update(apportion(used, decoded))
            self._decode += used
        for name, seconds in spent.items():
            self._owed[name] += self._microseconds(seconds)
        owed = +self._owed
        given = owed if owed.total() <= length else apportion(length, owed)
        self._owed = owed - Counter(given)
        idle = length - sum(given.values())
        return {name: units for name, units in {**given, IDLE: idle}.items() if units}
