"""Products of rows with their adapters' weights, several adapters of one layout at a time.

There are three forms. Padded: every adapter has equally many rows, in one batched product. Grouped: row counts differ,
in one grouped product (`torch.nn.functional.grouped_mm`). Tiled: one product for each tile of each adapter's rows, so
that libraries always choose the same kernel.

Legend: T packed rows, M product rows (those of the adapters, one adapter after another), K inputs, N outputs, A
adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.accelerator import capability
from motet.model.arithmetic import LEAST_FILL, ROWS, Arithmetic, round_up
from motet.model.lora import AdapterLayout, AdapterWeights, LoraMatrices

MULTIPLE = 8
"""Required divisor of inputs, outputs and rank of a grouped product: 16 bytes of bfloat16, for `grouped_mm`."""

MOST_GROUPS = 1024
"""Most groups of one `grouped_mm`: torch's kernel for CUDA refuses more."""

_ALIGNMENT = 16
"""Bytes."""

_CAPABILITIES = (9, 10)
"""Major compute capabilities with a grouped kernel in torch; on others it synchronises and loops."""

_BATCHED_THREADS = 2
"""With more threads, MKL cuts an fp32 batched product differently from a single one, for about one shape in five."""

_NARROW_TILE = 64
"""Rows per tile of narrow fp32 layouts with more threads: above a hundred rows, their products have other bits."""

_ROWS_TRIED = (1, 7, 300)
"""Tested group sizes: on Hopper, torch uses another kernel if groups have more than 128 rows on average."""

_FEW = (1, 4)
"""Numbers of the last group's first rows that are also tested alone."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference from plain products, as a share of the largest number."""


