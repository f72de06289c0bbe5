"""Tries the bits of ways to multiply when a base is loaded, in about a second.

Every row is compared, on three kinds of rows at once: normal numbers, numbers with outliers, and sums that nearly cancel. A
library's kernel depends on the number of rows, so it is tried at every number at which it may be used. Motet's own kernels have
one machine code for all numbers.

Legend: T packed rows, K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from motet.core.errors import BaseModelError
from motet.kernels.cuda import product_timings
from motet.kernels.cuda.adapters import TILE, AdapterGroup, AdapterTables, Places
from motet.kernels.cuda.decoder_shape import pieces_of
from motet.kernels.cuda.product_backends import (
    A_COLUMNS,
    BUCKETS,
    REFERENCE,
    ROWS_OF_DECODING,
    ROWS_OF_PASSES,
    Adapters,
    Library,
    ProductShape,
    ProductWeight,
    Way,
    WayTable,
    shrink,
    table_for,
)
from motet.kernels.cuda.products import Products
from motet.model.accelerator import kernel_failures, reason_of

_KINDS = 3
_OUTLIERS, _SMALL = 300.0, 0.001
_OTHER_ROWS = (1, 7)
"""Numbers of rows at which a tile is tried besides the largest of its bucket."""
_ROOM = 1 << 30
"""Most bytes of a product's outputs."""
_CHECKED = 96
"""Rows and outputs of which values are compared with torch's."""

Replay = Callable[[], Tensor]


