"""A session of a client keeps the rules that it began with: how its data are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode

from motet.config import OF_CLIENT, JobConfig
from motet.core.batch import Batch, Trained
from motet.core.rules import NEWEST, Rules
from motet.core.types import FloatArray
from motet.runtime.journal import Datum, Done, ForwardBackward, Gradient, Journal, OptimStep
from motet.training.fake import FakeTrainer
from tests.support.fake_run import FakeRun, Setting, run_jobs
from tests.support.waiting import until


class Watched(FakeTrainer):
    """Keeps how the data of each pass are added: `b` backward, `f` forward, and whether by sample."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.passes: list[tuple[str, bool]] = []

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        self.passes += [("b", segment.by_sample) for segment in batch.segments]
        return super().forward_backward(batch)

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        self.passes += [("f", segment.by_sample) for segment in batch.segments]
        return super().forward(batch, base=base)


@pytest.mark.parametrize(("number", "by_sample"), [(1, False), (2, True), (NEWEST, True)])
def test_data_are_added_as_the_rules_of_the_session_say(number: int, by_sample: bool, tmp_path: Path) -> None:
    """A pass without a gradient adds nothing, and its data may share rows."""
    tree = {"name": "a", "algorithm": "client", "data": {"source": OF_CLIENT, "chat_template": False}, "steps": 9}
    config = JobConfig.model_validate({**tree, "optimizer": {"lr": 0.05}})
    ids = [np.arange(first, first + 9, dtype="<i4") for first in range(2)]
    data = [Datum(one[:-1].tobytes(), one[1:].tobytes(), 0) for one in ids]
    step = OptimStep(0.05, (0.9, 0.95), 1e-8, 0.0, None)
    commands = [ForwardBackward(data, "cross_entropy", {}), ForwardBackward(data, "cross_entropy", {}, True), step]
    journal = Journal(tmp_path / "a")
    for place, command in enumerate(commands):
        journal.put(place, encode(command))

    async def script(run: FakeRun) -> None:
        await until(lambda: journal.done(len(commands) - 1))
        journal.finish()
        run.jobs["a"].news.set()

    run = run_jobs(tmp_path, [config], Setting(trainer=Watched, began=Rules(number)), script)
    assert [type(journal.outcome(place)) for place in range(3)] == [Gradient, Gradient, Done]
    assert isinstance(run.trainer, Watched)
    assert [whole for kind, whole in run.trainer.passes if kind == "b"] == [by_sample]
    assert ("f", True) not in run.trainer.passes
