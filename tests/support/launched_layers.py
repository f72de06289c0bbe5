"""Launches between the products of decoders with the sizes of real ones, whose products and attention do nothing here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from motet.kernels.cuda.adapters import AdapterTables, Places
from motet.kernels.cuda.attention import CudaPass
from motet.kernels.cuda.base import CudaBase
from motet.kernels.cuda.forward import DecoderForward, KeptLayer
from motet.kernels.cuda.kernels import rotary
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.layers import DecoderPlan, LayerPlan
from motet.kernels.cuda.product_backends import table_for
from motet.kernels.cuda.products import Products, ProductWeight
from motet.model.attention import LayerCall, Span
from motet.model.kv_cache import KVCache
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.unit_sums import UnitSums
from tests.support import tiny_models as tiny
from tests.support.launched_kernels import CPU, TARGETS, Launch, requests

BF16 = torch.bfloat16
KV_BLOCK = 64


class NoProducts:
    """Leaves outputs as they are."""

    def multiply(self, *_given: Any) -> None:
        pass


@dataclass
class NoAttention:
    """An attention pass that only has places."""

    n_rows: int
    positions_T: Tensor = field(init=False)
    places_T: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # neither begins at a multiple of 16 bytes
        self.positions_T = torch.zeros(self.n_rows + 1, dtype=torch.int32)[1:]
        self.places_T = torch.zeros(self.n_rows + 1, dtype=torch.int64)[1:]

    def pools(self, _layer: int, key_like: Tensor, _value_like: Tensor) -> tuple[Tensor, Tensor]:
        pool = torch.zeros(2, key_like.shape[1], KV_BLOCK, key_like.shape[2], dtype=BF16)
        return pool, pool

    def attend_into(self, *_given: Any) -> None:
        pass


def weight(n: int, k: int) -> ProductWeight:
    """A weight that takes no memory."""
    return ProductWeight(torch.zeros(1, dtype=BF16).expand(n, k))


def plan(
    *, heads: int, kv_heads: int, head_width: int, rotated: int, norms: int, post: bool, tanh: bool
) -> DecoderPlan:
    """Two layers of width 896."""
    width, inner = 896, 4864
    of_heads = heads * head_width
    products = ((heads + 2 * kv_heads) * head_width, width), (width, of_heads), (2 * inner, width), (width, inner)
    factors = torch.ones(max(width, of_heads))
    angles = torch.zeros(256, rotated // 2)
    q_norm = factors if norms else None
    layer = LayerPlan(
        tuple(weight(n, k) for n, k in products), LayerCall(0, 1.0, None, None),
        norm_in=factors, norm_attended=factors if post else None, norm_mlp=factors, norm_done=factors if post else None,
        norm_q=q_norm, norm_k=q_norm, cosines=angles, sines=angles,
    )  # fmt: skip
    embedding = torch.zeros(64, width, dtype=BF16)
    return DecoderPlan(
        layers=(layer, layer), embedding=embedding, head=ProductWeight(embedding), norm_out=factors, width=width,
        heads=heads, kv_heads=kv_heads, head_width=head_width, inner=inner, rotated=rotated, norms_span=norms, tanh=tanh,
        epsilon=1e-6, embedding_scale=1.0, residual=1.0, query_scales=None,
    )  # fmt: skip


PLANS = {
    "plain": plan(heads=14, kv_heads=2, head_width=64, rotated=64, norms=rotary.NO_NORM.value, post=False, tanh=False),
    "normed": plan(
        heads=8, kv_heads=4, head_width=128, rotated=128, norms=rotary.EACH_HEAD.value, post=True, tanh=True
    ),
    "partial": plan(heads=6, kv_heads=6, head_width=96, rotated=48, norms=rotary.NO_NORM.value, post=False, tanh=False),
    "whole": plan(
        heads=7, kv_heads=7, head_width=128, rotated=128, norms=rotary.ALL_HEADS.value, post=True, tanh=False
    ),
}
"""By what is peculiar about them."""


def places(of: DecoderPlan) -> Places:
    """Four fused products of each layer, one linear layer for each part."""
    key = of.kv_heads * of.head_width
    parts = (of.heads * of.head_width, key, key), (of.width,), (of.inner, of.inner), (of.width,)
    made = []
    for index, layer in enumerate(of.layers):
        for which, (product, sizes) in enumerate(zip(layer.products, parts, strict=True)):
            made.append((SimpleNamespace(leader=f"{index}.{which}", frozen=product.weight_NK, sizes=sizes), sizes))
    return Places(made, BF16.itemsize)  # type: ignore[arg-type]


def tables(of: DecoderPlan, n_rows: int, n_slots: int, widths: Sequence[int] = (48, 16, 32, 16)) -> AdapterTables:
    """Tables for this many adapters, in none of whose slots there is one."""
    return AdapterTables.empty(places(of), n_rows, n_slots, CPU, widths if n_slots else None)


def run(of: DecoderPlan, n_rows: int, n_slots: int, kept: list[KeptLayer] | None = None, **widths: Any) -> None:
    """One pass."""
    attention: Any = NoAttention(n_rows)
    products: Any = NoProducts()
    forward = DecoderForward(of, products, attention, tables(of, n_rows, n_slots, **widths), kept)
    forward.hidden(torch.zeros(n_rows, dtype=torch.int64))


def passes(of: DecoderPlan) -> Iterator[Launch]:
    """Decoding and training, without adapters, with few and with many, of small and of large ranks."""
    for n_rows, n_slots in ((1, 0), (8, 1), (64, 8), (300, 64)):
        yield partial(run, of, n_rows, n_slots)
    yield partial(run, of, 300, 3, kept=[], widths=(768, 256, 512, 256))


def layer_launches(_target: str, *, everything: bool) -> Iterator[Launch]:
    """All passes; nothing unless everything is asked for, because it takes a minute."""
    for of in PLANS.values() if everything else ():
        yield from passes(of)


def decoded(own: CudaBase, n_adapters: int) -> None:
    """A step of one row for each adapter, or of one without."""
    base, n_rows = own.base, max(1, n_adapters)
    cache = KVCache(n_rows, KV_BLOCK, CPU)
    attention = own.attention.cached([Span(0, 1, cache.take(1)) for _ in range(n_rows)], cache)
    assert isinstance(attention, CudaPass)
    members = [tiny.adapter(base, rank=2, seed=seed) for seed in range(n_adapters)]
    runs = [(weights, row, row + 1) for row, weights in enumerate(members)]
    own.decode(torch.zeros(n_rows, dtype=torch.int64), attention, AdapterTables.of(own.places, runs, n_rows, CPU))


def trained(own: CudaBase, n_adapters: int) -> None:
    """A training pass of one sequence for each adapter, forward and backward."""
    base, n_rows = own.base, 4 * n_adapters
    segments = []
    for row in range(0, n_rows, 4):
        weights = tiny.adapter(base, rank=2, seed=row)
        segments.append(TrainSegment(row, row + 4, weights, None, sums=UnitSums.empty(weights.layout.size, CPU)))
    routing = TrainerRouting(segments, CPU, base.products, backward=True)
    attention = own.attention.packed([4] * n_adapters)
    token_ids = torch.zeros(n_rows, dtype=torch.int64)
    own.hidden(token_ids, token_ids, attention, routing).sum().backward()


def main(_words: Sequence[str] | None = None) -> None:
    """Prints the launches of steps, and what each pass of each plan asks the compiler for."""
    target = TARGETS["sm_90"]
    for name in ("llama", "gemma2", "olmo2"):
        own = CudaBase(base := tiny.load(name), lambda _: Products(table_for(CPU, torch.float32)))
        for n_adapters in (0, 8, 64):
            with count() as launches:
                requests(target, [partial(decoded, own, n_adapters)])
            layers = len(base.decoder.layers)  # type: ignore[arg-type]
            print(json.dumps({"base": name, "adapters": n_adapters, "layers": layers, "launches": dict(launches)}))
        for n_adapters, recompute in ((1, False), (8, False), (64, False), (8, True)):
            base.decoder.layers[0].training = recompute  # type: ignore[index,union-attr]
            with count() as launches:
                requests(target, [partial(trained, own, n_adapters)])
            line = {"trained": name, "adapters": n_adapters, "recompute": recompute, "layers": layers}
            print(json.dumps(line | {"launches": dict(launches)}))
    for name, of in PLANS.items():
        each = [sorted(request.key for request in requests(target, [one])) for one in passes(of)]
        print(json.dumps({"plan": name, "requests": each}))


if __name__ == "__main__":
    main()