class Captures(Protocol):
    """Records runs as graphs, on the stream and with the workspace of decoding: `motet.model.accelerator.Recorder`."""

    def capture(self, run: Replay, *, first: bool) -> Replay:
        """What replays the run."""
        ...


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows that a base multiplies."""

    decoding: tuple[int, ...] = ROWS_OF_DECODING
    """In recorded graphs."""
    passes: tuple[int, ...] = ROWS_OF_PASSES
    """Outside."""


def tried_products(
    weights: Sequence[ProductWeight], device: torch.device, dtype: torch.dtype, recorder: Captures
) -> tuple[Products, list[str]]:
    """The products of a base with these weights, each by its fastest way, and notes about ways that are left out.

    Decoding must record on the stream of `recorder`. On a CPU nothing is measured or tried: its interpreter shows nothing
    about a card.

    Raises:
        BaseModelError: this card does not give the bits that exact sampling needs, so torch must compute the base.
    """
    table = table_for(device, dtype)
    if device.type == "cpu":
        return Products(table), []
    library = Library() if dtype == torch.bfloat16 else None
    product_timings.bring(table, weights, library, recorder.capture, device, product_timings.seconds_to_measure())
    trial = Trial(device, dtype, recorder)
    shapes = {ProductShape.of(weight, back=back) for weight in weights for back in (False, True)}
    trial.run(table, shapes, library)
    return Products(table), trial.notes


def rows_of_three_kinds(n_rows: int, n_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers whose second half cancels the first; numbers with outliers; and normal numbers: [T, K], in turn.

    The first row is of the kind that shows best how a sum was added, for products of one row.
    """
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x_TK, half = normal(n_rows, n_inputs), n_inputs // 2
    cancelling, outliers = x_TK[::_KINDS], x_TK[1::_KINDS]
    outliers[:, :: max(n_inputs // 8, 1)] *= _OUTLIERS
    outliers *= torch.exp2(normal(len(outliers), 1))
    cancelling[:, half : 2 * half] = -cancelling[:, :half] * (1 + 0.002 * normal(len(cancelling), half))
    return x_TK.to(dtype)


def weight_of(shape: ProductShape, dtype: torch.dtype, device: torch.device) -> ProductWeight:
    """A weight; sums of every second output cancel with cancelling rows."""
    generator = torch.Generator(device).manual_seed(2)
    n_outputs, n_inputs = shape.n_outputs, shape.n_inputs
    weight_NK = torch.randn(n_outputs, n_inputs, generator=generator, device=device, dtype=dtype).mul_(n_inputs**-0.5)
    half = n_inputs // 2
    weight_NK[::2, half : 2 * half] = weight_NK[::2, :half]
    if shape.back:
        return ProductWeight(weight_NK.t().contiguous())
    if not shape.biased:
        return ProductWeight(weight_NK)
    bias_N = torch.randn(n_outputs, generator=generator, device=device, dtype=dtype)
    bias_N[::2] *= _SMALL  # a large one would hide how a sum that cancels was added
    return ProductWeight(weight_NK, bias_N)


@dataclass
class Trial:
    """Tries ways on one device, for one base."""

    device: torch.device
    dtype: torch.dtype
    recorder: Captures
    sizes: Sizes = field(default_factory=Sizes)
    notes: list[str] = field(default_factory=list)
    """Which ways are left out, and why."""

    def run(self, table: WayTable, shapes: Iterable[ProductShape], library: Way | None) -> None:
        """Leave the table only ways with equal bits; `library` is used at the numbers of rows at which it has them.

        Raises:
            BaseModelError: Motet's own product has wrong values, or other bits in other company.
        """
        for shape in sorted(set(shapes)):
            try:
                example = _Example.of(shape, self.sizes, self.dtype, self.device)
                why = example.wrong_values()
            except kernel_failures() as error:
                why = f"fails: {reason_of(error)}"
            if why:
                raise BaseModelError(f"{_product(shape)} by Motet's kernels {why}")
            self._try_own(table, example)
            if library is not None:
                table.tried[shape] = self._rows_of(library, example)
        if library is not None and any(table.tried.values()):
            table.library = library

    def _try_own(self, table: WayTable, example: _Example) -> None:
        """In graphs with the machine code that also multiplies A, outside without."""
        for bucket in BUCKETS:
            rows = [*_OTHER_ROWS, min(bucket, example.most)]
            while why := self._why_not(tile := table.own(example.shape, bucket), example, rows):
                if tile == REFERENCE:
                    raise BaseModelError(f"{_product(example.shape)} by Motet's kernels {why}")
                self.notes.append(f"tile {tile.name} is not used: {_product(example.shape)} {why}")
                table.leave_out(tile)

    def _why_not(self, way: Way, example: _Example, rows: Sequence[int]) -> str:
        try:
            adapted = not example.shape.back
            unequal = [*example.unequal(way, rows), *self._unequal_in_graph(way, example, rows, adapted=adapted)]
        except kernel_failures() as error:
            return f"fails: {reason_of(error)}"
        return f"has other bits at {_numbers(unequal)} rows" if unequal else ""

    def _unequal_in_graph(
        self, way: Way, example: _Example, rows: Sequence[int], *, adapted: bool = False
    ) -> list[int]:
        """The numbers of rows at which a row has other bits in a recorded graph."""
        if not rows:
            return []
        adapters = [example.adapted(n_rows) if adapted else None for n_rows in rows]
        replay = self.recorder.capture(lambda: example.compare(way, rows, adapters), first=True)
        return example.counted(rows, replay())

    def _rows_of(self, library: Way, example: _Example) -> frozenset[int]:
        """The numbers of rows at which the library has equal bits."""
        shape = example.shape
        decoding = [] if shape.back else [rows for rows in self.sizes.decoding if rows <= example.most]
        rows = sorted({*decoding, *(rows for rows in self.sizes.passes if rows <= example.most)})
        try:
            outside = example.unequal(library, rows)
            inside = self._unequal_in_graph(library, example, [n for n in decoding if n not in outside])
        except kernel_failures() as error:
            self.notes.append(f"the library is not used for {_product(shape)}: {reason_of(error)}")
            return frozenset()
        if unequal := sorted({*outside, *inside}):
            self.notes.append(
                f"the library is not used for {_product(shape)} of {_numbers(unequal)} rows, where its bits differ"
            )
        return frozenset(rows) - {*outside, *inside}


@dataclass(frozen=True)
class _Example:
    """Rows and a weight of one shape, an adapter's A, and their products: by the reference, and by a launch for A alone."""

    shape: ProductShape
    x_TK: Tensor
    weight: ProductWeight
    want_TN: Tensor
    a_KW: Tensor
    inner: Tensor
    """x A of the first rows, in pieces of K."""

    @classmethod
    def of(cls, shape: ProductShape, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> _Example:
        most = max(BUCKETS[0], *sizes.passes, *(() if shape.back else sizes.decoding))
        most = min(most, _ROOM // (dtype.itemsize * max(shape.n_outputs, shape.n_inputs)))
        x_TK, weight = rows_of_three_kinds(most, shape.n_inputs, dtype, device), weight_of(shape, dtype, device)
        want_TN = x_TK.new_empty(most, shape.n_outputs)
        REFERENCE.multiply(x_TK, weight, want_TN, None, back=shape.back)
        a_KW = weight_of(ProductShape(A_COLUMNS, shape.n_inputs), dtype, device).weight_NK.t().contiguous()
        found = cls(shape, x_TK, weight, want_TN, a_KW, torch.empty(0))
        first_TK = x_TK[:TILE]
        adapters = found.adapted(len(first_TK))
        shrink(first_TK, adapters)
        return replace(found, inner=adapters[1].inner)

    @property
    def most(self) -> int:
        """Number of rows."""
        return len(self.x_TK)

    def wrong_values(self) -> str:
        """What is wrong with the reference, compared with torch's product in fp64 and with itself in another order."""
        x_TK, dense = self.x_TK[:_CHECKED].double(), self.weight.weight_NK
        weight_KN = (dense[:, :_CHECKED] if self.shape.back else dense[:_CHECKED].t()).double()
        bias = 0.0 if self.weight.bias_N is None else self.weight.bias_N[:_CHECKED].double()
        want, found = x_TK @ weight_KN + bias, self.want_TN[:_CHECKED, :_CHECKED].double()
        of_sums = self.shape.n_inputs * torch.finfo(torch.float32).eps * (x_TK.abs() @ weight_KN.abs())
        if not bool(((found - want).abs() <= of_sums + torch.finfo(self.want_TN.dtype).eps * want.abs()).all()):
            return "has wrong values"
        first_TK, a_KW = self.x_TK[:TILE].double(), self.a_KW.double()
        of_sums = self.shape.n_inputs * torch.finfo(torch.float32).eps * (first_TK.abs() @ a_KW.abs())
        if not bool(((self.inner.double().sum(0) - first_TK @ a_KW).abs() <= of_sums).all()):
            return "has wrong values for adapters"
        turned, again_TN = self.x_TK.roll(_OTHER_ROWS[-1], 0), torch.empty_like(self.want_TN)
        REFERENCE.multiply(turned, self.weight, again_TN, None, back=self.shape.back)
        equal = torch.equal(_bits(again_TN).roll(-_OTHER_ROWS[-1], 0), _bits(self.want_TN))
        return "" if equal else "has other bits in other places of a tile"

    def compare(self, way: Way, rows: Sequence[int], adapters: Sequence[Adapters | None]) -> Tensor:
        """For each number of rows, with its adapters, whether a row has other bits; waits for nothing."""
        flags = []
        for n_rows, of_rows in zip(rows, adapters, strict=True):
            y_TN = torch.empty_like(self.want_TN[:n_rows])
            way.multiply(self.x_TK[:n_rows], self.weight, y_TN, of_rows, back=self.shape.back)
            unequal = (_bits(y_TN) != _bits(self.want_TN[:n_rows])).any()
            if of_rows is not None:
                first = of_rows[1].inner[:, :TILE]
                unequal |= (_bits(first) != _bits(self.inner[:, : first.shape[1]])).any()
            flags.append(unequal)
        return torch.stack(flags)

    def unequal(self, way: Way, rows: Sequence[int]) -> list[int]:
        """The numbers of rows at which a row has other bits."""
        return self.counted(rows, self.compare(way, rows, [None] * len(rows)))

    def adapted(self, n_rows: int) -> Adapters:
        """Tables of so many rows, of which the first have the adapter."""
        device, used = self.x_TK.device, min(n_rows, TILE)
        tiles = torch.tensor([[0, *range(used), *[-1] * (TILE - used)]], dtype=torch.int32, device=device)
        n_tiles = torch.ones(1, dtype=torch.int32, device=device)
        entries = torch.tensor([[self.a_KW.data_ptr(), A_COLUMNS, A_COLUMNS, -1, 0]], device=device)
        inner = torch.full((pieces_of(self.shape.n_inputs), n_rows, A_COLUMNS), torch.nan, device=device)
        tables = AdapterTables(Places([], self.x_TK.element_size()), tiles, n_tiles, n_rows, adapted=True)
        return tables, AdapterGroup(entries, A_COLUMNS, inner, (1,))

    @staticmethod
    def counted(rows: Sequence[int], flags: Tensor) -> list[int]:
        """Those numbers of rows whose flag is set."""
        return [n_rows for n_rows, unequal in zip(rows, flags.tolist(), strict=True) if unequal]


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)


def _product(shape: ProductShape) -> str:
    what = f"a product of {shape.n_inputs} inputs and {shape.n_outputs} outputs"
    return what + (" with a bias" if shape.biased else " for gradients" if shape.back else "")


def _numbers(numbers: Sequence[int]) -> str:
    """At most a few of them."""
    few = sorted(set(numbers))
    return ", ".join(map(str, few[:4])) + (f" and {len(few) - 4} more numbers of" if len(few) > 4 else "")
