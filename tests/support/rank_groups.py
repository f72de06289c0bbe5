"""What trainers over several ranks are tested with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from motet.algorithms import Grpo, Reinforce
from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import AdamW, Segment
from motet.training.sharded.messages import Join
from tests.support import tiny_models as tiny
from tests.support.segments import make_samples

ADAMW = AdamW(1e-2, eps=1e-4, clip_norm=0.5, weight_decay=0.1)
SHAPES = {  # rank and alpha, whose quotient is no power of two: then it matters that it is multiplied within the sum
    "a": AdapterConfig(rank=8, alpha=11.0),
    "b": AdapterConfig(rank=8, alpha=5.0, target_modules=["o_proj", "down_proj"]),
    "c": AdapterConfig(rank=3, alpha=32.0),
}
LENGTHS: Sequence[Sequence[tuple[int, int]]] = ([(5, 30), (40, 9)], [(2, 5)], [(17, 53)], [(1, 1), (9, 20)], [(30, 40)])


def segment(name: str, place: int, **changes: Any) -> Segment:
    samples = make_samples(LENGTHS[place], seed=10 * place + ord(name))
    loss = Grpo(clip_low=0.1) if name == "b" else Reinforce()
    plain = Segment(name, samples, loss, float(sum(sample.n_trainable for sample in samples)), 0.8)
    return dataclasses.replace(plain, **changes)


def with_wrong_token(name: str) -> Segment:
    """A segment with tokens beyond the vocabulary, which cannot be laid out."""
    good = segment(name, 0)
    sample = dataclasses.replace(good.samples[0], token_ids=np.full_like(good.samples[0].token_ids, 10**6))
    return dataclasses.replace(good, samples=(sample,))


def joining(base: str, dtype: str, **engine: Any) -> Join:
    common = {"dtype": dtype, "device": "cpu", "block_size": tiny.BLOCK, "threads": 1, "slots": 8, "kernels": "torch"}
    return Join.of(base, EngineConfig.model_validate({**common, **engine}))
