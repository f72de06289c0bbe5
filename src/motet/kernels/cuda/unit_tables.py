"""Where the gradients of a pass's adapters are added, and the rows that are added together.

Legend: U units, G groups of units, C sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from motet.kernels.cuda.attention import CudaPass
from motet.model.accelerator import send
from motet.model.routing import TrainerRouting

_GROUP = 512
"""Rows of a group, at least, if an adapter has so many: a program adds their units before it writes."""


@dataclass(frozen=True)
class UnitTables:
    """Device memory that a backward pass writes once."""

    units_U2: Tensor
    """int32: first row, number of rows."""
    groups_G4: Tensor
    """int32: first unit, end unit, slot of the adapter (see `AdapterTables`), its sums."""
    places_C3: Tensor
    """int64: addresses of an adapter's weights, of its sums, and of their largest number."""
    factors_C: Tensor
    """fp32 factors of gradients of A."""

    @classmethod
    def of(cls, routing: TrainerRouting, attention: CudaPass) -> UnitTables | None:
        """Those of segments with gradients; None if there are none. Sequences are units."""
        device = attention.positions_T.device
        slots: dict[int, int] = {}
        units, groups, places = list[list[int]](), list[list[int]](), list[list[int]]()
        factors = list[float]()
        spans = iter([(row, n) for row, n, _ in attention.spans.tolist()])
        span = next(spans, None)
        for segment in routing.segments:
            if not segment.weights.layout.fused:
                continue
            slot = slots.setdefault(id(segment.weights), len(slots))
            own = list[list[int]]()
            while span is not None and span[0] < segment.stop:
                if span[0] >= segment.start:
                    own.append(list(span))
                span = next(spans, None)
            to = segment.sums
            if to is None:
                assert segment.gradients is None, "these kernels add whole numbers"
                continue
            to.n_units += len(own)
            groups += [[len(units) + first, len(units) + end, slot, len(places)] for first, end in _groups(own)]
            units += own
            places.append([segment.weights.flat.data_ptr(), to.flat.data_ptr(), to.largest.data_ptr()])
            factors.append(segment.scaling)
        if not groups:
            return None
        tables = np.array(units, np.int32), np.array(groups, np.int32), np.array(places), np.array(factors, np.float32)
        return cls(*send(device, *tables))


def _groups(units: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ranges of consecutive units; their borders change no bit."""
    found, first, rows = list[tuple[int, int]](), 0, 0
    for index, (_, n_rows) in enumerate(units):
        rows += n_rows
        if rows >= _GROUP or index == len(units) - 1:
            found.append((first, index + 1))
            first, rows = index + 1, 0
    return found
