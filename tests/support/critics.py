"""Trainers with an adapter that has a value head, and data for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from motet.algorithms.critic import ValueLoss
from motet.config import AdapterConfig
from motet.core.batch import Segment
from motet.model.lora_model import LoraModel
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.segments import SHAPES, make_samples


def critic_trainer(base: LoraModel) -> TorchTrainer:
    trainer = TorchTrainer(base, slots=4)
    for name in "ab":
        rank, alpha, _ = SHAPES[name]
        trainer.add_adapter(name, AdapterConfig(rank=rank, alpha=alpha), seed=ord(name), head=name == "a")
        inside.arena(trainer, name).set_masters(tiny.adapter_masters(base, rank=rank, seed=ord(name))[1])
    head = inside.arena(trainer, "a").values
    assert head is not None
    head.copy_(torch.linspace(-0.3, 0.4, len(head)))
    return trainer


def value_segment() -> Segment:
    """Returns and old values such that some are clipped and some are not."""
    samples = tuple(
        replace(one, logprobs=(one.advantages * 0.1).astype(np.float32)) for one in make_samples(SHAPES["a"][2], seed=5)
    )
    return Segment("a", samples, ValueLoss(0.2), 7.0)
