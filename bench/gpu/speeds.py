"""What products take by each way on a card that nothing else uses, and attention; loads that come after read the former.

    python -m bench.gpu.speeds DEVICE SECONDS SHAPE…

The seconds are of each shape's products.
"""

from __future__ import annotations

import math
import sys

import torch
from bench.gpu import attention
from bench.gpu.figures import Figure, say
from bench.gpu.products import shapes_of
from bench.gpu.schedule import SKIPPED
from bench.speed.shapes import SHAPES

from motet.kernels.cuda import product_timings
from motet.kernels.cuda.product_backends import BUCKETS, Library, ProductShape, ProductWeight, WayTable, table_for
from motet.model.accelerator import Recorder

DIFFERENT = 1 << 28
"""Bytes of weights of one shape, as a decoding step reads them: more than any cache holds."""


def weights_of(shape: str, device: torch.device) -> list[ProductWeight]:
    """Random weights of a base's products, several of each shape."""
    found = []
    for n_inputs, n_outputs in shapes_of(shape):
        first = torch.randn(n_outputs, n_inputs, dtype=torch.bfloat16, device=device)
        copies = min(64, 1 + DIFFERENT // (first.numel() * first.itemsize))
        found += [ProductWeight(first.clone()) for _ in range(copies)]
    return found


def tell(shape: str, table: WayTable) -> None:
    """A figure for each product and number of rows: the fastest of Motet's own, and the library."""
    for n_inputs, n_outputs in shapes_of(shape):
        for rows in BUCKETS:
            found = dict(table.speeds.get((ProductShape(n_outputs, n_inputs), rows), {}))
            by_library = found.pop(Library.name, math.nan)
            if found:
                best = min(found, key=found.__getitem__)
                said = f"{found[best]:.1f} µs by {best}, {by_library:.1f} by the library"
                say(Figure("card", f"{shape}: product of {n_inputs} and {n_outputs}, {rows} rows", said))


def main(words: list[str]) -> int:
    """Measure; 77 where there is no card."""
    device, seconds = torch.device(words[0]), float(words[1])
    if device.type == "cpu":
        print("times are a card's")
        return SKIPPED
    for shape in words[2:]:
        table = table_for(device, torch.bfloat16)
        product_timings.bring(table, weights_of(shape, device), Library(), Recorder(device).capture, device, seconds)
        tell(shape, table)
        attention.tell(shape, SHAPES[shape], device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
