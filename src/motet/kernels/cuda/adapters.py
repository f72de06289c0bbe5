"""Adapters by address: which rows have which adapter, and where its matrices are in device memory.

Kernels read both from device memory, so that adapters join and leave a recorded graph by writes alone. Nothing is stacked
or copied for a layer.

Legend: T packed rows, N tiles of rows, S slots of adapters, L layers, K inputs, W width of A, P pieces of K, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.core.types import IntArray
from motet.kernels.cuda.decoder_shape import pieces_of
from motet.model.accelerator import send
from motet.model.arithmetic import round_up
from motet.model.covered_decoder import linears_of
from motet.model.lora import AdapterLayout, AdapterWeights, FusedLinears, NoAdapters, Routing
from motet.model.lora_model import LoraModel
from motet.model.routing import SamplerRouting, TrainerRouting

TILE = 16
"""Rows in a tile."""
ALIGNMENT = 64
"""Bytes: addresses of an adapter's matrices are multiples of it."""
PARTS = (3, 1, 2, 1)
"""Parts of the fused products of a layer: queries, keys and values; attention output; gate and up; down."""

Run = tuple[AdapterWeights, int, int]
"""Consecutive rows with one adapter: weights, first row, end row."""


# --- places in a base -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductPart:
    """Columns of a fused product that belong together, such as the keys."""

    member: int
    """Index of their linear layer among the fused ones; Phi-3 has one linear layer for several parts."""
    first: int
    """Their first column in that layer's output."""
    stride: int
    """Outputs of that layer: elements between rows of its Bᵀ."""


@dataclass(frozen=True)
class Place:
    """A fused product of the base that adapters can change."""

    index: int
    """Layer · 4 + which (see `PARTS`)."""
    n_inputs: int
    parts: tuple[ProductPart, ...]


def _parts(sizes: Sequence[int], parts: Sequence[int]) -> tuple[ProductPart, ...]:
    """Parts of these numbers of columns, in linear layers of these sizes."""
    found = []
    member = first = 0
    for columns in parts:
        if first == sizes[member]:
            member, first = member + 1, 0
        found.append(ProductPart(member, first, sizes[member]))
        first += columns
    return tuple(found)


