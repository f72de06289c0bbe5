"""The state of decode rows that a device counts on by itself, as one flat array, and the entries that change in it.

A record per row: its last token, the position of that token, the number of drawn tokens, how it samples, and its KV
blocks. Behind the records stands, for each group, the order in which a step computes rows. Rows that join, grow or leave
change a few entries; a step of the same rows with enough blocks changes none.

Legend: E entries of the array, C changed entries, N rows of a step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from motet.core.types import SamplingParams
from motet.model.device_steps import BLOCKS, GROUPS
from motet.rollout.sequences import SampledSequence


class StepTable:
    """The host's part of the array. Entries that the device counts on are only written when a row joins."""

    def __init__(self, n_rows: int, most_blocks: int) -> None:
        """`most_blocks` is the largest number of blocks of one row."""
        self.n_rows, self.width = n_rows, BLOCKS + most_blocks
        self.size = n_rows * self.width + GROUPS * n_rows
        """Entries of the array, zero at first; the device holds as many."""
        self._orders = [np.full(n_rows, -1, np.int64) for _ in range(GROUPS)]
        self._changes_C2 = np.empty((1024, 2), np.int64)
        self._n_changes = 0

    def order_at(self, group: int) -> int:
        """Index of the first entry of a group's order."""
        return self.n_rows * self.width + group * self.n_rows

    def join(self, row: int, sequence: SampledSequence) -> None:
        """Write the record of a sequence whose next token is to be computed."""
        record = [sequence.tokens[-1], sequence.length - 1, len(sequence.tokens), _signed(sequence.key)]
        start, values = row * self.width, [*record, *_settings(sequence.prompt.request.sampling), *sequence.blocks]
        self._write(np.arange(start, start + len(values)), np.array(values, np.int64))

    def grow(self, row: int, blocks: Sequence[int], known: int) -> None:
        """Write the blocks of a row behind the first `known`."""
        start = row * self.width + BLOCKS
        self._write(np.arange(start + known, start + len(blocks)), np.array(blocks[known:], np.int64))

    def order(self, group: int, rows_N: NDArray[np.int64]) -> None:
        """Set the rows of the group's next steps."""
        known_N = self._orders[group][: len(rows_N)]
        (changed,) = np.nonzero(known_N != rows_N)
        known_N[changed] = rows_N[changed]
        self._write(self.order_at(group) + changed, rows_N[changed])

    def forget(self) -> None:
        """Take what the device has as unknown; every row must join again."""
        self._n_changes = 0
        for order in self._orders:
            order.fill(-1)

    def take_changes(self) -> NDArray[np.int64]:
        """Entries that changed since the last call, [C, 2]; later ones count. Valid until the next change."""
        n_changes, self._n_changes = self._n_changes, 0
        return self._changes_C2[:n_changes]

    def _write(self, indices_E: NDArray[np.int64], values_E: NDArray[np.int64]) -> None:
        end = self._n_changes + len(indices_E)
        if end > len(self._changes_C2):
            self._changes_C2 = np.resize(self._changes_C2, (2 * end, 2))
        self._changes_C2[self._n_changes : end, 0] = indices_E
        self._changes_C2[self._n_changes : end, 1] = values_E
        self._n_changes = end


def _settings(sampling: SamplingParams) -> list[int]:
    return [_bits(sampling.temperature), sampling.top_k, _bits(sampling.top_p), _bits(sampling.min_p)]


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
