"""Ways to compute a product over all rows: Motet's tiles, and the library where its bits were tried.

Each way adds over K in one order and rounds once, so all have the same bits; which is taken is a matter of speed alone.

Legend: T packed rows, K inputs, N outputs of a product.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.adapters import TILE, AdapterGroup, AdapterTables
from motet.kernels.cuda.decoder_shape import piece_of, pieces_of
from motet.kernels.cuda.kernels import products as kernels
from motet.kernels.cuda.launches import called, launch
from motet.model.accelerator import capability, products_without_split

_SIDE_BY_SIDE = 16
"""Tiles of the same weights that follow each other."""
A_COLUMNS = 64
"""Columns of A that a program multiplies, however few there are: one machine code for adapters of all ranks."""
_A_DEPTH = 128
"""Most inputs in a step of a product with A."""
_A_BUFFERS = 2
"""Steps of a product with A that are in shared memory at once."""

Adapters = tuple[AdapterTables, AdapterGroup]


@dataclass(frozen=True, eq=False)
class ProductWeight:
    """A frozen product of the base."""

    weight_NK: Tensor
    """Contiguous."""
    bias_N: Tensor | None = None


@dataclass(frozen=True, order=True)
class ProductShape:
    """What a way is chosen for."""

    n_outputs: int
    n_inputs: int
    biased: bool = False
    back: bool = False
    """A product with W itself, for gradients: its inputs are the weight's outputs."""

    @classmethod
    def of(cls, weight: ProductWeight, *, back: bool = False) -> ProductShape:
        """The shape of y = x Wᵀ, or with `back` of y = x W."""
        n_outputs, n_inputs = weight.weight_NK.shape
        return cls(n_inputs, n_outputs, back=True) if back else cls(n_outputs, n_inputs, weight.bias_N is not None)


class Way(Protocol):
    """One way to compute products."""

    @property
    def name(self) -> str:
        """Names it in the file of speeds and in notes."""
        ...

    @property
    def any_rows(self) -> bool:
        """Whether its machine code is the same for all numbers of rows; if not, it is used only at tried numbers."""
        ...

    @property
    def alignment(self) -> int:
        """Bytes that divided all addresses when it was tried; for others it might choose another machine code."""
        ...

    def multiply(
        self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None, *, back: bool
    ) -> None:
        """Fill y = x Wᵀ + bias, or with `back` y = x W; with adapters also `inner`."""
        ...


