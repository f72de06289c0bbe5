"""Which versions an engine holds, and until when: reference counts, no reuse, and waiting for a version to be announced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.config import AdapterConfig
from motet.core.errors import AdapterError, EngineError
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest, SamplingParams
from motet.runtime.versions import Versions
from tests.support.fake_base import END, FakeAdapter
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1


def make(jitter: int | None = None) -> tuple[Versions, FakeEngine]:
    engine = FakeEngine(jitter=jitter)
    sync = FakeSync(engine, lambda name: FakeAdapter.fresh(4, 4.0, seed=1))
    return Versions("a", "a.run.0", engine, sync), engine


def loaded(engine: FakeEngine) -> set[int]:
    return {ref.version for ref in engine.loaded}


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE):
            await scene()

    asyncio.run(limited())


def test_a_held_version_stays_until_the_last_hold_ends() -> None:
    versions, engine = make()

    async def scene() -> None:
        await versions.publish(0)
        await versions.announce(0, 0)
        with versions.hold(0) as ref:
            assert ref == AdapterRef("a.run.0", 0)
            with versions.hold(0):
                await versions.publish(1)
                await versions.announce(1, 1)
                assert loaded(engine) == {0, 1}
            await versions.collect()
            assert loaded(engine) == {0, 1}
        await versions.collect()
        assert loaded(engine) == {1}
        await versions.drop_all()
        assert loaded(engine) == set()

    play(scene)
    assert engine.loads == engine.unloads


@pytest.mark.parametrize("fault", ["publish", "restore", "cancelled"])
def test_a_version_of_a_team_of_which_one_adapter_fails_leaves_none(fault: str, tmp_path: Path) -> None:
    trainer, engine = FakeTrainer(), FakeEngine()
    trainer.add_adapter("a#one", AdapterConfig(), 1)
    (tmp_path / "one").mkdir()
    trainer.save_adapter("a#one", tmp_path / "one", optimizer=False)
    versions = Versions("a", "a.run.0", engine, FakeSync(engine, trainer.weights), roles=("one", "two"))

    async def scene() -> None:
        if fault == "cancelled":
            trainer.add_adapter("a#two", AdapterConfig(), 1)
            publishing = asyncio.create_task(versions.publish(0))
            while not engine.loaded:
                await asyncio.sleep(0)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
        else:
            with pytest.raises(AdapterError):
                await (versions.publish(0) if fault == "publish" else versions.restore(0, tmp_path))
        assert engine.loads
        await versions.drop_all()
        assert not engine.loaded

    play(scene)


def test_versions_of_a_job_that_is_cancelled_while_they_are_unloaded_go_all() -> None:
    versions, engine = make()

    async def scene() -> None:
        for version in range(4):
            await versions.publish(version)
        collecting = asyncio.create_task(versions.announce(3, oldest_needed=3))
        while loaded(engine) == {0, 1, 2, 3}:
            await asyncio.sleep(0)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert loaded(engine) == {3}

    play(scene)


@pytest.mark.parametrize(("lag", "stay"), [(2, {5, 6, 7}), (3, {4, 5, 6, 7})])
def test_versions_that_admissions_may_ask_for_stay(lag: int, stay: set[int]) -> None:
    versions, engine = make()

    async def scene() -> None:
        for version in range(8):
            await versions.publish(version)
            await versions.announce(version, max(0, version - lag))
        assert loaded(engine) == stay

    play(scene)


def test_versions_that_were_held_go_once_and_none_stays_when_the_job_leaves() -> None:
    versions, engine = make()

    async def scene() -> None:
        for version in range(6):
            await versions.publish(version)
            with versions.hold(version):
                await versions.announce(version, version)
            assert loaded(engine) == {version}
        await versions.drop_all()
        assert loaded(engine) == set()

    play(scene)
    assert set(engine.unloads.values()) <= {1}


def test_collecting_twice_at_once() -> None:
    """A step and a publish may both collect, the second while the first waits for the engine."""
    versions, engine = make()

    async def scene() -> None:
        for version in range(4):
            await versions.publish(version)
        await asyncio.gather(versions.announce(3, 3), versions.collect(), versions.collect())
        assert loaded(engine) == {3}

    play(scene)
    assert set(engine.unloads.values()) == {1}


def test_waiting_for_a_version_ends_when_it_is_announced() -> None:
    versions, _ = make()

    async def scene() -> None:
        waiting = [asyncio.create_task(versions.wait_for(version)) for version in (0, 1, 1)]
        await asyncio.sleep(0)
        await versions.publish(0)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "published is not yet announced: the probe comes between"
        await versions.announce(0, 0)
        await waiting[0]
        assert not waiting[1].done()
        waiting[2].cancel()
        await versions.publish(1)
        await versions.announce(1, 1)
        await waiting[1]
        await versions.wait_for(0)

    play(scene)


def test_a_reference_is_used_once() -> None:
    versions, _ = make()

    async def scene() -> None:
        await versions.publish(0)
        await versions.drop_all()
        with pytest.raises(EngineError, match=r"version 0 of adapter.*was loaded before"):
            await versions.publish(0)

    play(scene)


def test_a_version_from_disk(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.add_adapter("a", AdapterConfig(rank=4), seed=3)
    trainer.save_adapter("a", tmp_path, optimizer=True)
    versions, engine = make()

    async def scene() -> None:
        await versions.restore(3, tmp_path)
        with versions.hold(3):
            await versions.announce(3, 4)
            assert loaded(engine) == {3}
        await versions.collect()
        assert loaded(engine) == set()

    play(scene)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60)
def test_any_order_of_events(seed: int) -> None:
    """Publishing, sampling of several steps and collecting at once: a version goes once, and never under a reader.

    `FakeEngine` raises where it does, and `Versions` where it counts wrongly.
    """
    versions, engine = make(seed)

    async def sample(name: str, version: int) -> None:
        await versions.wait_for(version)
        with versions.hold(version) as ref:
            request = GenerateRequest(
                name, "a", np.array([5, 9], np.int32), ref, SamplingParams(max_tokens=3), (version, 7)
            )
            chunks = [chunk async for chunk in engine.generate(request)]
            assert {one for chunk in chunks for one in chunk.versions.tolist()} == {version}
        await versions.collect()

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            for step in range(8):
                for place in range(2):
                    tasks.create_task(sample(f"{step}/{place}", max(0, step - 2)))
            for version in range(8):
                await versions.publish(version)
                tasks.create_task(versions.announce(version, max(0, version - 2)))
                for _ in range(seed % 5):
                    await asyncio.sleep(0)
        await versions.collect()
        assert loaded(engine) == {5, 6, 7}
        await versions.drop_all()

    play(scene)
    assert set(engine.unloads.values()) == {1}


# --- the fake engine itself ------------------------------------------------------------------------------------------


def request(name: str = "r", ref: AdapterRef | None = None, **fields: object) -> GenerateRequest:
    sampling = {"max_tokens": 12, "stop_token_ids": (END,), **fields}
    stream = bool(sampling.pop("stream", False))
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return GenerateRequest(name, "a", np.array([40, 50], np.int32), ref, params, (11, 12, 13), stream)


async def complete(engine: FakeEngine, asked: GenerateRequest) -> dict[int, list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    async for chunk in engine.generate(asked):
        found.setdefault(chunk.index, []).append(chunk)
    return found


def test_what_is_sampled_depends_neither_on_order_nor_on_streaming() -> None:
    async def scene() -> None:
        whole = await complete(FakeEngine(), request())
        for jitter in range(4):
            pieces = await complete(FakeEngine(jitter=jitter, capacity=1 + jitter), request(stream=True))
            for index, chunks in pieces.items():
                (one,) = whole[index]
                assert [token for chunk in chunks for token in chunk.token_ids] == one.token_ids.tolist()
                assert "".join(chunk.text for chunk in chunks) == one.text
                assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
                assert chunks[-1].finish_reason is one.finish_reason

    play(scene)


def test_logprobs_are_those_of_the_score() -> None:
    engine = FakeEngine()
    ref = AdapterRef("a", 0)
    adapter = FakeAdapter.fresh(4, 8.0, seed=1)
    engine.install(ref, FakeAdapter(4, 8.0, adapter.a, np.linspace(-1, 1, len(adapter.b))))

    async def scene() -> None:
        asked = request(ref=ref)
        for (chunk,) in (await complete(engine, asked)).values():
            scored = await engine.score(np.concatenate([asked.prompt_ids, chunk.token_ids]), ref)
            assert scored[2:].tolist() == chunk.logprobs.tolist()
            based = await engine.score(np.concatenate([asked.prompt_ids, chunk.token_ids]), None)
            assert based[2:].tolist() != chunk.logprobs.tolist()

    play(scene)


def test_stops_and_truncation() -> None:
    async def scene() -> None:
        ((full,), *_) = (await complete(FakeEngine(), request(stop_token_ids=()))).values()
        stop = full.text[3:5]
        ((cut,), *_) = (await complete(FakeEngine(), request(stop=(stop,)))).values()
        assert cut.finish_reason is FinishReason.STOP
        assert cut.text == full.text[: full.text.index(stop)]
        assert cut.token_ids.tolist() == full.token_ids[: len(cut.token_ids)].tolist()
        greedy = await complete(FakeEngine(), request(temperature=0.0))
        nucleus = await complete(FakeEngine(), request(top_k=1))
        assert len({tuple(one[0].token_ids) for one in [*greedy.values(), *nucleus.values()]}) == 1

    play(scene)


def test_what_cannot_be_served_is_refused() -> None:
    engine = FakeEngine(max_positions=20)

    async def scene() -> None:
        for asked, reason in (
            (request(ref=AdapterRef("b", 1)), "version 1 of 'b' is not loaded"),
            (request(max_tokens=19), "maximum context length is 20 tokens.* you requested 21"),
        ):
            with pytest.raises(EngineError, match=reason):
                await complete(engine, asked)
        with pytest.raises(EngineError, match="version 1 of 'b' is not loaded"):
            await engine.score(np.array([1, 2], np.int32), AdapterRef("b", 1))
        with pytest.raises(EngineError, match="is not loaded"):
            await engine.unload_adapter(AdapterRef("b", 1))

    play(scene)


def test_an_aborted_request_keeps_its_tokens() -> None:
    engine = FakeEngine()

    async def scene() -> None:
        found: list[Chunk] = []
        async for chunk in engine.generate(request(stream=True, stop_token_ids=(), max_tokens=100)):
            found.append(chunk)
            if len(found) == 6:
                await engine.abort("r")
        ends = [chunk for chunk in found if chunk.finish_reason]
        assert [chunk.finish_reason for chunk in ends] == [FinishReason.ABORT] * 3
        assert 6 <= sum(len(chunk.token_ids) for chunk in found) < 30

    play(scene)


def test_unloading_under_a_reader_is_refused() -> None:
    versions, engine = make()

    async def scene() -> None:
        await versions.publish(0)
        chunks = engine.generate(request(ref=versions.ref(0)))
        await anext(chunks)
        with pytest.raises(EngineError, match="unloaded while a request reads it"):
            await engine.unload_adapter(versions.ref(0))
        async for _ in chunks:
            pass
        await engine.unload_adapter(versions.ref(0))

    play(scene)
