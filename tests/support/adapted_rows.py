"""Rows with adapters of different ranks by address, for tests of the kernels in `motet.kernels.cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.kernels.cuda.adapters import AdapterGroup, AdapterTables, Places, tiles_of
from motet.kernels.cuda.decoder_shape import pieces_of
from motet.model.arithmetic import round_up


@dataclass(frozen=True)
class Adapted:
    """Rows of a pass, each with the adapter of a slot."""

    tables: AdapterTables
    group: AdapterGroup
    a: list[Tensor]
    """[K, W], one for each slot; columns beyond the rank are zeros."""
    slots_T: list[int]

    def pieces(self) -> Tensor:
        """The parts of `inner` that are filled, one row after the other."""
        return torch.cat(
            [
                self.group.inner[:, row, : self.a[slot].shape[1]].flatten()
                for row, slot in enumerate(self.slots_T)
                if slot >= 0
            ]
        )


def adapted(
    slots_T: Sequence[int], ranks: Sequence[int], n_inputs: int, dtype: torch.dtype, device: torch.device,
    *, width: int = 0, spare: int = 0, seed: int = 0,
) -> Adapted:  # fmt: skip
    """Adapters with these ranks; `width` columns of `inner` and `spare` tiles beyond those in use change no number."""
    generator = torch.Generator().manual_seed(seed)
    a = []
    for rank in ranks:
        own = torch.randn(n_inputs, rank, generator=generator) * n_inputs**-0.5
        a.append(torch.nn.functional.pad(own, (0, round_up(rank, 4) - rank)).to(device, dtype))
    entries = [[matrix.data_ptr(), matrix.shape[1], rank, 0, 0] for matrix, rank in zip(a, ranks, strict=True)]
    tiles = tiles_of(np.array(slots_T, np.int32))
    behind = np.full((spare, 17), 0, np.int32)  # what an earlier step left
    tables = AdapterTables(
        Places([], dtype.itemsize),
        torch.from_numpy(np.concatenate([tiles, behind])).to(device),
        torch.tensor([len(tiles)], dtype=torch.int32, device=device),
        len(slots_T),
        adapted=True,
    )
    width = max(width, *(round_up(matrix.shape[1], 16) for matrix in a))
    inner = torch.full((pieces_of(n_inputs), len(slots_T), width), torch.nan, device=device)
    group = AdapterGroup(torch.tensor(entries, device=device), width, inner, (n_inputs,))
    return Adapted(tables, group, a, list(slots_T))
