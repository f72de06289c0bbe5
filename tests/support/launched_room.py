"""Launches of the kernels of `motet.kernels.cuda`, for `launched_kernels` to compile. Run as a module; prints JSON lines.

python -m tests.support.launched_room --targets sm_90 --rooms products
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from motet.config import AdapterConfig
from motet.core.batch import AdamW
from motet.kernels.cuda.adapter_steps import step_all
from motet.kernels.cuda.adapters import AdapterGroup, AdapterTables, Places
from motet.kernels.cuda.attention import CudaAttention, warps_on
from motet.kernels.cuda.backward import DecoderBackward
from motet.kernels.cuda.forward import DecoderForward, KeptLayer
from motet.kernels.cuda.kernels import rotary, step
from motet.kernels.cuda.launches import launch
from motet.kernels.cuda.layers import DecoderPlan, LayerPlan
from motet.kernels.cuda.math import CudaMath
from motet.kernels.cuda.product_backends import (
    BUCKETS,
    REFERENCE,
    Adapters,
    OwnTile,
    ProductShape,
    ProductWeight,
    WayTable,
    shrink,
    tiles_to_measure,
)
from motet.kernels.cuda.products import Products
from motet.kernels.cuda.unit_tables import UnitTables
from motet.model.attention import LayerCall, Prefix, Span
from motet.model.kv_cache import KVCache
from motet.model.lora import make_layout
from motet.model.routing import TrainerRouting
from motet.training.arena import AdapterArena
from tests.support import cuda_attention_cases, draw_cases, launched_kernels
from tests.support.adapted_rows import adapted
from tests.support.compiling import SHARED, SMALL
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


def product_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """Products of any number of rows, with any adapters; and every tile, with a bias and for gradients; and a shrink alone."""
    n_inputs, n_outputs = 896, 1152
    weight, bias = torch.zeros(n_outputs, n_inputs, dtype=BF16), torch.zeros(n_outputs, dtype=BF16)
    for n_rows, width in ((1, 16), (7, 64), (64, 48), (300, 768)):
        x, y = torch.zeros(n_rows, n_inputs, dtype=BF16), torch.zeros(n_rows, n_outputs, dtype=BF16)
        rows = adapted([0, 1, -1, 1], [16, 3], n_inputs, BF16, CPU, width=width)
        adapters = rows.tables, rows.group
        yield partial(REFERENCE.multiply, x, ProductWeight(weight), y, adapters, back=False)
        yield partial(REFERENCE.multiply, x, ProductWeight(weight), y, behind_others(*adapters), back=False)
    for tile in TILES if everything else ():
        if tile.by_descriptors and target == "sm_80":
            continue
        yield partial(tile.multiply, x, ProductWeight(weight), y, adapters, back=False)
        yield partial(tile.multiply, x, ProductWeight(weight, bias), y, None, back=False)
        yield partial(tile.multiply, y, ProductWeight(weight), x, None, back=True)
    if everything:
        yield partial(shrink, x, adapters)


def behind_others(tables: AdapterTables, group: AdapterGroup) -> Adapters:
    """The same adapters, whose tables are views that begin where others end, as those of a step and of a layer do."""

    def behind(numbers: torch.Tensor) -> torch.Tensor:
        return torch.cat([numbers.new_zeros(1), numbers.flatten()])[1:].view_as(numbers)

    tables = replace(tables, tiles_N17=behind(tables.tiles_N17), n_tiles=behind(tables.n_tiles))
    return tables, replace(group, entries_SC=behind(group.entries_SC))


def tile_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """With adapters, the tiles that are chosen on a card before any is measured; or all that it runs, also without."""
    table = WayTable(TARGETS[target].arch // 10, (SHARED | SMALL)[target] << 10, BF16.itemsize)
    tiles = {REFERENCE}
    for n_outputs, bucket in itertools.product((896, 2048, 8192, 28672, 151936), BUCKETS):
        shape = ProductShape(n_outputs, 896)
        tiles.add(table.own(shape, bucket))
        tiles |= {tile for tile in tiles_to_measure(shape, bucket, table.capability) if everything and table.runs(tile)}
    x, y, weight = (torch.zeros(shape, dtype=BF16) for shape in ((64, 896), (64, 1152), (1152, 896)))
    rows = adapted([0, 1, -1, 1], [16, 3], 896, BF16, CPU, width=64)
    for tile in sorted(tiles, key=repr):
        for adapters in ((rows.tables, rows.group), None)[: 1 + everything]:
            yield partial(tile.multiply, x, ProductWeight(weight), y, adapters, back=False)


def attention_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """Decoding, prompts in chunks and packed sequences, for 32 and 8 heads of 128; and for other shapes."""
    for shape in ((32, 8, 128), (14, 2, 64), (32, 32, 80), (8, 4, 256))[: None if everything else 1]:
        softcap = 50.0 if shape == (8, 4, 256) else None
        yield from cuda_attention_cases.launches(*shape, backend=attention_on(target), softcap=softcap)


def attention_on(target: str) -> CudaAttention:
    """As a card of this kind has it."""
    backend = CudaAttention(64, CPU)
    backend.warps = warps_on(TARGETS[target].arch // 10)
    return backend


def draw_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """Draws, logprobs with gradients, and finished logits."""
    yield from draw_cases.launches(everything=everything)


def decoder(heads: int = 32, kv_heads: int = 8, head_width: int = 128) -> tuple[DecoderPlan, Places]:
    """Two layers of 4,096 with norms of queries and keys; the second has four norms."""
    width, inner = 4096, 14336
    shapes = (
        ((heads + 2 * kv_heads) * head_width, width),
        (width, heads * head_width),
        (2 * inner, width),
        (width, inner),
    )
    parts = [heads * head_width, *[kv_heads * head_width] * 2], [width], [inner] * 2, [width]
    weights = [ProductWeight(torch.empty(shape, dtype=BF16)) for shape in shapes]
    norm, norm_of_head, angles = torch.ones(width), torch.ones(head_width), torch.zeros(512, head_width // 2)
    layers = [
        LayerPlan(
            tuple(weights),
            LayerCall(index, head_width**-0.5, None, None),
            norm_in=norm,
            norm_attended=norm if index else None,
            norm_mlp=norm,
            norm_done=norm if index else None,
            norm_q=norm_of_head,
            norm_k=norm_of_head,
            cosines=angles,
            sines=angles,
        )
        for index in range(2)
    ]
    plan = DecoderPlan(
        layers=tuple(layers), embedding=torch.empty(512, width, dtype=BF16),
        head=ProductWeight(torch.empty(512, width, dtype=BF16)), norm_out=norm, width=width, heads=heads,
        kv_heads=kv_heads, head_width=head_width, inner=inner, rotated=head_width, norms_span=rotary.EACH_HEAD.value,
        tanh=False, epsilon=1e-6, embedding_scale=1.0, residual=1.0, query_scales=None,
    )  # fmt: skip
    fused: Any = [
        (SimpleNamespace(leader=f"{layer} {which}", frozen=SimpleNamespace(shape=shape), sizes=columns), columns)
        for layer in range(2)
        for which, (shape, columns) in enumerate(zip(shapes, parts, strict=True))
    ]
    return plan, Places(fused, 2)


def layer_launches(target: str, *, everything: bool, packed: bool, with_adapters: bool) -> Iterator[Launch]:
    """Decoding or a pass over whole sequences."""
    plan, places = decoder()
    backend, cache = attention_on(target), KVCache(64, 64, CPU)
    for sizes in ([70, 300], [5] * 20) if packed else ([5, 60], [5, 700, 10]):
        spans = [Span(start, 1, cache.take(start // 64 + 1)) for start in ([] if packed else sizes)]
        attention = backend.packed(sizes) if packed else backend.cached(spans, cache)
        n_rows = len(attention.positions_T)
        tables = AdapterTables.empty(places, n_rows, 2 * with_adapters, CPU, (48, 16, 32, 16))
        products = Products(WayTable(9 if target == "sm_90" else 8, 1 << 18, 2))
        step = DecoderForward(plan, products, attention, tables)
        yield partial(step.hidden, torch.zeros(n_rows, dtype=torch.int64))


def gradient_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """A backward pass over sequences with a prefix; with everything also of other heads and wide adapters."""
    shapes = [(32, 8, 128), (14, 2, 64), (8, 4, 256)] if everything else [(32, 8, 128)]
    for shape, widths in itertools.product(shapes, ((48, 16, 32, 16), (768, 256, 512, 256))):
        plan, places = decoder(*shape)
        attention = attention_on(target).packed([70, 300, 9], [None, Prefix(0, 70), None])
        n_rows, n_adapters = len(attention.positions_T), 2
        tables = AdapterTables.empty(places, n_rows, n_adapters, CPU, widths)
        integers, addresses = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(n_adapters, 3, dtype=torch.int64)
        products = Products(WayTable(9 if target == "sm_90" else 8, 1 << 18, 2))
        routing = TrainerRouting([], CPU, None, backward=True)  # type: ignore[arg-type]
        backward = DecoderBackward.of(plan, products, attention, tables, routing)
        backward.units = UnitTables(integers[:, :2], integers, addresses, torch.ones(n_adapters))
        inputs = [torch.zeros(n_rows, plan.width, dtype=BF16) for _ in range(3)]
        yield partial(backward.run, [KeptLayer(x) for x in inputs], inputs[0])


def step_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """What a decode step reads of its rows and writes to them."""
    for n_rows, n_entries in ((7, 4), (64, 2048)):
        numbers, integers = torch.zeros(1 << 16, dtype=torch.int64), torch.zeros(n_rows * n_entries, dtype=torch.int32)
        rows, floats = (numbers, integers, 5 * n_rows, 9 + n_entries), torch.zeros(n_rows)
        yield partial(launch, step.write_changes, [1], numbers, numbers, n_rows, CHANGES=256)
        yield partial(launch, step.write_rows, [1], *rows, numbers, ROWS=128)
        yield partial(
            launch, step.read_rows, [n_rows], *rows, numbers, integers, numbers, numbers,
            floats, integers, floats, floats, integers, n_entries, 99, KV_BLOCK=64, ENTRIES=16, num_warps=1,
        )  # fmt: skip


def optimizer_launches(target: str, *, everything: bool) -> Iterator[Launch]:
    """Steps of two adapters, one with a part of a chunk."""
    layout, shape = make_layout({"q": (4096, 4096)}, 16), AdapterConfig(rank=16, alpha=16)
    arenas = [
        AdapterArena(layout, shape, torch.zeros(layout.size), BF16, head=head, own=CudaMath()) for head in (0, 897)
    ]
    yield partial(step_all, [arena.due(AdamW(1e-3)) for arena in arenas])


LAUNCHES: Mapping[str, Callable[..., Iterator[Launch]]] = {
    "products": product_launches,
    "attention": attention_launches,
    "draws": draw_launches,
    "step": step_launches,
    "gradients": gradient_launches,
    "optimizer": optimizer_launches,
    "decoding": partial(layer_launches, packed=False, with_adapters=False),
    "decoding with adapters": partial(layer_launches, packed=False, with_adapters=True),
    "a pass": partial(layer_launches, packed=True, with_adapters=False),
    "a pass with adapters": partial(layer_launches, packed=True, with_adapters=True),
}
"""By the file of the kernels, or by what is computed."""
TILES_OF_A_CARD: Mapping[str, Callable[..., Iterator[Launch]]] = {"tiles": tile_launches}
"""Compiled only where they are asked for."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "sm_100"], choices=list(TARGETS))
    parser.add_argument("--rooms", nargs="+", default=list(LAUNCHES), choices=[*LAUNCHES, *TILES_OF_A_CARD])
    parser.add_argument("--kernels", nargs="+", default=[], help="of all rooms, only these")
    parser.add_argument("--once", action="store_true", help="of each kernel only the first launch")
    parser.add_argument("--ptx", action="store_true", help="disassemble nothing, which takes half the time")
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args(words)
    for target in chosen.targets:
        made: set[str] | None = set() if chosen.once else None
        for room in chosen.rooms:
            launches = list({**LAUNCHES, **TILES_OF_A_CARD}[room](target, everything=chosen.all))
            launched_kernels.print_made(
                target, "bf16", 0, room, launches, chosen.kernels, made, disassembled=not chosen.ptx
            )


if __name__ == "__main__":
    main()