class Places:
    """Where adapters of one base belong, and where matrices of each layout are in an adapter's flat tensor."""

    def __init__(self, products: Iterable[tuple[FusedLinears, Sequence[int]]], itemsize: int) -> None:
        """`products`: the four fused products of each layer, each with the columns of its parts."""
        self.itemsize = itemsize
        self.places: dict[str, Place] = {}
        for index, (fused, columns) in enumerate(products):
            n_inputs = fused.frozen.shape[1]
            self.places[fused.leader] = Place(index, n_inputs, _parts(fused.sizes, columns))
        self.n_layers = len(self.places) // len(PARTS)
        self._by_index = {place.index: place for place in self.places.values()}
        self._layouts: dict[int, tuple[AdapterLayout, list[NDArray[np.int64]], list[NDArray[np.bool_]]]] = {}

    @classmethod
    def of(cls, base: LoraModel) -> Places:
        """Those of a covered base."""
        config = base.model.config.get_text_config()
        products = []
        for layer in base.decoder.layers:  # type: ignore[union-attr]
            for which, (linear, *_) in enumerate(linears_of(layer)):
                sizes, total = linear.fused.sizes, sum(linear.fused.sizes)
                if which == 0:
                    rest = total // (config.num_attention_heads + 2 * config.num_key_value_heads)
                    columns = [config.num_attention_heads * rest, *[config.num_key_value_heads * rest] * 2]
                else:
                    columns = [total // PARTS[which]] * PARTS[which]
                assert len(sizes) in (1, len(columns))
                products.append((linear.fused, columns))
        return cls(products, base.dtype.itemsize)

    def place(self, layer: int, which: int) -> Place:
        """A fused product."""
        return self._by_index[layer * len(PARTS) + which]

    def entries(self, weights: AdapterWeights) -> list[NDArray[np.int64]]:
        """The entries [L, C] of one adapter, for each of the four products (see `AdapterGroup.entries_SC`)."""
        address = weights.flat.data_ptr()
        if address % ALIGNMENT:
            raise ValueError(f"an adapter's memory begins at a multiple of {ALIGNMENT} bytes")
        _, offsets, addresses = self._layouts.get(id(weights.layout)) or self._measured(weights.layout)
        return [own + address * mask for own, mask in zip(offsets, addresses, strict=True)]

    def _measured(
        self, layout: AdapterLayout
    ) -> tuple[AdapterLayout, list[NDArray[np.int64]], list[NDArray[np.bool_]]]:
        """Entries relative to an adapter's memory, and which of them are addresses; keeps the layout, so its id is unique."""
        offsets = [np.zeros((self.n_layers, 3 + 2 * parts), np.int64) for parts in PARTS]
        addresses = [np.zeros_like(own, dtype=np.bool_) for own in offsets]
        for own in offsets:
            own[:, 3::2] = -1
        for group in layout.fused:
            place = self.places[group.leader]
            layer, which = divmod(place.index, len(PARTS))
            own, mask = offsets[which][layer], addresses[which][layer]
            own[:3] = group.offset * self.itemsize, group.width, layout.rank
            mask[0] = True
            adapted = {index: (column, linear) for column, (index, linear) in enumerate(group.members)}
            for index, part in enumerate(place.parts):
                if part.member in adapted:
                    column, linear = adapted[part.member]
                    own[3 + 2 * index] = column * layout.rank
                    own[4 + 2 * index] = (linear.offset + part.first) * self.itemsize
                    mask[4 + 2 * index] = True
        self._layouts[id(layout)] = layout, offsets, addresses
        return self._layouts[id(layout)]


# --- rows of a pass ---------------------------------------------------------------------------------------------------


def runs_of(routing: Routing) -> list[Run]:
    """The runs of rows with an adapter on linear layers."""
    if isinstance(routing, TrainerRouting):
        found = [(segment.weights, segment.start, segment.stop) for segment in routing.segments]
    elif isinstance(routing, SamplerRouting):
        found = [(weights, start, start + n) for weights, start, n in routing.runs if weights is not None]
    elif isinstance(routing, NoAdapters):
        return []
    else:
        raise TypeError(f"{type(routing).__name__} has no runs of rows")
    return [run for run in found if run[0].layout.fused]


def tiles_of(slots_T: IntArray) -> IntArray:
    """Tiles [N, 17] of rows with these slots (-1 for no adapter): the slot, then up to 16 rows, and -1 in free places.

    Every row is in one tile, in row order within its slot.
    """
    order = np.argsort(slots_T, kind="stable")
    sorted_T = slots_T[order]
    slots, firsts, counts = np.unique(sorted_T, return_index=True, return_counts=True)
    tiles_per_slot = -(-counts // TILE)
    starts = np.cumsum(tiles_per_slot) - tiles_per_slot
    tiles = np.full((int(tiles_per_slot.sum()), 1 + TILE), -1, np.int32)
    tiles[:, 0] = np.repeat(slots, tiles_per_slot)
    within = np.arange(len(slots_T)) - np.repeat(firsts, counts)
    tiles[np.repeat(starts, counts) + within // TILE, 1 + within % TILE] = order
    return tiles


def most_tiles(n_rows: int, n_slots: int) -> int:
    """Most tiles of so many rows with adapters in so many slots, or with none."""
    return min(n_rows, n_rows // TILE + n_slots + 1)


# --- tables on the device ---------------------------------------------------------------------------------------------


@dataclass
class AdapterGroup:
    """The adapters of one fused product."""

    entries_SC: Tensor
    """int64 [S, 3 + 2 * parts], contiguous: address of Aᵀ [K, W], W and rank; then for each part its first column in A (-1:
    not adapted) and the address of its Bᵀ, whose rows are `strides` apart."""
    width: int
    """Largest W of any slot: an upper bound, for grids."""
    inner: Tensor
    """fp32 [P, T, width]: A·x in pieces of K. The product before writes it, the consumer of the product reads it."""
    strides: tuple[int, ...]
    """Elements between rows of Bᵀ, for each part."""


@dataclass
class AdapterTables:
    """Device memory that a step or a pass writes once. Every row that counts is in exactly one tile."""

    places: Places
    tiles_N17: Tensor
    """int32 [N, 17]: the slot (-1: no adapter), then up to 16 rows of the pass, and -1 in free places."""
    n_tiles: Tensor
    """int32 [1]: tiles in use; programs of later tiles return at once."""
    n_rows: int
    adapted: bool
    """Whether a row may have an adapter. If not, only the tiles are used."""
    widths: tuple[int, ...] = (0,) * len(PARTS)
    """Largest W in any slot, for each of the four products."""
    entries: tuple[Tensor, ...] = ()
    """int64 [L, S, 3 + 2 * parts] for each of the four products; views of `memory`."""
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """All entries, to write them at once."""
    keep: tuple[AdapterWeights, ...] = ()
    """Adapters whose memory must live as long as this."""
    apart: bool = False
    """Whether each of a layer's four products has memory of its own for products with A, for a backward pass."""
    inner: dict[int, Tensor] = field(default_factory=dict)
    """Memory for products with A."""

    def group(self, layer: int, which: int) -> AdapterGroup:
        """The adapters of a product: 0 queries, keys and values; 1 attention output; 2 gate and up; 3 down."""
        place, width = self.places.place(layer, which), self.widths[which]
        shape = (pieces_of(place.n_inputs), self.n_rows, width)
        return AdapterGroup(
            self.entries[which][layer], width, self._room(shape, which), tuple(part.stride for part in place.parts)
        )

    def _room(self, shape: tuple[int, ...], which: int) -> Tensor:
        """Memory that all products of a pass share, unless `apart`: each is read before the next is written."""
        key, sharing = (which, [which]) if self.apart else (0, range(len(PARTS)))
        if key not in self.inner:
            most = max(
                pieces_of(self.places.place(0, each).n_inputs) * self.n_rows * self.widths[each] for each in sharing
            )
            self.inner[key] = torch.empty(most, dtype=torch.float32, device=self.tiles_N17.device)
        size = shape[0] * shape[1] * shape[2]
        return self.inner[key][:size].view(shape)

    @classmethod
    def empty(
        cls, places: Places, n_rows: int, n_slots: int, device: torch.device, widths: Sequence[int] | None = None
    ) -> AdapterTables:
        """Tables of fixed size without an adapter, for a recorded step. Without slots no row can have an adapter.

        `widths` bounds the W of later adapters, for each of the four products (see `widths_of`).
        """
        tiles = torch.full((most_tiles(n_rows, n_slots), 1 + TILE), -1, dtype=torch.int32, device=device)
        tables = cls(places, tiles, torch.zeros(1, dtype=torch.int32, device=device), n_rows, n_slots > 0)
        if n_slots:
            sizes = [places.n_layers * n_slots * (3 + 2 * parts) for parts in PARTS]
            tables.memory = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            tables.entries = tuple(part.view(places.n_layers, n_slots, -1) for part in tables.memory.split(sizes))
            assert widths is not None
            tables.widths = tuple(widths)
            tables._room((1, n_rows, max(tables.widths)), 0)
        return tables

    @classmethod
    def of(cls, places: Places, runs: Sequence[Run], n_rows: int, device: torch.device) -> AdapterTables:
        """The tables of one pass."""
        slots_T = np.full(n_rows, -1, np.int32)
        slots: dict[int, int] = {}
        members: list[AdapterWeights] = []
        for weights, start, stop in runs:
            if id(weights) not in slots:
                slots[id(weights)] = len(members)
                members.append(weights)
            slots_T[start:stop] = slots[id(weights)]
        tiles = tiles_of(slots_T)
        tiles_N17, n_tiles = send(device, tiles, np.array([len(tiles)], np.int32))
        tables = cls(places, tiles_N17, n_tiles, n_rows, bool(members))
        if members:
            host = host_entries(places, members, len(members))
            (tables.memory,) = send(device, np.concatenate([part.ravel() for part in host]))
            sizes = [part.size for part in host]
            tables.entries = tuple(part.view(places.n_layers, len(members), -1) for part in tables.memory.split(sizes))
            tables.widths = widths_of(places, members)
            tables.keep = tuple(members)
        return tables


def host_entries(places: Places, members: Sequence[AdapterWeights | None], n_slots: int) -> list[NDArray[np.int64]]:
    """Entries [L, S, C] of adapters in slots 0, 1, …, for each of the four products; zeros in free slots.

    Their concatenation, flat, is the contents of `AdapterTables.memory`.
    """
    host = [np.zeros((places.n_layers, n_slots, 3 + 2 * parts), np.int64) for parts in PARTS]
    for part in host:
        part[..., 3::2] = -1
    for slot, weights in enumerate(members):
        if weights is not None:
            for part, own in zip(host, places.entries(weights), strict=True):
                part[:, slot] = own
    return host


def widths_of(places: Places, members: Iterable[AdapterWeights]) -> tuple[int, ...]:
    """Largest W of adapters, for each of the four products; a multiple of 16."""
    widths = [TILE] * len(PARTS)
    for layout in {id(weights.layout): weights.layout for weights in members}.values():
        for group in layout.fused:
            which = places.places[group.leader].index % len(PARTS)
            widths[which] = max(widths[which], round_up(group.width, TILE))
    return tuple(widths)
