"""Whether what went through an agent's address is what is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from motet.core.types import Rollout
from tests.support.scripted_model import END, Script


async def none_scored(rollouts: Any) -> list[Any]:
    raise AssertionError("the job has no reward")


def check_captured(rollout: Rollout, script: Script) -> None:
    """Every sampled stretch is trained once, after exactly what the engine read before it."""
    stretches = []
    for branch in rollout.branches:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], branch.loss_mask, [False]]).astype(int)))
        for start, end in edges.reshape(-1, 2):
            stretches.append((branch.token_ids[:start].tolist(), branch.token_ids[start:end].tolist()))
    read = list(script.read.values())
    assert sorted(prompt for prompt, _ in stretches) == sorted(read)
    assert all(sampled[-1] == END for _, sampled in stretches)
