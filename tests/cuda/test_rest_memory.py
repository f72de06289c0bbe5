"""What decoding keeps between steps, added up, is what the function says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu  # noqa: F401
from motet.cuda.decoder_shape import widths_of_rank
from motet.cuda.rest_memory import rest_memory
from motet.cuda.step import _KEPT, CudaSteps
from motet.model.accelerator import Recorder
from motet.model.device_steps import MASKED, DeviceStep
from motet.model.kv_cache import KVCache
from motet.rollout.step_table import StepTable
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny
from tests.support.measured_shapes import DOCS, LARGE


def bytes_of(*tensors: Tensor | None) -> int:
    """Of each piece of memory once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.inference_mode()
@pytest.mark.parametrize(("name", "rank"), [("llama_long", 3), ("llama", 0), ("gemma", 3)])
@pytest.mark.parametrize("n_blocks", [2, 40])
def test_bytes_at_rest_are_those_of_the_tensors(name: str, rank: int, n_blocks: int) -> None:
    """Of a masked step of four rows; `tests/cuda/test_layer_launches.py` asks for what a step computes."""
    base, rows = cuda.load(name), 4
    own, plan = cuda.own(base), cuda.own(base).plan
    cache = KVCache(rows, base.block_size, base.device, clean=False)
    steps, table = CudaSteps(own, cache, recorder=Recorder(base.device)), StepTable(2 * rows, n_blocks)
    steps.hold(table)
    weights = [tiny.adapter(base, rank=rank) if rank else None] * rows
    allowed = np.ones((rows, plan.head.weight_NK.shape[0]), np.bool_)
    nothing = np.empty((0, 2), np.int64)
    steps.launch(DeviceStep(MASKED, rows, nothing, weights, n_blocks, truncates=True, masks_NV=allowed)).tokens()
    (graph,) = steps._graphs.values()
    attention, settings = graph.attention, graph.settings
    lists = [each for work in attention._works.values() for each in vars(work).values()]
    cut: list[Any] = list(vars(graph.truncation).values())
    kept = [attention.positions_T, attention.places_T, attention.tables_SL, *lists, graph.token_N, graph.result]
    kept += [settings.temperature_N, settings.key_N, settings.position_N, *cut, *graph.tables.inner.values()]
    angles = [each for layer in plan.layers for each in (layer.cosines, layer.sines)]
    found = rest_memory(
        plan.shape,
        plan.heads,
        plan.rotated,
        n_blocks * base.block_size,
        base.block_size,
        rows,
        graph.shape.widths or (),
    )
    (space,) = own.attention._workspaces.values()  # type: ignore[attr-defined]
    assert found.workspace == bytes_of(*vars(space).values())
    assert found.tables == bytes_of(steps._memory.numbers)
    assert found.masks == bytes_of(steps._allowed_NW)
    assert found.graphs == bytes_of(*kept)
    assert found.angles == bytes_of(*angles) // base.info.max_positions * n_blocks * base.block_size


def test_an_8b_base_keeps_less_than_the_goal_and_what_the_page_says() -> None:
    """Of 256 rows of up to 131,072 tokens, with adapters of rank 16: with one graph, and with as many as are kept."""
    one, most = (rest_memory(LARGE, 32, 128, 131_072, 64, 256, widths_of_rank(16), n).total for n in (1, _KEPT))
    assert most < 1.5e9
    table = f"| 1 | {one / 1e6:.0f} |\n| {_KEPT}, the most that are kept | {most / 1e6:.0f} |\n"
    assert table in (DOCS / "benchmarks-gpu.md").read_text()
