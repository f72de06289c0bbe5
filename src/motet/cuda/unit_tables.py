"""Where the gradients of a pass's adapters are added, and the rows that are added together.

Legend: U units, G groups of units, C sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.cuda.attention import CudaPass
from motet.model.lora import LoraMatrices
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.unit_sums import UnitSums

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
    segments: tuple[TrainSegment, ...]
    sums: tuple[UnitSums, ...]
    """One for each segment."""

    @classmethod
    def of(cls, routing: TrainerRouting, attention: CudaPass) -> UnitTables | None:
        """Those of segments with gradients; None if there are none. Sequences are units."""
        device = attention.positions_T.device
        slots: dict[int, int] = {}
        units, groups, places = list[list[int]](), list[list[int]](), list[list[int]]()
        segments, sums = list[TrainSegment](), list[UnitSums]()
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
            if segment.gradients is None and segment.sums is None:
                continue
            to = segment.sums or UnitSums.empty(segment.weights.layout.size, device)
            to.n_units += len(own)
            groups += [[len(units) + first, len(units) + end, slot, len(sums)] for first, end in _groups(own)]
            units += own
            places.append([segment.weights.flat.data_ptr(), to.flat.data_ptr(), to.largest.data_ptr()])
            segments.append(segment)
            sums.append(to)
        if not groups:
            return None
        units_U2, groups_G4 = (torch.tensor(each, dtype=torch.int32).to(device) for each in (units, groups))
        factors_C = torch.tensor([segment.scaling for segment in segments]).to(device)
        return cls(units_U2, groups_G4, torch.tensor(places).to(device), factors_C, tuple(segments), tuple(sums))

    def finish(self) -> None:
        """Add sums that were made for this pass alone to gradients in fp32."""
        for segment, own in zip(self.segments, self.sums, strict=True):
            if segment.sums is None and segment.gradients is not None:
                _add(segment.gradients, segment.weights.layout.matrices(own.total()))


def _groups(units: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ranges of consecutive units; their borders change no bit."""
    found, first, rows = list[tuple[int, int]](), 0, 0
    for index, (_, n_rows) in enumerate(units):
        rows += n_rows
        if rows >= _GROUP or index == len(units) - 1:
            found.append((first, index + 1))
            first, rows = index + 1, 0
    return found


def _add(gradients: dict[str, LoraMatrices], found: dict[str, LoraMatrices]) -> None:
    for leader, matrices in gradients.items():
        matrices.a.add_(found[leader].a)
        for (_, own), (_, other) in zip(matrices.bs, found[leader].bs, strict=True):
            own.add_(other)
