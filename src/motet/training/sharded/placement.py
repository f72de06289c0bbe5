"""Which rank does what: pure functions. Placement decides how long a pass takes, never a bit of what it gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def scatter(lengths: Sequence[int], owners: Sequence[int], n_ranks: int) -> tuple[int, ...]:
    """A rank for each segment of a batch: the longest first, each to the rank with the fewest tokens so far.

    Args:
        lengths: tokens of each segment.
        owners: the rank that owns each segment's adapter; where ranks are level it is taken, for it need not send a gradient.
        n_ranks: how many ranks there are.
    """
    loads, ranks = [0] * n_ranks, [0] * len(lengths)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = min(range(n_ranks), key=lambda rank: (loads[rank], rank != owners[place], rank))
        ranks[place] = rank
        loads[rank] += lengths[place]
    return tuple(ranks)


def owner(owned: Iterable[int], n_ranks: int) -> int:
    """A rank for a new adapter: the one that owns the fewest."""
    counts = [0] * n_ranks
    for rank in owned:
        counts[rank] += 1
    return counts.index(min(counts))
