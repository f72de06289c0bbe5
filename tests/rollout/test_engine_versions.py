"""3 and 7 on the embedded engine: tokens know the version that sampled them, and a wrong adapter is noticed at publish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from motet.config import AdapterConfig, EngineConfig
from motet.core.device import Device
from motet.core.errors import EngineError, ProbeError
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, IntArray, SamplingParams
from motet.hosts.launch import load
from motet.model.lora import AdapterWeights
from motet.rollout.embedded import EmbeddedEngine, SameTensors
from motet.runtime.publish_check import Probe
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside

PROMPT: IntArray = np.array([5, 17, 40, 9, 88, 21, 13], np.int32)


@pytest.fixture(scope="module")
def base() -> Any:
    return load("small", EngineConfig(threads=1, block_size=16))


@pytest.fixture
def engine(base: Any) -> Iterator[EmbeddedEngine]:
    device = Device()
    yield EmbeddedEngine(base, device, max_rows=8, kv_tokens=8192, prefill_tokens=256)
    device.close()


def trained(base: Any, strength: float) -> TorchTrainer:
    """A trainer with adapter `a` whose B is random, as after some steps."""
    trainer = TorchTrainer(base, slots=2)
    trainer.add_adapter("a", AdapterConfig(rank=4, alpha=4), 3)
    arena = inside.arena(trainer, "a")
    generator = torch.Generator().manual_seed(1)
    arena.set_masters(arena.masters.detach() + strength * torch.randn(arena.layout.size, generator=generator))
    return trainer


async def complete(engine: EmbeddedEngine, name: str, ref: AdapterRef | None, tokens: int) -> Chunk:
    request = GenerateRequest(name, "job", PROMPT, ref, SamplingParams(max_tokens=tokens), (7,))
    (chunk,) = [chunk async for chunk in engine.generate(request)]
    return chunk


async def rescored(engine: EmbeddedEngine, chunk: Chunk, ref: AdapterRef) -> Any:
    whole = np.concatenate([PROMPT, chunk.token_ids])
    return (await engine.score(whole, ref))[len(PROMPT) :]


def test_honest_versions(base: Any, engine: EmbeddedEngine) -> None:
    """3: a request keeps the version it was admitted with, while others are published and its own is unloaded."""
    old, new = trained(base, 0.02).weights("a"), trained(base, 0.05).weights("a")

    async def scenario() -> None:
        engine.install(AdapterRef("a", 0), old)
        first = asyncio.create_task(complete(engine, "first", AdapterRef("a", 0), 60))
        while not engine.decoder.rows.running:
            await asyncio.sleep(0.001)
        engine.install(AdapterRef("a", 1), new)
        await engine.unload_adapter(AdapterRef("a", 0))
        second = asyncio.create_task(complete(engine, "second", AdapterRef("a", 1), 60))
        before, after = await first, await second
        assert set(before.versions) == {0}
        assert set(after.versions) == {1}
        assert len(before.versions) == len(before.token_ids) > 1
        engine.install(AdapterRef("check", 0), old)
        assert np.array_equal(before.logprobs, await rescored(engine, before, AdapterRef("check", 0)))
        assert np.array_equal(after.logprobs, await rescored(engine, after, AdapterRef("a", 1)))
        assert not np.array_equal(before.logprobs, await rescored(engine, before, AdapterRef("a", 1)))
        with pytest.raises(EngineError, match="not loaded"):
            await complete(engine, "third", AdapterRef("a", 0), 4)
        with pytest.raises(EngineError, match="loaded already"):
            engine.install(AdapterRef("a", 1), old)

    asyncio.run(scenario())


def test_the_adapter_that_answers_was_trained(base: Any, engine: EmbeddedEngine) -> None:
    """7: right weights pass with difference 0; the base, or another adapter, under the name is refused."""
    trainer = trained(base, 0.05)

    async def publish_and_check(version: int, weights: AdapterWeights) -> float:
        await SameTensors(engine.install, lambda name: weights).publish("a", AdapterRef("a", version))
        probe = Probe("a", PROMPT, 0.0)
        return await probe.check(engine, AdapterRef("a", version), probe.trained(trainer))

    async def scenario() -> None:
        right = trainer.weights("a")
        nothing = AdapterWeights.from_masters(right.layout, right.scaling, torch.zeros(right.layout.size), base.dtype)
        assert await publish_and_check(0, right) == 0.0
        with pytest.raises(ProbeError, match="with the base model"):
            await publish_and_check(1, nothing)
        with pytest.raises(ProbeError, match="not what was trained"):
            await publish_and_check(2, trained(base, 0.02).weights("a"))

    asyncio.run(scenario())


def test_a_long_prompt_is_scored_a_part_at_a_time_with_the_same_bits(engine: EmbeddedEngine) -> None:
    prompt: IntArray = np.arange(300, dtype=np.int32)
    request = GenerateRequest("r", "job", prompt[:250], None, SamplingParams(max_tokens=12), (7,))

    async def scenario() -> None:
        (chunk,) = [chunk async for chunk in engine.generate(request)]
        whole = np.concatenate([prompt[:250], chunk.token_ids, prompt])
        scores = await engine.score(whole, None)
        assert (len(scores), scores[0]) == (len(whole), 0)
        assert np.array_equal(scores[250 : 250 + len(chunk.token_ids)], chunk.logprobs)
        ids, logprobs = await engine.top_logprobs(whole, None, 500)
        places, ranks = np.nonzero(ids == whole[:, None])
        assert set(places) >= {*range(250, 262)}
        assert np.array_equal(logprobs[places[places > 0], ranks[places > 0]], scores[places[places > 0]])

    asyncio.run(scenario())


def test_abort_one_jobs_requests(engine: EmbeddedEngine) -> None:
    """Every request of a job ends with what it has; another job's goes on as if nothing had happened."""

    async def of_job(name: str, job: str, tokens: int) -> Chunk:
        request = GenerateRequest(name, job, PROMPT, None, SamplingParams(max_tokens=tokens), (5,))
        (chunk,) = [chunk async for chunk in engine.generate(request)]
        return chunk

    async def scenario() -> None:
        alone = await of_job("alone", "theirs", 80)
        mine = [asyncio.create_task(of_job(f"mine-{index}", "mine", 900)) for index in range(3)]
        theirs = asyncio.create_task(of_job("theirs", "theirs", 80))
        while len(engine.decoder.rows.running) < 4:
            await asyncio.sleep(0.001)
        await engine.abort("mine")
        ended = [await task for task in mine]
        assert {chunk.finish_reason for chunk in ended} == {FinishReason.ABORT}
        assert all(0 < len(chunk.token_ids) < 900 for chunk in ended)
        assert np.array_equal((await theirs).token_ids, alone.token_ids)
        assert engine.cache.n_free == engine.cache.n_blocks

    asyncio.run(scenario())


def test_a_token_outside_the_vocabulary_is_refused(engine: EmbeddedEngine) -> None:
    """6: it would be an error in the middle of everybody's batch."""
    request = GenerateRequest("bad", "job", np.array([1, 1 << 20], np.int32), None, SamplingParams(max_tokens=4), (1,))

    async def scenario() -> None:
        with pytest.raises(EngineError, match="those of this base go from 0"):
            _ = [chunk async for chunk in engine.generate(request)]

    asyncio.run(scenario())
