"""Launches of the kernels of `motet.cuda`, for `launched_kernels` to compile. Run as a module; prints JSON lines.

python -m tests.support.launched_room --targets sm_90 --rooms products
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from motet.cuda.ways import REFERENCE, OwnTile, ProductWeight, shrink
from tests.support import cuda_attention_cases, launched_kernels
from tests.support.adapted_rows import adapted
from tests.support.launched_kernels import CPU, TARGETS, Launch

BF16 = torch.bfloat16
TILES = [
    OwnTile(16, 32, 256, 4, 4),
    OwnTile(64, 32, 128, 4, 5, True),
    *(
        OwnTile(*size)
        for size in ((64, 128, 64, 4, 4), (128, 64, 128, 4, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 3))
    ),
    *(
        OwnTile(*size, True)
        for size in ((64, 128, 64, 4, 4), (128, 64, 128, 4, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 3))
    ),
]
ONE_CODE: set[str] = set()
"""Kernels that add numbers otherwise than by the tensor core: all their launches for one base have one machine code."""
NARROW: set[str] = {"list_pieces", "place_rows", "copy_rows"}
"""Kernels that read single numbers, or a few rows, from memory."""


def product_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """Products of any number of rows, with adapters; and every tile, with a bias and for gradients; and a shrink alone."""
    n_inputs, n_outputs = 896, 1152
    weight, bias = torch.zeros(n_outputs, n_inputs, dtype=BF16), torch.zeros(n_outputs, dtype=BF16)
    rows = adapted([0, 1, -1, 1], [16, 3], n_inputs, BF16, CPU, width=64)
    adapters = rows.tables, rows.group
    for n_rows in (1, 7, 64, 300):
        x, y = torch.zeros(n_rows, n_inputs, dtype=BF16), torch.zeros(n_rows, n_outputs, dtype=BF16)
        yield partial(REFERENCE.multiply, x, ProductWeight(weight), y, adapters, back=False)
    for tile in TILES if everything else ():
        if tile.by_descriptors and target == "sm_80":
            continue
        yield partial(tile.multiply, x, ProductWeight(weight), y, adapters, back=False)
        yield partial(tile.multiply, x, ProductWeight(weight, bias), y, None, back=False)
        yield partial(tile.multiply, y, ProductWeight(weight), x, None, back=True)
    if everything:
        yield partial(shrink, x, adapters)


def attention_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """Decoding, prompts in chunks and packed sequences, for 32 and 8 heads of 128; and for other shapes."""
    warps = 4 if target == "sm_90" else 8
    for shape in ((32, 8, 128), (14, 2, 64), (32, 32, 80), (8, 4, 256))[: None if everything else 1]:
        yield from cuda_attention_cases.launches(*shape, warps=warps)


LAUNCHES: Mapping[str, Callable[..., Iterator[Launch]]] = {
    "products": product_launches,
    "attention": attention_launches,
}
"""By the file of the kernels."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "sm_100"], choices=list(TARGETS))
    parser.add_argument("--rooms", nargs="+", default=list(LAUNCHES), choices=list(LAUNCHES))
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args(words)
    for target in chosen.targets:
        for room in chosen.rooms:
            launches = list(LAUNCHES[room](target, everything=chosen.all))
            launched_kernels.print_made(target, "bf16", 0, room, launches)


if __name__ == "__main__":
    main()