# --- Motet's own ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnTile:
    """Motet's kernel with one size of tiles."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    by_descriptors: bool = False

    any_rows = True
    alignment = 1

    @property
    def name(self) -> str:
        """Such as `64x128x64-4-4`."""
        return f"{'d' * self.by_descriptors}{self.rows}x{self.columns}x{self.depth}-{self.warps}-{self.stages}"

    def shared_bytes(self, itemsize: int, capability: int) -> int:
        """Most shared memory of a program, with room for barriers; a program multiplies a tile or A, in the same memory.

        Warp groups multiply what is in shared memory, from 64 rows on; warps copy the oldest step to registers before.
        """
        by_groups = capability in _DESCRIBED and self.rows >= _GROUP_ROWS
        own = (self.stages - (not by_groups)) * (self.rows + self.columns) * self.depth
        return max(own, _A_BUFFERS * (TILE + A_COLUMNS) * _A_DEPTH) * itemsize + 1024

    def multiply(
        self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None, *, back: bool
    ) -> None:
        """See `Way`."""
        (n_rows, n_inputs), n_columns = x_TK.shape, y_TN.shape[1]
        weight_NK, bias = weight.weight_NK, None if back else weight.bias_N
        assert x_TK.is_contiguous() and y_TN.is_contiguous() and weight_NK.is_contiguous()
        grid = triton.cdiv(n_rows, self.rows) * triton.cdiv(n_columns, self.columns)
        tensors, numbers, constants, programs = _shrink_of(x_TK, adapters)
        sizes = (n_rows, n_columns, n_inputs, *numbers)
        options = {
            "BIAS": bias is not None, "BACK": back, "ADAPTERS": adapters is not None,
            "ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth, "SIDE_BY_SIDE": _SIDE_BY_SIDE,
            **constants, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip
        bias = x_TK if bias is None else bias  # not read
        if self.by_descriptors:
            x_blocks = TensorDescriptor.from_tensor(x_TK, [self.rows, self.depth])
            block = [self.depth, self.columns] if back else [self.columns, self.depth]
            of_weight = TensorDescriptor.from_tensor(weight_NK, block)
            launch(
                kernels.multiply_by_descriptors, (grid + programs,),
                x_TK, x_blocks, of_weight, bias, y_TN, *tensors, *sizes, **options,
            )  # fmt: skip
        else:
            launch(kernels.multiply, (grid + programs,), x_TK, weight_NK, bias, y_TN, *tensors, *sizes, **options)


def _shrink_of(
    x_TK: Tensor, adapters: Adapters | None
) -> tuple[tuple[Tensor, ...], tuple[int, int, int], dict[str, int], int]:
    """Tensors, numbers and constants of the product with A, and how many programs compute it."""
    n_inputs, piece = x_TK.shape[1], piece_of(x_TK.shape[1])
    constants = {"A_COLUMNS": A_COLUMNS, "A_DEPTH": min(piece, _A_DEPTH)}
    if adapters is None:
        return (x_TK,) * 4, (0, 0, 0), constants, 0
    tables, group = adapters
    programs = len(tables.tiles_N17) * pieces_of(n_inputs) * triton.cdiv(group.width, A_COLUMNS)
    tensors = (group.entries_SC, tables.tiles_N17, tables.n_tiles, group.inner)
    return tensors, (group.width, group.entries_SC.shape[1], piece), constants, programs


def shrink(x_TK: Tensor, adapters: Adapters) -> None:
    """Fill `inner` by a launch of its own."""
    tensors, numbers, constants, programs = _shrink_of(x_TK, adapters)
    launch(kernels.shrink, (programs,), x_TK, *tensors, *x_TK.shape, *numbers, **constants, num_warps=4)


# --- the library ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """Products by torch: by cuBLASLt, with split-K forbidden, and in bfloat16 alone."""

    name = "library"
    any_rows = False
    alignment = 256
    """cuBLASLt chooses a kernel also by what divides the addresses, up to this."""
    switches: AbstractContextManager[object] = products_without_split
    """What forbids split-K."""

    def multiply(
        self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None, *, back: bool
    ) -> None:
        """See `Way`."""
        if adapters is not None:
            shrink(x_TK, adapters)
        called(self.name)
        weight_NK = weight.weight_NK
        with self.switches:
            if back:
                torch.mm(x_TK, weight_NK, out=y_TN)
            elif weight.bias_N is None:
                torch.mm(x_TK, weight_NK.t(), out=y_TN)
            else:
                torch.addmm(weight.bias_N, x_TK, weight_NK.t(), out=y_TN)


# --- which way --------------------------------------------------------------------------------------------------------

ROWS_OF_DECODING = (1, 2, 4, 8, 16, 32, *range(64, 513, 64))
"""Rows of recorded decoding steps."""
ROWS_OF_PASSES = (512, 1024, 2048, 4096, 8192, 16384)
"""Rows that the library multiplies at a time outside recorded steps."""
BUCKETS = (16, 64, 256, 4096)
"""Numbers of rows at which speeds are measured: each for up to as many rows, the last for all beyond."""

_DESCRIBED = (9, 10)
"""Major compute capabilities with descriptors, and with products by warp groups."""
_GROUP_ROWS = 64
"""Least rows of a tile that a warp group multiplies."""
REFERENCE = OwnTile(64, 64, 64, 4, 3)
"""Fits every card; all ways must have its bits."""
_SHRINK = 6.0
"""Microseconds that a product with A takes as a launch of its own (H100, 64 rows, 8 adapters)."""


def bucket_of(n_rows: int) -> int:
    """The number of rows whose speeds count for this many."""
    return next((most for most in BUCKETS if n_rows <= most), BUCKETS[-1])


def start_tile(shape: ProductShape, bucket: int, capability: int) -> OwnTile:
    """The fastest tile on an H200 and an H100, by the number of outputs, before it is measured here."""
    described = _is_described(shape, capability)
    few, some, many = shape.n_outputs <= 4096, shape.n_outputs <= 8192, shape.n_outputs > 65536
    if bucket == 16:
        return OwnTile(16, 32, 256, 4, 4) if some else OwnTile(16, 128, 128, 4, 3)
    if bucket == 64 and shape.n_outputs <= 1024:
        return OwnTile(16, 32, 256, 4, 4)
    if bucket == 64 or (bucket == 256 and shape.n_outputs <= 2048):
        columns, depth, stages = (32, 128, 5 if described else 4) if few else (64, 128, 4) if some else (128, 64, 4)
        return OwnTile(64, columns, depth, 4, stages, described)
    if bucket == 256 and not many:
        return OwnTile(128, 64, 128, 4, 3, described) if few else OwnTile(64, 128, 64, 4, 4, described)
    return OwnTile(256, 128, 64, 8, 3, described) if bucket == 256 else OwnTile(128, 256, 64, 8, 3, described)


def tiles_to_measure(shape: ProductShape, bucket: int, capability: int) -> list[OwnTile]:
    """Tiles whose speed is worth measuring."""
    few = [(16, 32, 256, 4, 4), (16, 32, 128, 4, 5), (16, 64, 128, 4, 4), (16, 128, 128, 4, 3)]
    some = [(64, 32, 128, 4, 4), (64, 32, 256, 4, 3), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4)]
    many = [(128, 64, 128, 4, 3), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (128, 256, 64, 8, 3)]
    sizes = few if bucket == 16 else few[:1] + some if bucket == 64 else some + many if bucket == 256 else many
    found = [OwnTile(*size) for size in sizes]
    if _is_described(shape, capability) and bucket > 16:
        tall = [(64, 32, 128, 4, 5), *(size for size in sizes if size[0] >= 64)]
        found += [OwnTile(*size, True) for size in tall]
    return found


def _is_described(shape: ProductShape, capability: int) -> bool:
    """Whether this card has descriptors, and rows of the product's matrices begin at multiples of 16 bytes."""
    return capability in _DESCRIBED and shape.n_inputs % 8 == 0 and shape.n_outputs % 8 == 0


