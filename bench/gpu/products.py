"""Does a product give each row the same bits, whatever the number of rows and the row's place?

    python -m bench.gpu.products DEVICE SHAPE…

All rows are compared, forward with and without bias, and backward; numbers are normal, or have outliers, or cancel. Ways of
Motet are judged: the exit code is 1 where a row differs. The library's own choice is reported beside them.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from bench.gpu.figures import say, unequal
from bench.speed.shapes import SHAPES
from torch import Tensor

from motet.model.arithmetic import Arithmetic
from motet.model.frozen_weight import FrozenWeight

ROWS = (1, 7, 8, 16, 33, 63, 64, 65, 100, 128, 256, 512, 1000, 2048, 4096)
FEW_ROWS = (1, 7, 33, 64, 65)
WIDE = 100_000
"""From this many outputs on (heads), at most `WIDE_ROWS` rows."""
WIDE_ROWS = 512
ONE_TILE, TILES, LIBRARY = "one tile", "tiles", "library"
NUMBERS = ("normal", "outliers", "cancelling")
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [M, K], weight [N, K], bias [N] → [M, N]; and the same for a slope [M, N], backward, without a bias → [M, K]."""


def bits_of(x: Tensor) -> Tensor:
    """The numbers as integers, so that NaN equals itself and the zeros differ."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def rows_unequal(left: Tensor, right: Tensor) -> int:
    """Rows with another bit anywhere."""
    return int((bits_of(left) != bits_of(right)).any(-1).sum())


def shapes_of(name: str) -> list[tuple[int, int]]:
    """(K, N) of a decoder's products: q with k and v, output, gate with up, down, head."""
    shape = SHAPES[name]
    wide, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = wide // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return [(wide, wide + 2 * keys), (wide, wide), (wide, 2 * inner), (inner, wide), (wide, shape["vocab_size"])]


def numbers(kind: str, rows: int, width: int, device: torch.device) -> Tensor:
    """Inputs [M, width]; `cancelling` has large terms of both signs."""
    x_MK = torch.randn(rows, width, device=device)
    if kind == "outliers":
        x_MK[:, :: max(1, width // 7)] *= 300
    elif kind == "cancelling":
        half = width // 2
        x_MK[:, half : 2 * half] = -x_MK[:, :half] * (1 + 1e-2 * torch.randn(rows, half, device=device))
    return x_MK.to(torch.bfloat16)


def compared(
    way: Product, of: Product, kn: tuple[int, int], device: torch.device, *, bias: bool, backward: bool
) -> tuple[int, int, list[int]]:
    """Rows that differ from those of one product of all rows by `of`, rows compared, and numbers of rows at which some do."""
    n_in, n_out = kn
    torch.manual_seed(n_in + n_out)
    weight_NK = (torch.randn(n_out, n_in, device=device) / n_in**0.5).to(torch.bfloat16)
    bias_N = torch.randn(n_out, device=device).to(torch.bfloat16) if bias else None
    counts = FEW_ROWS if device.type == "cpu" else tuple(m for m in ROWS if n_out < WIDE or m <= WIDE_ROWS)
    bad, seen, where = 0, 0, set[int]()
    for kind in NUMBERS:
        x = numbers(kind, max(counts), n_out if backward else n_in, device)
        whole = of(x, weight_NK, bias_N)
        for rows in counts:
            shifted = rows // 2
            taken = torch.roll(x, -shifted, 0)[:rows]  # each row at another place
            count = rows_unequal(way(taken, weight_NK, bias_N), torch.roll(whole, -shifted, 0)[:rows])
            bad, seen = bad + count, seen + rows
            if count:
                where.add(rows)
    return bad, seen, sorted(where)


def torch_way(device: torch.device, *, backward: bool) -> Product:
    """`FrozenWeight` with the device's exact arithmetic, as passes of an uncovered base multiply."""
    arithmetic = Arithmetic.of(device, torch.bfloat16, experts=False)

    def multiply(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        frozen = FrozenWeight(weight_NK, bias_N)
        frozen.compute_with(replace(arithmetic))
        pad = -len(x_MK) % arithmetic.rows
        rows = torch.cat([x_MK, x_MK[-1:].expand(pad, -1)])
        return (frozen.back(rows) if backward else frozen(rows))[: len(x_MK)]

    return multiply


def room_ways(device: torch.device) -> Mapping[str, Mapping[bool, Product]]:
    """Products of `motet.kernels.cuda`, forward (False) and backward: one tile, the tile of all rows, the library."""
    if device.type == "cpu":
        importlib.import_module("tests.support.triton_on_cpu")
    from motet.kernels.cuda.product_backends import REFERENCE, Library, ProductShape, ProductWeight, Way, table_for

    table = table_for(device, torch.bfloat16)

    def way(name: str, *, back: bool) -> Product:
        def multiply(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
            weight, rows = ProductWeight(weight_NK, bias_N), x_MK.contiguous()
            shape = ProductShape.of(weight, back=back)
            ways: dict[str, Way] = {ONE_TILE: REFERENCE, TILES: table.own(shape, len(rows)), LIBRARY: Library()}
            y_MN = rows.new_empty(len(rows), shape.n_outputs)
            ways[name].multiply(rows, weight, y_MN, None, back=back)
            return y_MN

        return multiply

    return {name: {back: way(name, back=back) for back in (False, True)} for name in (ONE_TILE, TILES, LIBRARY)}


def judged(
    name: str, ways: Mapping[bool, Product], of: Mapping[bool, Product], shape: str, device: torch.device
) -> int:
    """Print figures of a way, forward (False) and backward, against `of`; returns the rows that were unequal."""
    total = 0
    few = device.type == "cpu" and of is not ways
    for row, bias, backward in (("no bias", False, False), ("bias", True, False), ("backward", False, True)):
        bad, seen = 0, 0
        for kn in shapes_of(shape)[: 1 if few else None]:  # the interpreter is slow
            found = compared(ways[backward], of[backward], kn, device, bias=bias, backward=backward)
            bad, seen = bad + found[0], seen + found[1]
            if found[0]:
                print(f"{name}, {shape} {kn}, {row}: {found[0]} of {found[1]} rows, at {found[2]} rows")
        say(unequal(f"{shape}: rows of products, {name}, {row}", bad, seen))
        total += bad
    return total


@torch.no_grad()
def main(words: list[str]) -> int:
    """Compare all ways; returns 1 where one of Motet's own differs."""
    device, bad = torch.device(words[0]), 0
    room = room_ways(device)
    for shape in words[1:]:
        bad += judged("Motet's tiles, against one tile", room[TILES], room[ONE_TILE], shape, device)
        by_torch = {backward: torch_way(device, backward=backward) for backward in (False, True)}
        bad += judged("torch with a fixed tile", by_torch, by_torch, shape, device)
    for shape in words[1:] if device.type == "cuda" else ():
        judged("library, K not split, against one tile", room[LIBRARY], room[ONE_TILE], shape, device)
        free: dict[bool, Product] = {False: F.linear, True: lambda slope_MN, weight_NK, _: slope_MN @ weight_NK}
        judged("library, its own choice", free, free, shape, device)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
