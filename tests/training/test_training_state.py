"""What a trainer reads of its files and of its samples, without a base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from motet.core.batch import AdamW
from motet.core.errors import AdapterError
from motet.model.lora import initial_weights, make_layout
from motet.training.arena import OPTIMIZER, AdapterArena


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "gradient"])
def test_optimizer_state_of_another_length_is_refused(name: str, tmp_path: Path) -> None:
    """Kernels would read and write behind its end."""
    layout = make_layout({"q": (16, 16)}, 4)
    arena = AdapterArena(layout, 1.0, initial_weights(layout, 0), torch.float32)
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
