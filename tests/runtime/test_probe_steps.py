"""When the probe at a publish may say that an engine answers with the version before."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from motet.errors import ProbeError
from motet.runtime.probe import Probe
from motet.types import AdapterRef

# Logprobs of a service in shards and of its server, both in bfloat16 with other kernels: of the base, and after one step.
TRAINER = [0, -0.1075, 0, -2.1473, -0.3591, -0.5839, -0.0003, -3.1064, -2.9981, -3.0606, -2.5084, -3.5031, -0.0039]
TRAINED = [0, -0.1075, 0, -2.1480, -0.3588, -0.5568, -0.0003, -3.1063, -2.9911, -3.0657, -2.5124, -3.5018, -0.0036]
ENGINE = [0, -0.1104, 0, -2.1413, -0.3617, -0.5740, -0.0003, -3.1173, -2.9908, -3.0642, -2.5204, -3.4957, -0.0040]
ANSWERED = [0, -0.1102, 0, -2.1398, -0.3631, -0.5681, -0.0003, -3.1179, -2.9903, -3.0759, -2.5107, -3.5031, -0.0035]


class Told:
    """A trainer and an engine in one, whose logprobs are given."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        self.trainer, self.engine = trainer, engine

    def forward(self, batch: Any, base: bool = False) -> Any:
        return ((np.array(self.trainer[0] if base else self.trainer[1], np.float32),),)

    async def score(self, token_ids: Any, ref: AdapterRef | None) -> Any:
        return np.array(self.engine[0] if ref is None else self.engine[1], np.float32)


def published(*told: Told) -> None:
    """Each version in turn."""
    probe = Probe("job", np.arange(len(TRAINER), dtype=np.int32), 1.0)
    for version, one in enumerate(told):
        trained: Any = one
        asyncio.run(probe.check(trained, AdapterRef("job", version), probe.trained(trained)))


def test_a_step_that_rounding_hides_is_no_fault() -> None:
    published(Told((TRAINER, TRAINER), (ENGINE, ENGINE)), Told((TRAINER, TRAINED), (ENGINE, ANSWERED)))


def test_a_clear_step_that_the_engine_lacks_is_a_fault() -> None:
    clear = [one - 0.1 * (place % 2) for place, one in enumerate(TRAINED)]
    first = [one - 0.3 for one in TRAINER], [one - 0.3 for one in ENGINE]
    after = [one - 0.3 for one in clear]
    with pytest.raises(ProbeError, match="with version 0"):
        published(Told((TRAINER, first[0]), (ENGINE, first[1])), Told((TRAINER, after), (ENGINE, first[1])))
