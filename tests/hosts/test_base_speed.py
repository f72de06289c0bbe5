"""The usual limit of a step: what a base does in ten minutes, measured once for it and its processor."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet.config import AdapterConfig
from motet.core.batch import Batch, Trained
from motet.core.device import Device
from motet.core.errors import AdapterError
from motet.core.model_info import ModelInfo
from motet.hosts.base_speed import LEAST, SECONDS, measure_steps
from motet.runtime.job import Services
from motet.runtime.learner import Learner
from motet.runtime.scheduler import FairScheduler
from tests.support.fake_base import VOCABULARY, FakeTokenizer
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.fake_run import InlineRewards
from tests.support.fake_trainer import FakeTrainer

TOKENIZER: Any = FakeTokenizer()
INFO = ModelInfo(
    name="/bases/small", tokenizer=TOKENIZER, dtype="float32", device="cpu", processor="one", n_parameters=9,
    vocab_size=VOCABULARY, max_positions=99, hidden_size=4, model_type="llama", kv_bytes_per_token=1, state_bytes=0,
    eos_token_ids=(), linears=(),
)  # fmt: skip


class CountingTrainer(FakeTrainer):
    """Counts its passes."""

    passes = 0
    error: Exception | None = None

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        self.passes += 1
        if self.error is not None:
            raise self.error
        return super().forward_backward(batch)


def asked(trainer: CountingTrainer, info: ModelInfo = INFO, sampler: str = "embedded") -> tuple[int, int]:
    """The limit, and the passes that it took."""
    before, engine, device = trainer.passes, FakeEngine(capacity=8), Device()
    scheduler = FairScheduler(engine.capacity)
    services = Services(
        engine=engine,
        trainer=trainer,
        sync=FakeSync(engine, trainer.weights),
        device=device,
        scheduler=scheduler,
        learner=Learner(trainer, device, 64, scheduler),
        rewards=InlineRewards(),
        micro_batch_tokens=64,
        probe_tolerance=0.0,
        engine_suffix="",
    )
    try:
        asyncio.run(measure_steps(services, info, sampler))
    finally:
        device.close()
    return services.steps.usual, trainer.passes - before


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where speeds are kept."""
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "speeds"


def test_a_base_is_measured_once_for_its_processor(cache: Path) -> None:
    trainer = CountingTrainer(slots=1)
    first, passes = asked(trainer)
    assert passes > 0
    assert first >= LEAST
    assert asked(trainer) == (first, 0), "not anew at each start"
    assert asked(trainer, replace(INFO, name="/elsewhere/small")) == (first, 0), "the same base at another place"
    assert asked(trainer, replace(INFO, processor="two"))[1] > 0
    assert asked(trainer, sampler="vllm")[1] > 0
    assert len(list(cache.iterdir())) == 3
    trainer.add_adapter("a", AdapterConfig(), 0)  # the slot is free again


def test_a_speed_in_the_file_decides_and_one_that_cannot_be_read_is_measured_again(cache: Path) -> None:
    trainer = CountingTrainer(slots=1)
    asked(trainer)
    (file,) = cache.iterdir()
    file.write_text("1e6")
    assert asked(trainer) == (SECONDS * 1e6, 0)
    file.write_text("0.5 tokens per second")
    assert asked(trainer) == (LEAST, 0), "a step of the defaults fits on any base"
    for damaged in ("", "fast", "0", "-1", "nan", "inf"):
        file.write_text(damaged)
        assert asked(trainer)[1] > 0


def test_a_base_is_limited_where_nothing_can_be_kept_or_measured(cache: Path) -> None:
    cache.parent.write_text("no directory")
    trainer = CountingTrainer(slots=1)
    assert asked(trainer)[0] >= LEAST
    assert asked(trainer)[1] > 0, "again: nothing could be kept"
    trainer.error = AdapterError("no layer can be adapted")
    assert asked(trainer)[0] == LEAST