Speeds = dict[tuple[ProductShape, int], dict[str, float]]
"""Microseconds of ways by name, by shape and number of rows (one of `BUCKETS`)."""


@dataclass
class WayTable:
    """The way of each product: by speed, among ways whose bits were tried."""

    capability: int
    """Major compute capability."""
    shared: int
    """Bytes of shared memory that a program may have."""
    itemsize: int
    speeds: Speeds = field(default_factory=dict)
    library: Way | None = None
    tried: dict[ProductShape, frozenset[int]] = field(default_factory=dict)
    """Numbers of rows at which the library has the bits of `REFERENCE`."""
    left_out: set[OwnTile] = field(default_factory=set)
    """Tiles that do not run here, or have other bits."""
    _own: dict[tuple[ProductShape, int], OwnTile] = field(default_factory=dict)

    def leave_out(self, tile: OwnTile) -> None:
        """Never choose it again."""
        self.left_out.add(tile)
        self._own.clear()

    def runs(self, tile: OwnTile) -> bool:
        """Whether this card has the shared memory, and it was not left out."""
        return tile not in self.left_out and tile.shared_bytes(self.itemsize, self.capability) <= self.shared

    def own(self, shape: ProductShape, n_rows: int) -> OwnTile:
        """The tile for this many rows."""
        key = shape, bucket_of(n_rows)
        if key not in self._own:
            measured, start = self.speeds.get(key, {}), self.start(*key)
            tiles = [tile for tile in (start, *self.others(*key)) if tile.name in measured]
            self._own[key] = min(tiles, key=lambda tile: measured[tile.name], default=start)
        return self._own[key]

    def start(self, shape: ProductShape, bucket: int) -> OwnTile:
        """The tile before any is measured."""
        tile = start_tile(shape, bucket, self.capability)
        return tile if self.runs(tile) else REFERENCE

    def others(self, shape: ProductShape, bucket: int) -> list[OwnTile]:
        """Tiles that may be faster."""
        start = self.start(shape, bucket)
        tiles = tiles_to_measure(shape, bucket, self.capability)
        return [tile for tile in tiles if tile != start and self.runs(tile)]

    def choose(self, shape: ProductShape, n_rows: int, *, adapted: bool = False) -> Way:
        """The fastest way; the library only where it was measured too."""
        own = self.own(shape, n_rows)
        if self.library is None or n_rows not in self.tried.get(shape, ()):
            return own
        measured = self.speeds.get((shape, bucket_of(n_rows)), {})
        by_library, by_own = measured.get(self.library.name), measured.get(own.name)
        if by_library is None or by_own is None:
            return own
        return self.library if by_library + _SHRINK * adapted < by_own else own

    def split(self, shape: ProductShape, n_rows: int, *, adapted: bool = False) -> list[tuple[int, Way]]:
        """Ways of a product's rows, each with its number of them; a row's bits are the same by each.

        Rows of a pass are cut into numbers at which the library was tried, where it is faster; the rest is Motet's own.
        """
        parts, left = list[tuple[int, Way]](), n_rows
        if n_rows not in self.tried.get(shape, ()):
            for size in reversed(ROWS_OF_PASSES):
                while left >= size and (way := self.choose(shape, size)) is self.library:
                    parts.append((size, way))
                    left -= size
        return [*parts, (left, self.choose(shape, left, adapted=adapted))] if left else parts


def table_for(device: torch.device, dtype: torch.dtype) -> WayTable:
    """The table before anything is measured or tried; on a CPU for Triton's interpreter."""
    if device.type == "cpu":
        return WayTable(0, 1 << 30, dtype.itemsize)
    shared = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return WayTable(capability(device), shared, dtype.itemsize)
