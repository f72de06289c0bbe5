"""Places of packed rows in temporary blocks, where sequences share the full blocks of a prefix.

Legend: T packed rows, S sequences, L entries of a block table, P places, C copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.model.attention import Prefix


@dataclass(frozen=True)
class PackedBlocks:
    """The blocks of each sequence of a packed pass. A place is block · block_size + offset."""

    tables: list[list[int]]
    """Blocks of each sequence."""
    places_T: NDArray[np.int64]
    """Where each row's key and value are written."""
    sources_C: NDArray[np.int64]
    """Places to copy from after that, for prefixes that end in the middle of a block."""
    targets_C: NDArray[np.int64]
    n_blocks: int


def packed_blocks(lengths: Sequence[int], prefixes: Sequence[Prefix | None], block_size: int) -> PackedBlocks:
    """Blocks for sequences in order; each may continue rows of earlier ones."""
    rows = [np.zeros(0, np.int64) if prefix is None else prefix.rows for prefix in prefixes]
    starts = np.cumsum([0, *lengths])
    sequence_T = np.repeat(np.arange(len(lengths)), lengths)
    places_T = np.zeros(starts[-1], np.int64)
    most = sum(-(-(len(before) + length) // block_size) for before, length in zip(rows, lengths, strict=True))
    row_P = np.full(most * block_size, -1)
    tables: list[list[int]] = []
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    n_blocks = 0
    for index, before in enumerate(rows):
        table: list[int] = []
        own = np.concatenate([before, np.arange(starts[index], starts[index + 1])])
        for first in range(0, len(own), block_size):
            held = own[first : first + block_size]
            if first + block_size <= len(before):
                other = tables[sequence_T[held[-1]]][first // block_size]
                if np.array_equal(row_P[other * block_size : (other + 1) * block_size], held):
                    table.append(other)
                    continue
            table.append(n_blocks)
            place_P = n_blocks * block_size + np.arange(len(held))
            row_P[place_P] = held
            copied = max(0, min(len(before) - first, len(held)))
            sources.append(places_T[held[:copied]])
            targets.append(place_P[:copied])
            places_T[held[copied:]] = place_P[copied:]
            n_blocks += 1
        tables.append(table)
    return PackedBlocks(tables, places_T, np.concatenate(sources), np.concatenate(targets), n_blocks)
