"""The device memory of decode steps: one array of int64, which the host changes by indices and values.

It has the state of rows (`StepLayout`), for each group the number of its rows and the tiles of their adapters, and the
entries of adapters in slots (`AdapterGroup.entries_SC`).

Legend: N rows, S slots, L layers, C changed entries.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.kernels.cuda.adapters import PARTS, TILE, AdapterTables, Places, tiles_of
from motet.model.device_steps import GROUPS, StepLayout
from motet.model.lora import AdapterWeights

Changes = NDArray[np.int64]

_HEAD = 2
"""Numbers before the tiles: rows of the step, tiles in use."""


class StepMemory:
    """The array, and what the host knows of it."""

    def __init__(self, layout: StepLayout, places: Places, most_rows: int, device: torch.device) -> None:
        """At most `most_rows` rows in a step, padding included. Each row of the layout can have another adapter."""
        self.layout, self.places = layout, places
        words = -(-(_HEAD + most_rows * (1 + TILE)) // 2)
        self._tiles_at = [layout.size + group * words for group in range(GROUPS)]
        self._known = [np.zeros(words, np.int64) for _ in range(GROUPS)]
        """What was sent of a group's number of rows and tiles."""
        sizes = [places.n_layers * layout.n_rows * (3 + 2 * parts) for parts in PARTS]
        self._entries_at = (layout.size + GROUPS * words + np.cumsum([0, *sizes[:-1]])).tolist()
        self.numbers = torch.zeros(layout.size + GROUPS * words + sum(sizes), dtype=torch.int64, device=device)
        self._entries = self.numbers[self._entries_at[0] :]
        shape = places.n_layers, layout.n_rows, -1
        self._by_product = tuple(part.view(shape) for part in self._entries.split(sizes))
        self._words = words

    def head(self, group: int) -> Tensor:
        """The number that holds how many rows and tiles a group has: int64 [1]."""
        at = self._tiles_at[group]
        return self.numbers[at : at + 1]

    def resend_head(self, group: int) -> Changes:
        """Changes that set `head` as the host knows it."""
        return np.array([[self._tiles_at[group], self._known[group][0]]], np.int64)

    def count(self, group: int) -> Tensor:
        """The number of rows of a group's step: int32 [1]."""
        return self.head(group).view(torch.int32)[:1]

    def tables(self, group: int, n_rows: int, n_tiles: int, widths: Sequence[int] | None) -> AdapterTables:
        """Tables of a group's step of at most so many rows and tiles; without `widths` no row can have an adapter."""
        at = self._tiles_at[group]
        numbers = self.numbers[at : at + self._words].view(torch.int32)
        tiles = numbers[_HEAD : _HEAD + n_tiles * (1 + TILE)].view(n_tiles, 1 + TILE)
        tables = AdapterTables(self.places, tiles, numbers[1:2], n_rows, widths is not None)
        if widths is not None:
            tables.widths, tables.entries, tables.memory = tuple(widths), self._by_product, self._entries
            tables.group(0, 0)  # allocates what products share
        return tables

    def rows(self, group: int, n_rows: int, slots_N: NDArray[np.int32]) -> Changes:
        """Changes so that the group's step has so many rows, and padding, with these slots (-1: no adapter)."""
        tiles = tiles_of(slots_N)
        numbers = np.concatenate([np.array([n_rows, len(tiles)], np.int32), tiles.ravel()])
        words = np.pad(numbers, (0, len(numbers) % 2)).view(np.int64)
        known = self._known[group][: len(words)]
        (changed,) = np.nonzero(known != words)
        known[changed] = words[changed]
        return np.stack([self._tiles_at[group] + changed, words[changed]], 1)

    def adapter(self, slot: int, weights: AdapterWeights) -> Changes:
        """Changes that put an adapter's addresses into a slot."""
        parts = []
        for at, own_LC in zip(self._entries_at, self.places.entries(weights), strict=True):
            n_layers, n_entries = own_LC.shape
            index_LC = (np.arange(n_layers)[:, None] * self.layout.n_rows + slot) * n_entries + np.arange(n_entries)
            parts.append(np.stack([at + index_LC.ravel(), own_LC.ravel()], 1))
        return np.concatenate(parts)


class AdapterSlots:
    """Which adapter each slot has. Adapters are not kept by it."""

    def __init__(self, n_slots: int) -> None:
        self._held: list[weakref.ref[AdapterWeights] | None] = [None] * n_slots
        self._slot: dict[int, int] = {}
        """By the id of an adapter that may be gone."""

    def place(
        self, wanted: Mapping[int, AdapterWeights], kept: Collection[int]
    ) -> tuple[dict[int, int], list[tuple[int, AdapterWeights]]]:
        """Slots by id, and those that are new there. `wanted` is by id; slots of `kept` stay as they are."""
        slots = {key: slot for key, weights in wanted.items() if (slot := self._of(key, weights)) is not None}
        new: list[tuple[int, AdapterWeights]] = []
        if len(slots) < len(wanted):
            used = {*slots.values(), *kept}
            free = [slot for slot in range(len(self._held)) if slot not in used]
            free.sort(key=self._is_held)
            missing = [key for key in wanted if key not in slots]
            for slot, key in zip(free[: len(missing)], missing, strict=True):
                self._held[slot] = weakref.ref(wanted[key])
                slots[key] = slot
                new.append((slot, wanted[key]))
            taken = set(slots.values())
            self._slot = {key: slot for key, slot in self._slot.items() if slot not in taken and self._is_held(slot)}
            self._slot |= slots
        return slots, new

    def forget(self) -> None:
        """Take all slots as empty."""
        self._held = [None] * len(self._held)
        self._slot.clear()

    def _of(self, key: int, weights: AdapterWeights) -> int | None:
        slot = self._slot.get(key)
        held = None if slot is None else self._held[slot]
        return slot if held is not None and held() is weights else None

    def _is_held(self, slot: int) -> bool:
        held = self._held[slot]
        return held is not None and held() is not None
