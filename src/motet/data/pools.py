"""Pools: a pool has the rows with one value of a column, such as a difficulty.

Chooses the pool of each position of the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from motet.config.data import MOST_POOLS, PoolsConfig, pool_of
from motet.core import seeds
from motet.core.errors import DataError
from motet.core.nested import MISSING, names_of, value_at
from motet.core.types import Problem

Places = NDArray[np.int64]
_MOST_NAMED, _SAID, _SHOWN = 1000, 10, 60
"""Limits for messages: counted values without a weight, values shown, and characters of a value."""
BLOCK = 1024
"""Positions in a block, in which each pool has its share, rounded to a position."""


def passes(n: int, first: int, stop: int, order: Callable[[int], Places]) -> Places:
    """Items number `first` to `stop` − 1, counted from the first pass, of endless passes over n items.

    `order` gives the items of a pass, by its number.
    """
    numbers = range(first // n, (stop - 1) // n + 1)
    parts = [order(number)[max(first - number * n, 0) : min(stop - number * n, n)] for number in numbers]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def order_of(n: int, seed: int, purpose: str, shuffle: bool) -> Callable[[int], Places]:
    """The order of each pass: a new permutation, or that of the source."""
    if not shuffle:
        return lambda _: np.arange(n)
    return lambda number: _permutation(seeds.key(seed, purpose, number), n)


@lru_cache(8)
def _permutation(stream: int, n: int) -> Places:
    """The last pass, because windows of one row request the same pass repeatedly."""
    order = seeds.permutation(stream, n)
    order.flags.writeable = False
    return order


def shares(weights: Sequence[float]) -> Places:
    """Positions of a block for each weight, by the largest remainders. [n_weights]"""
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    found = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: BLOCK - found.sum()]] += 1
    return found


@lru_cache(2 * MOST_POOLS)
def block(weights: tuple[float, ...]) -> Places:
    """The pool of each position of a block. [BLOCK]

    Each position goes to the pool whose next position is due first, among those with less than their share so far. So any range
    of positions has each pool's share to within one or two.
    """
    counts = shares(weights)
    given, pools = np.zeros_like(counts), np.empty(BLOCK, np.int64)
    for place in range(BLOCK):
        due = np.where(counts * (place + 1) > given * BLOCK, (given + 1) / np.maximum(counts, 1), np.inf)
        pools[place] = due.argmin()
        given[pools[place]] += 1
    pools.flags.writeable = False
    return pools


@dataclass(frozen=True, eq=False)
class Pools:
    """The row at each position: a pure function of configuration, rows and seed."""

    config: PoolsConfig
    rows: tuple[Places, ...]
    """Places of each pool's rows in the training data, in the order of `config.values`."""

    @classmethod
    def of(cls, config: PoolsConfig, problems: Sequence[Problem], source: str) -> tuple[Pools, Places, str]:
        """The pools, the places of their rows in `problems`, and a note about both.

        Raises:
            DataError: rows lack the column, or a value with a weight has no row.
        """
        pools, others = {value: number for number, value in enumerate(config.values)}, Counter[str]()
        found = np.full(len(problems), -1, np.int32)
        for place, problem in enumerate(problems):
            if (own := value_at(problem.metadata, config.column)) is MISSING:
                raise DataError(
                    f"data.pools: {source} row {problem.id + 1} has no column {config.column!r}. Its columns: "
                    f"{', '.join(names_of(problem.metadata)) or 'none'}"
                )
            value = pool_of(own)
            found[place] = pools.get(value, -1)
            if found[place] < 0 and len(others) < _MOST_NAMED:
                others[value[:_SHOWN]] += 1
        used = np.flatnonzero(found >= 0)
        rows = tuple(np.flatnonzero(found[used] == number) for number in pools.values())
        named = [(value[:_SHOWN], len(own)) for value, own in zip(pools, rows, strict=True)]
        if missing := [value for value, n in named if not n]:
            known = sorted([(-n, value) for value, n in [*named, *others.items()] if n])[:_SAID]
            raise DataError(
                f"data.pools: no row to train on has {config.column} {missing[0]!r}; rows have "
                f"{', '.join(value for _, value in known)}"
            )
        counts = ", ".join(f"{value}: {n}" for value, n in named[:_SAID])
        left_out = len(problems) - len(used)
        rest = f"; rows left out, with other values: {left_out}" if left_out else ""
        return cls(config, rows), used, f"rows by {config.column}: {counts}{rest}"

    def window(self, first: int, stop: int, seed: int, per_step: int, shuffle: bool) -> Places:
        """Places of the rows at positions first to stop − 1 of a job with `per_step` positions in a step."""
        steps = range(first // per_step, (stop - 1) // per_step + 1)
        whole = np.concatenate([self._step(step, seed, per_step, shuffle) for step in steps])
        return whole[first - steps[0] * per_step : stop - steps[0] * per_step]

    def _step(self, step: int, seed: int, per_step: int, shuffle: bool) -> Places:
        """Places of a step's rows, in random order, because a job may train only the first ones (`algorithm.oversampling`)."""
        begun = [0, *(change for change in sorted(self.config.changes) if change <= step)]
        before = np.zeros(len(self.rows), np.int64)
        for start, end in zip(begun, [*begun[1:], step], strict=True):
            before += _counts(self._block(start), (end - start) * per_step, len(self.rows))
        since = (step - begun[-1]) * per_step
        pools = self._block(begun[-1])[np.arange(since, since + per_step) % BLOCK]
        places = np.zeros(per_step, np.int64)
        for pool in np.unique(pools):
            mine, rows = pools == pool, self.rows[pool]
            order = order_of(len(rows), seed, f"shuffle {self.config.values[pool]}", shuffle)
            places[mine] = rows[passes(len(rows), int(before[pool]), int(before[pool] + mine.sum()), order)]
        return places[_permutation(seeds.key(seed, "pools", step), per_step)]

    def _block(self, start: int) -> Places:
        weights = self.config.changes[start] if start else self.config.weights
        return block(tuple(weights.get(value, 0.0) for value in self.config.values))


def _counts(pools: Places, n: int, n_pools: int) -> Places:
    """The number of positions of each pool among the first n."""
    whole, rest = divmod(n, BLOCK)
    counts: Places = whole * np.bincount(pools, minlength=n_pools) + np.bincount(pools[:rest], minlength=n_pools)
    return counts
