"""Random numbers as counters: u = f(job seed; purpose, step, problem, sample, turn, position).

Nothing here keeps state, so a number does not depend on how many others were drawn, by whom, or in which order. Keys are
BLAKE2b digests; positions go through the SplitMix64 finalizer (Steele et al. 2014, as in `java.util.SplittableRandom`).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key(seed: int, purpose: str, *counters: int) -> int:
    """A 64-bit key for one stream of random numbers.

    Streams differ by `purpose` (`train`, `eval`, `shuffle`, `init`) and by counters (step, problem, sample, turn).
    """
    text = f"{seed}/{purpose}/" + "/".join(str(int(counter)) for counter in counters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one for each (key, position); both arrays have the same shape."""
    with np.errstate(over="ignore"):
        state = keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    draws: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def permutation(stream: int, n: int) -> NDArray[np.int64]:
    """A random order of 0 … n − 1, a function of the key alone."""
    draws = uniforms(np.full(n, stream, np.uint64), np.arange(n, dtype=np.uint64))
    return np.argsort(draws, kind="stable")
