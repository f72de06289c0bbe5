"""Pools: the rows with one value of a column, such as a difficulty, and which pool each position of the data is from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet import seeds
from motet.config.data import PoolsConfig, pool_of
from motet.errors import DataError
from motet.types import Problem

Places = NDArray[np.int64]
_MOST_NAMED, _SAID, _SHOWN = 1000, 10, 60
"""Values without a weight that are counted; values in a message; characters of a value there."""
BLOCK = 1024
"""Positions in which each pool has its share exactly, to one position."""


def passes(n: int, first: int, stop: int, order: Callable[[int], Sequence[int]]) -> list[int]:
    """Items first … stop − 1 of endless passes over n items.

    Args:
        n: items of a pass.
        first: counted from the first pass.
        stop: of the item after the last one.
        order: the items of a pass, by its number.
    """
    found: list[int] = []
    for number in range(first // n, (stop - 1) // n + 1):
        found += order(number)[max(first - number * n, 0) : min(stop - number * n, n)]
    return found


def order_of(n: int, seed: int, purpose: str, shuffle: bool) -> Callable[[int], Sequence[int]]:
    """The order of each pass: a new permutation, or that of the source."""
    if not shuffle:
        return lambda _: range(n)
    return lambda number: seeds.permutation(seeds.key(seed, purpose, number), n).tolist()


def shares(weights: Sequence[float]) -> Places:
    """Positions of a block for each weight, by the largest remainders. [n_weights]"""
    exact = np.asarray(weights, np.float64) * (BLOCK / sum(weights))
    found = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: BLOCK - found.sum()]] += 1
    return found


def block(weights: Sequence[float]) -> Places:
    """The pool of each position of a block; those of one pool are spread evenly. [BLOCK]"""
    counts = shares(weights)
    pools = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
    return pools[np.argsort(places, kind="stable")]


@dataclass(frozen=True, eq=False)
class Pools:
    """Which row is at which position; a pure function of the configuration, the rows and the seed."""

    config: PoolsConfig
    rows: tuple[Places, ...]
    """Places of each pool's rows in the training data, in the order of `config.values`."""

    @classmethod
    def of(cls, config: PoolsConfig, problems: Sequence[Problem], source: str) -> tuple[Pools, Places, str]:
        """The pools, the rows that they have, by their places in `problems`, and a note about both.

        Raises:
            DataError: rows lack the column, or no row has a value that has a weight.
        """
        pools, others = {value: number for number, value in enumerate(config.values)}, Counter[str]()
        found = np.full(len(problems), -1, np.int32)
        for place, problem in enumerate(problems):
            if config.column not in problem.metadata:
                raise DataError(
                    f"data.pools: {source} row {problem.id + 1} has no column {config.column!r}. Its columns: "
                    f"{', '.join(problem.metadata) or 'none'}"
                )
            value = pool_of(problem.metadata[config.column])
            found[place] = pools.get(value, -1)
            if found[place] < 0 and len(others) < _MOST_NAMED:
                others[value[:_SHOWN]] += 1
        used = np.flatnonzero(found >= 0)
        rows = tuple(np.flatnonzero(found[used] == number) for number in pools.values())
        named = {value[:_SHOWN]: len(own) for value, own in zip(pools, rows, strict=True)}
        if missing := [value for value, n in named.items() if not n]:
            known = ", ".join(value for value, n in (Counter(named) + others).most_common(_SAID))
            raise DataError(f"data.pools: no row to train on has {config.column} {missing[0]!r}; rows have {known}")
        counts = ", ".join(f"{value}: {n}" for value, n in [*named.items()][:_SAID])
        left_out = len(problems) - len(used)
        rest = f"; rows left out, with other values: {left_out}" if left_out else ""
        return cls(config, rows), used, f"rows by {config.column}: {counts}{rest}"

    def window(self, first: int, stop: int, seed: int, per_step: int, shuffle: bool) -> list[int]:
        """Places of the rows at positions first … stop − 1 of a job that has so many positions in a step."""
        starts = [0, *(step * per_step for step in sorted(self.config.changes))]
        weights = [self.config.weights, *(self.config.changes[step] for step in sorted(self.config.changes))]
        before, here = np.zeros(len(self.rows), np.int64), np.zeros(0, np.int64)
        for start, end, own in zip(starts, [*starts[1:], stop], weights, strict=True):
            if start < stop:
                pools = block([own.get(value, 0.0) for value in self.config.values])
                before += _counts(pools, min(first, end) - start, len(self.rows))
                here = np.append(here, pools[np.arange(max(first, start) - start, min(stop, end) - start) % BLOCK])
        places = np.zeros(len(here), np.int64)
        for pool in np.unique(here):
            mine, rows = here == pool, self.rows[pool]
            order = order_of(len(rows), seed, f"shuffle {self.config.values[pool]}", shuffle)
            wanted = passes(len(rows), before[pool], before[pool] + mine.sum(), order)
            places[mine] = rows[wanted]
        return places.tolist()


def _counts(pools: Places, n: int, n_pools: int) -> Places:
    """How many of the first n positions are of each pool; 0 if n is negative."""
    whole, rest = divmod(max(0, n), BLOCK)
    counts: Places = whole * np.bincount(pools, minlength=n_pools) + np.bincount(pools[:rest], minlength=n_pools)
    return counts