class RowProducts(Protocol):
    """Multiplies the rows of A adapters, ordered by adapter, with weights [A, K, N]."""

    def multiply(self, rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
        """Each row times its adapter's weights: [M, K], [A, K, N] → [M, N]."""
        ...

    def add(self, sums_MN: Tensor, rows_MK: Tensor, weights_AKN: Tensor) -> None:
        """Add the result of `multiply` in place."""
        ...


class LoraProducts(Protocol):
    """The products of a batch's adapters; chosen once, when a base is loaded."""

    least_fill: float
    """Fewest rows of an adapter in a shared product, as a share of the most."""

    def plan(self, layout: AdapterLayout, lengths: Sequence[int]) -> tuple[list[int], RowProducts]:
        """Rows reserved for runs of these lengths, and their products; must not depend on anything else."""
        ...

    def stack(self, adapters: Sequence[AdapterWeights]) -> dict[str, LoraMatrices]:
        """Stacked weights of adapters of one layout, [A, K, W] and [A, R, N] by leader."""
        ...

    def sums(self, left_MK: Tensor, right_MN: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """leftᵀ · right of the rows of each span, [K, N], with the same bits as the span alone."""
        ...

    def fits_table(self, layout: AdapterLayout) -> bool:
        """Whether adapters of a layout can be multiplied at fixed memory positions, for any numbers of rows."""
        ...

    def in_table(self, ends_A: Tensor) -> RowProducts:
        """Products of adapters at fixed positions. `ends_A`, int32 on the device, has the end row of each.

        Its values may change between products. Call only if `fits_table` holds.
        """
        ...


@dataclass(frozen=True)
class Padded:
    """Equal row counts for all adapters; `add` rounds product and sum together, once."""

    n_adapters: int

    def multiply(self, rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
        """Each row times the weights of its adapter: [M, K], [A, K, N] → [M, N]."""
        if self.n_adapters == 1:
            return torch.mm(rows_MK, weights_AKN[0])
        return torch.bmm(rows_MK.unflatten(0, (self.n_adapters, -1)), weights_AKN).flatten(0, 1)

    def add(self, sums_MN: Tensor, rows_MK: Tensor, weights_AKN: Tensor) -> None:
        """Add the result of `multiply` in place."""
        if self.n_adapters == 1:
            sums_MN.addmm_(rows_MK, weights_AKN[0])
        else:
            sums_AMN = sums_MN.unflatten(0, (self.n_adapters, -1))
            sums_AMN.baddbmm_(rows_MK.unflatten(0, (self.n_adapters, -1)), weights_AKN)


@dataclass(frozen=True)
class Grouped:
    """Any number of rows per adapter (`GroupedProducts.fits_table`). `add` rounds the product, then the sum."""

    ends_A: Tensor
    """int32, on the device: the end row of each adapter. Later rows are undefined."""

    def multiply(self, rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
        """Each row times the weights of its adapter: [M, K], [A, K, N] → [M, N]."""
        rows_MK = _aligned(rows_MK)
        found_MN = F.grouped_mm(rows_MK, weights_AKN[:MOST_GROUPS], offs=self.ends_A[:MOST_GROUPS])
        for first in range(MOST_GROUPS, len(self.ends_A), MOST_GROUPS):
            few = slice(first, first + MOST_GROUPS)
            later_MN = F.grouped_mm(rows_MK, weights_AKN[few], offs=self.ends_A[few])
            # a call's first group begins at row 0, and the host does not know where the groups before it end
            is_earlier_M = torch.arange(len(rows_MK), device=rows_MK.device) < self.ends_A[first - 1]
            found_MN = torch.where(is_earlier_M[:, None], found_MN, later_MN)
        return found_MN

    def add(self, sums_MN: Tensor, rows_MK: Tensor, weights_AKN: Tensor) -> None:
        """Add the result of `multiply` in place."""
        sums_MN.add_(self.multiply(rows_MK, weights_AKN))


@dataclass(frozen=True)
class Tiled:
    """One product per tile of each adapter; `add` rounds product and sum together, once."""

    tiles: tuple[tuple[int, int, int], ...]
    """Adapter, first row and end row."""

    @classmethod
    def of(cls, rooms: Sequence[int], tile: int) -> Tiled:
        """Tiles of adapters with these row counts, which are multiples of `tile`; 0 makes one tile per adapter."""
        tiles: list[tuple[int, int, int]] = []
        first = 0
        for adapter, room in enumerate(rooms):
            tiles.extend((adapter, row, row + (tile or room)) for row in range(first, first + room, tile or room))
            first += room
        return cls(tuple(tiles))

    def multiply(self, rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
        """Each row times the weights of its adapter: [M, K], [A, K, N] → [M, N]."""
        out_MN = rows_MK.new_empty(rows_MK.shape[0], weights_AKN.shape[-1])
        for adapter, first, last in self.tiles:
            torch.mm(rows_MK[first:last], weights_AKN[adapter], out=out_MN[first:last])
        return out_MN

    def add(self, sums_MN: Tensor, rows_MK: Tensor, weights_AKN: Tensor) -> None:
        """Add the result of `multiply` in place."""
        for adapter, first, last in self.tiles:
            sums_MN[first:last].addmm_(rows_MK[first:last], weights_AKN[adapter])


def ends(rooms: Sequence[int], device: torch.device) -> Tensor:
    """The end row of each adapter, for `Grouped`: int32 [A]."""
    return torch.tensor(list(accumulate(rooms)), dtype=torch.int32, device=device)


def _aligned(rows_MK: Tensor) -> Tensor:
    """The rows, copied if the grouped product cannot read them in place; the bits are the same."""
    stride, step = rows_MK.stride()
    fine = step == 1 and stride >= rows_MK.shape[1] and stride * rows_MK.element_size() % _ALIGNMENT == 0
    if fine and rows_MK.data_ptr() % _ALIGNMENT == 0:
        return rows_MK
    return rows_MK.clone(memory_format=torch.contiguous_format)


# --- backends ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BySums:
    """One form for products with long sums, another for other products."""

    long: RowProducts
    short: RowProducts
    long_sum: int

    def multiply(self, rows_MK: Tensor, weights_AKN: Tensor) -> Tensor:
        return self._form(rows_MK).multiply(rows_MK, weights_AKN)

    def add(self, sums_MN: Tensor, rows_MK: Tensor, weights_AKN: Tensor) -> None:
        self._form(rows_MK).add(sums_MN, rows_MK, weights_AKN)

    def _form(self, rows_MK: Tensor) -> RowProducts:
        return self.long if rows_MK.shape[1] >= self.long_sum else self.short


@dataclass(frozen=True)
class PaddedProducts:
    """A `LoraProducts` for a CPU: every adapter of a product has equally many rows."""

    dtype: torch.dtype = torch.float32
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    least_fill = LEAST_FILL

    def plan(self, layout: AdapterLayout, lengths: Sequence[int]) -> tuple[list[int], RowProducts]:
        """One batched product, or with many threads one per adapter; tiles for long sums and narrow layouts."""
        batched = self.dtype != torch.float32 or torch.get_num_threads() <= _BATCHED_THREADS
        narrow = _NARROW_TILE if layout.narrow and not batched else 0
        tile = self.arithmetic.tile_of(layout.longest_sum) or narrow
        padded = round_up(max(*lengths, layout.least_rows(self.dtype)), tile or ROWS)
        rooms = [padded] * len(lengths)
        form = Padded(len(lengths)) if batched else Tiled.of(rooms, narrow)
        return rooms, _BySums(Tiled.of(rooms, tile), form, self.arithmetic.long_sum) if tile else form

    def stack(self, adapters: Sequence[AdapterWeights]) -> dict[str, LoraMatrices]:
        """Contiguous for each product, because `bmm` would copy other layouts."""
        if len(adapters) == 1:
            return _alone(adapters[0])
        stacks = {}
        for leader in (group.leader for group in adapters[0].layout.fused):  # matrices of experts are read in place
            first = adapters[0].matrices[leader]
            own = [weights.matrices[leader] for weights in adapters]
            bs = [(index, torch.stack([lora.bs[at][1] for lora in own])) for at, (index, _) in enumerate(first.bs)]
            stacks[leader] = LoraMatrices(torch.stack([lora.a for lora in own]), tuple(bs))
        return stacks

    def sums(self, left_MK: Tensor, right_MN: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """One product per span: with several threads, a batched product cuts such sums differently."""
        return [torch.mm(left_MK[first:last].t(), right_MN[first:last]) for first, last in spans]

    def fits_table(self, layout: AdapterLayout) -> bool:
        """False: padding depends on each adapter's number of rows."""
        return False

    def in_table(self, ends_A: Tensor) -> RowProducts:
        """Raises AssertionError: no layout fits."""
        raise AssertionError("padded products fit no table")


class GroupedProducts:
    """A `LoraProducts` for a GPU: grouped with any numbers of rows, or tiled if a layout cannot be grouped."""

    least_fill = 0.0  # nothing is padded

    def __init__(self, device: torch.device, dtype: torch.dtype, tile: int) -> None:
        """`tile` as in `Arithmetic`."""
        self._device, self._dtype, self._tile = device, dtype, tile
        self._fit: dict[int, tuple[AdapterLayout, bool]] = {}
        """By id, because a base creates each layout once and comparing layouts is slow; keeps the layout, so its id stays
        unique.
        """

    def plan(self, layout: AdapterLayout, lengths: Sequence[int]) -> tuple[list[int], RowProducts]:
        """`Grouped` if the layout fits a table, else `Tiled`."""
        if self.fits_table(layout):
            return list(lengths), Grouped(ends(lengths, self._device))
        rooms = [round_up(length, self._tile or 1) for length in lengths]
        return rooms, Tiled.of(rooms, self._tile)

    def stack(self, adapters: Sequence[AdapterWeights]) -> dict[str, LoraMatrices]:
        """One copy for all layers: the flat weights, then views."""
        if len(adapters) == 1:
            return _alone(adapters[0])
        return adapters[0].layout.matrices(torch.stack([weights.flat for weights in adapters]))

    def sums(self, left_MK: Tensor, right_MN: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """If exact, uses contiguous copies: libraries also choose kernels by strides."""
        parts = [(left_MK[first:last], right_MN[first:last]) for first, last in spans]
        if self._tile:
            return [torch.mm(left.contiguous().t(), right.contiguous()) for left, right in parts]
        return [torch.mm(left.t(), right) for left, right in parts]

    def fits_table(self, layout: AdapterLayout) -> bool:
        """Whether a layout uses `Grouped`, else `Tiled`. The same for sampling and training.

        Every product shape of the layout is tested once per device against plain products. With exact arithmetic, a row
        must also have the same bits with any other rows in its group or in others.
        """
        verdict = self._fit.get(id(layout))
        if verdict is None:
            exact = self._tile > 0
            good = all(_tried(self._device, self._dtype, exact, *shape) for shape in sorted(_shapes(layout)))
            verdict = self._fit[id(layout)] = (layout, good)
        return verdict[1]

    def in_table(self, ends_A: Tensor) -> RowProducts:
        """Grouped."""
        return Grouped(ends_A)


PRODUCTS: Mapping[str, Callable[[Arithmetic, torch.device, torch.dtype], LoraProducts]] = {
    "padded": lambda arithmetic, device, dtype: PaddedProducts(dtype, arithmetic),
    "grouped": lambda arithmetic, device, dtype: GroupedProducts(device, dtype, arithmetic.tile),
}
"""The values of `Arithmetic.products`."""


def products_backend(arithmetic: Arithmetic, device: torch.device, dtype: torch.dtype) -> LoraProducts:
    """The backend named by `arithmetic.products`."""
    return PRODUCTS[arithmetic.products](arithmetic, device, dtype)


def _alone(weights: AdapterWeights) -> dict[str, LoraMatrices]:
    return {
        leader: LoraMatrices(matrices.a[None], tuple((index, b[None]) for index, b in matrices.bs))
        for leader, matrices in weights.matrices.items()
    }


# --- trials of grouped products --------------------------------------------------------------------------------------


def _shapes(layout: AdapterLayout) -> set[tuple[int, int, bool]]:
    """Inputs and outputs of its products, and whether the weights are read transposed."""
    shapes = set()
    for group in layout.fused:
        for _, place in group.members:
            shapes |= {(place.n_in, group.width, False), (group.width, place.n_in, True)}
            shapes |= {(layout.rank, place.n_out, False), (place.n_out, layout.rank, True)}
    return shapes


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, exact: bool, n_in: int, n_out: int, transposed: bool) -> bool:
    if n_in % MULTIPLE or n_out % MULTIPLE or dtype not in _TOLERANCE:
        return False
    if device.type == "cuda" and (dtype != torch.bfloat16 or capability(device) not in _CAPABILITIES):
        return False
    try:
        return _agrees(device, dtype, exact, n_in, n_out, transposed)
    except (AttributeError, RuntimeError):  # this torch build or device has no grouped product
        return False


@torch.no_grad()
def _agrees(device: torch.device, dtype: torch.dtype, exact: bool, n_in: int, n_out: int, transposed: bool) -> bool:
    tried = (*_ROWS_TRIED, 4096) if device.type == "cuda" else _ROWS_TRIED
    generator = torch.Generator().manual_seed(0)
    shape = (n_out, n_in) if transposed else (n_in, n_out)
    weights = torch.randn(len(tried), *shape, generator=generator).to(device, dtype)
    weights_AKN = weights.transpose(1, 2) if transposed else weights
    rows_MK = torch.randn(sum(tried), n_in, generator=generator).to(device, dtype)
    together_MN = Grouped(ends(tried, device)).multiply(rows_MK, weights_AKN)
    plain_MN = Tiled.of(tried, 0).multiply(rows_MK, weights_AKN)
    gap = float((together_MN.float() - plain_MN.float()).abs().max())
    if not gap <= _TOLERANCE[dtype] * float(plain_MN.float().abs().max()):
        return False
    starts = [0, *accumulate(tried)]
    parts = [*zip(range(len(tried)), starts, tried, strict=False)]
    parts.extend((parts[-1][0], parts[-1][1], few) for few in _FEW)
    return not exact or all(
        torch.equal(
            Grouped(ends([length], device)).multiply(rows_MK[start : start + length], weights_AKN[adapter][None]),
            together_MN[start : start + length],
        )
        for adapter, start, length in parts
    )
