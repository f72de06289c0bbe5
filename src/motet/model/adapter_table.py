"""Adapters of one layout at fixed places in memory, for decoding that is recorded once and replayed while they change.

A recording (a CUDA graph) reads the same addresses every time. So weights, and which row belongs to which adapter, are written
into tensors that stay, and every shape is constant.

Legend: T rows, S slots, K inputs, W width of fused layers' A side by side, R rank, N outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from motet.model.arithmetic import Arithmetic
from motet.model.grouped import Grouped, fits
from motet.model.lora import AdapterLayout, AdapterWeights, FusedLinears


class AdapterTable:
    """Slots for adapters of one layout. Slot 0 is all zeros: the base alone."""

    def __init__(
        self, layout: AdapterLayout, slots: int, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic
    ) -> None:
        """Take memory for `slots` adapters, slot 0 among them.

        Raises:
            ValueError: grouped products cannot be used for this layout (see `grouped.fits`), or there is no slot but slot 0.
        """
        if slots < 2:
            raise ValueError(f"a table needs slot 0 and at least one more, not {slots} slots")
        if not fits(layout, device, dtype, arithmetic):
            raise ValueError(f"grouped products cannot be used for rank {layout.rank} in {dtype} on {device}")
        self.layout = layout
        self.slots = slots
        self._flat = torch.zeros(slots, layout.size, device=device, dtype=dtype)
        self.products = layout.products(self._flat)
        """[S, K, W] and [S, R, N] by leader, always the same memory."""
        self._placed: list[weakref.ref[AdapterWeights] | None] = [None] * slots
        self._used = [0] * slots
        self._clock = 0

    def place(self, adapters: Sequence[AdapterWeights]) -> tuple[int, ...]:
        """The slot of each adapter; those that are not there yet are copied to slots that none of these needs.

        Slots whose adapter was let go come first, then those longest unused.

        Raises:
            ValueError: more adapters than slots, or one of another layout.
        """
        wanted = {id(weights): weights for weights in adapters}
        if len(wanted) >= self.slots:
            raise ValueError(f"{len(wanted)} adapters do not fit into {self.slots - 1} slots")
        if any(weights.layout is not self.layout for weights in wanted.values()):
            raise ValueError("an adapter of another layout cannot be placed in this table")
        present = {id(weights): slot for slot, weights in enumerate(self._occupants()) if id(weights) in wanted}
        kept = set(present.values())
        free = sorted((slot for slot in range(1, self.slots) if slot not in kept), key=self._age)
        for key, slot in zip([key for key in wanted if key not in present], free, strict=False):
            self._flat[slot].copy_(wanted[key].flat)
            self._placed[slot] = weakref.ref(wanted[key])
            present[key] = slot
        self._clock += 1
        for slot in present.values():
            self._used[slot] = self._clock
        return tuple(present[id(weights)] for weights in adapters)

    def _occupants(self) -> list[AdapterWeights | None]:
        """Which adapter lies in each slot; one that was let go is forgotten, so its identity cannot be taken for another's."""
        return [None if place is None else place() for place in self._placed]

    def _age(self, slot: int) -> tuple[bool, int]:
        place = self._placed[slot]
        return place is not None and place() is not None, self._used[slot]

    def routing(self, n_rows: int) -> TableRouting:
        """A routing of so many rows, all of them of the base until it is told otherwise."""
        device = self._flat.device
        order_T, inverse_T = (torch.arange(n_rows, device=device) for _ in range(2))
        ends_S = torch.full((self.slots,), n_rows, dtype=torch.int32, device=device)
        return TableRouting(self, order_T, inverse_T, ends_S)


class TableRouting:
    """Rows of a decode batch, each with a slot of a table; the tensors stay, what is written into them changes."""

    def __init__(self, table: AdapterTable, order_T: Tensor, inverse_T: Tensor, ends_S: Tensor) -> None:
        """Row of each product row, product row of each row (int64), and the end of each slot's product rows (int32)."""
        self.table = table
        self._order_T = order_T
        self._inverse_T = inverse_T
        self._ends_S = ends_S
        self._product = Grouped(ends_S)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What `values` are for."""
        return self._order_T, self._inverse_T, self._ends_S

    def values(self, slots_T: Sequence[int]) -> tuple[Tensor, ...]:
        """What the tensors have to hold, on the host, so that each row belongs to its slot; 0 is the base, and padding.

        Raises:
            ValueError: another number of rows, or no such slot.
        """
        slots = torch.tensor(slots_T, dtype=torch.long)
        if len(slots) != len(self._order_T):
            raise ValueError(f"slots of {len(slots)} rows, where there are {len(self._order_T)}")
        if not all(0 <= slot < self.table.slots for slot in slots_T):
            raise ValueError(f"a slot is not one of 0 to {self.table.slots - 1}")
        order = torch.argsort(slots, stable=True)
        ends = torch.bincount(slots, minlength=self.table.slots).cumsum(0)
        return order, torch.argsort(order), ends

    def apply(self, fused: FusedLinears, x_TK: Tensor, y_TN: Tensor) -> None:
        """Add the adapters of fused layers to y; waits for nothing, so it can be recorded."""
        products = self.table.products.get(fused.leader)
        if products is None:
            return
        inner_TW = self._product.multiply(x_TK.index_select(0, self._order_T), products.a)
        rank = self.table.layout.rank
        for column, (index, b) in enumerate(products.bs):
            added = self._product.multiply(inner_TW[:, column * rank : (column + 1) * rank], b)
            y_TN[:, fused.columns(index)].add_(added.index_select(0, self._inverse_T))
