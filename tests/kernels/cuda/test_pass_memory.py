"""What a training pass keeps, added up, is what forecasts say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.support.triton_on_cpu
from motet.kernels.cuda.adapters import AdapterTables, runs_of
from motet.kernels.cuda.attention import CudaPass
from motet.kernels.cuda.decoder_shape import kept_bytes
from motet.kernels.cuda.forward import KeptLayer
from motet.model.routing import TrainerRouting, TrainSegment
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny

DEVICE = tests.support.triton_on_cpu.DEVICE


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "recompute"), [("llama", False), ("llama", True), ("gemma2", False), ("olmo2", False)]
)
def test_kept_bytes_are_those_of_the_tensors(name: str, recompute: bool) -> None:
    """Each piece of memory once; in blocks of keys that are full. Layers and the last norm have their inputs together."""
    base = cuda.base(name)
    own, n_rows = cuda.own(base), base.block_size
    segment = TrainSegment(0, 12, tiny.adapter(base, rank=3), None)
    routing = TrainerRouting([segment], DEVICE, base.products, backward=False)
    attention = own.attention.packed([n_rows])
    assert isinstance(attention, CudaPass)
    tables, kept = AdapterTables.of(own.places, runs_of(routing), n_rows, DEVICE), list[KeptLayer]()
    layers: Any = base.decoder.layers
    layers[0].training = recompute
    try:
        own.decode(tiny.tokens(n_rows).to(DEVICE), attention, tables, kept)
    finally:
        layers[0].training = False
    tensors = [one.x_TD for one in kept]
    tensors += [tensor for one in kept if one.products is not None for tensor in one.products.tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) == n_rows * kept_bytes(own.plan.shape, tables.widths, recompute=recompute)
