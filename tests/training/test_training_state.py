"""What a trainer reads of its files and of its samples, without a base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from motet.algorithms import datum
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Segment
from motet.core.errors import AdapterError
from motet.model.lora import initial_weights, make_layout
from motet.training.arena import OPTIMIZER, AdapterArena
from motet.training.packed_pass import _TrainableRows

pytestmark = pytest.mark.tier1


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "gradient"])
def test_optimizer_state_of_another_length_is_refused(name: str, tmp_path: Path) -> None:
    """Kernels would read and write behind its end."""
    layout = make_layout({"q": (16, 16)}, 4)
    arena = AdapterArena(layout, AdapterConfig(rank=4, alpha=4), initial_weights(layout, 0), torch.float32)
    arena.gradient.fill_(1.0)
    arena.step(AdamW(1e-3))
    arena.gradient.fill_(1.0)
    arena.pending = True
    arena.save_optimizer(tmp_path)
    arena.set_optimizer(arena.read_optimizer(tmp_path))
    path = tmp_path / OPTIMIZER
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for changed in (tensors[name][:-1], tensors[name].bfloat16()):
        save_file({**tensors, name: changed.clone()}, path, metadata)
        with pytest.raises(AdapterError, match="belongs to an adapter of another shape"):
            arena.read_optimizer(tmp_path)


def test_adapters_that_train_in_turn_share_memory_for_their_gradients() -> None:
    layout = make_layout({"q": (16, 16)}, 4)
    shape, masters = AdapterConfig(rank=4, alpha=4), initial_weights(layout, 0)
    places = []
    for _ in range(3):
        arena = AdapterArena(layout, shape, masters, torch.bfloat16)
        assert not arena.gradient.any()
        arena.gradient.fill_(1.0)
        places.append(arena.gradient.data_ptr())
        arena.step(AdamW(1e-3))
    assert len({*places}) == 1


def test_a_sample_without_a_ratio_mask_counts_whole_beside_one_with_a_mask() -> None:
    ids, mask = np.arange(1, 5), np.array([1, 0, 0, 1])
    plain, masked = datum(ids, ids), datum(ids, ids, sequence_ratio_mask=mask)
    for samples, wanted in (
        ((plain, masked), [1.0] * 4 + [1.0, 0.0, 0.0, 1.0]),
        ((masked, plain), [1.0, 0.0, 0.0, 1.0] + [1.0] * 4),
    ):
        segment = Segment("a", samples)
        rows = _TrainableRows.of(segment, [((0, 5),), ((5, 5),)], torch.device("cpu"))
        found = rows.gather_optional(segment, "ratio_mask")
        assert found is not None
        assert found.tolist() == wanted
    assert rows.gather_optional(segment, "reference_logprobs") is None
