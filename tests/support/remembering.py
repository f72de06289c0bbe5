"""Parts of a fake run that remember: the weights of every version, the samples of every step, the tokens that were sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from motet.config import AdapterConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Sample, Trained
from motet.core.types import AdapterRef, Chunk, GenerateRequest
from tests.support.fake_base import FakeAdapter, FakePolicy
from tests.support.fake_engine import FakeEngine
from tests.support.fake_trainer import FakeTrainer


class RememberingEngine(FakeEngine):
    """Keeps every version's weights, and counts the tokens of each job's rollouts."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.adapters: dict[AdapterRef, FakeAdapter] = {}
        self.sampled: Counter[str] = Counter()
        """Tokens of each job's rollouts, those of evaluations included."""

    def install(self, ref: AdapterRef, adapter: FakeAdapter) -> None:
        super().install(ref, adapter)
        self.adapters[ref] = adapter

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            self.sampled[request.job] += len(chunk.token_ids)
            yield chunk


class RememberingTrainer(FakeTrainer):
    """Keeps the samples of each job's steps."""

    def __init__(self, *, slots: int = 16) -> None:
        super().__init__(slots=slots)
        self.samples: dict[str, list[list[Sample]]] = {}

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        super().add_adapter(name, shape, seed, head=head)
        self.samples.setdefault(name, []).append([])

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        for segment in batch.segments:
            self.samples[segment.adapter][-1].extend(segment.samples)
        return super().forward_backward(batch)

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        self.samples[name].append([])
        return super().optim_step(name, optimizer)


def check_samples(samples: Sequence[Sample], engine: RememberingEngine, name: str) -> None:
    """Each trained token has the logprob that the version which is written at it gives it, exactly."""
    kept = {ref.version: adapter for ref, adapter in engine.adapters.items() if ref.name.startswith(f"{name}.")}
    policies = {version: FakePolicy(adapter).logprobs for version, adapter in kept.items()}
    for sample in samples:
        for version in set(sample.versions[sample.loss_mask].tolist()):
            places = sample.loss_mask & (sample.versions == version)
            assert policies[version](sample.token_ids)[places].tolist() == sample.logprobs[places].tolist()
