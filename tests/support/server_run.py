"""A `ServerEngine` on protocol servers: built, asked, closed, and compared with a `FakeEngine` in this process.

with ProtocolServer("vllm") as server:
    drive(engine_on([server], tmp_path), test)

`test(engine)` runs in a loop of its own; afterwards the engine is closed and nothing of it may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from motet.algorithms import Grpo
from motet.config import AdapterConfig
from motet.config.dialects import DIALECTS
from motet.core.batch import AdamW, Batch, Sample, Segment
from motet.core.errors import EngineError
from motet.core.token_ids import TokenIds
from motet.core.types import AdapterRef, Chunk, GenerateRequest, SamplingParams
from motet.protocols import RolloutEngine
from motet.rollout.connection import Clocks
from motet.rollout.file_sync import FileSync
from motet.rollout.replica import Replica
from motet.rollout.server import Demand, ServerEngine, ServerLimits
from motet.rollout.server_process import ServerProcess
from motet.rollout.version_files import VersionFiles
from tests.support.fake_base import END, VOCABULARY, FakeTokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.fake_trainer import FakeTrainer
from tests.support.protocol_server import ProtocolServer
from tests.support.waiting import PATIENCE, until

RUN = "run"
CLOCKS = Clocks(connect=5.0, health=2.0, load=10.0, request=20.0, retry=0.01, look=0.02)
IMPATIENT = replace(CLOCKS, health=0.15)
"""For servers that hang; a machine that is busy may drain others too."""
BOUNDS = ServerLimits(
    rows=8,
    vocabulary=TokenIds(VOCABULARY),
    max_positions=4096,
    wanted=Demand(1, 2, 4),
    tolerance=1e-6,
    wait_seconds=10.0,
)
PROMPT = tuple(FakeTokenizer().encode("ab? "))
PROBE = np.array(FakeTokenizer().encode("a probe of many letters"), np.int32)

Test = Callable[[ServerEngine], Awaitable[None]]


class Whole(NamedTuple):
    """A completion, all its chunks together."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    finish: str


def replica_of(server: ProtocolServer, clocks: Clocks = CLOCKS, headers: Mapping[str, str] | None = None) -> Replica:
    """A replica whose health is asked for more often than a real server's."""
    dialect = replace(DIALECTS[server.dialect], health_seconds=0.0)
    return Replica(server.url, dialect, clocks, headers or {})


async def greeted(engine: ServerEngine) -> None:
    """Wait until every server was asked once, however short the patience is: a busy machine may need longer."""
    with contextlib.suppress(EngineError):
        await engine.ready()
    await until(lambda: all(replica.up or replica.note != "not asked yet" for replica in engine.fleet.replicas))


def set_aside() -> None:
    """Before an engine for `drive` is made: it looks for garbage among what comes later; among all it takes half a second."""
    gc.freeze()


def engine_on(
    servers: Sequence[ProtocolServer],
    directory: Path,
    *,
    clocks: Clocks = CLOCKS,
    headers: Mapping[str, str] | None = None,
    run: str = RUN,
    processes: Mapping[str, ServerProcess] | None = None,
    sleep: bool = False,
    **bounds: Any,
) -> ServerEngine:
    """An engine on these servers, with `BOUNDS` apart from what is given."""
    set_aside()
    replicas = [replica_of(server, clocks, headers) for server in servers]
    files = VersionFiles(directory / "served")
    limits = replace(BOUNDS, **bounds)
    how = replicas[0].dialect.sleep(False) if sleep else None
    return ServerEngine(replicas, processes or {}, files, FakeTokenizer().decode, limits, run, how)


def drive(engine: ServerEngine, test: Test, seconds: float = PATIENCE) -> None:
    """Run a test with an engine, close it, and look for what is left."""

    async def go() -> None:
        try:
            async with asyncio.timeout(seconds):
                await test(engine)
        finally:
            await engine.close()
        for replica in engine.fleet.replicas:
            assert (replica.requests, replica.tokens) == (0, 0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:  # the other end of a connection hears a moment later that it was closed
            _, others = await asyncio.wait(others, timeout=PATIENCE)
        assert not others

    asyncio.run(go())
    gc.collect()  # a socket that was not closed warns here, and warnings are errors
    gc.unfreeze()


# --- adapters ---------------------------------------------------------------------------------------------------------------


def trainer_of(*names: str, rank: int = 4, kind: type[FakeTrainer] = FakeTrainer) -> FakeTrainer:
    """A trainer with fresh adapters, which answer as the base does."""
    trainer = kind(slots=len(names))
    for name in names:
        trainer.add_adapter(name, AdapterConfig(rank=rank, alpha=2.0 * rank), seed=sum(map(ord, name)))
    return trainer


def learn(trainer: FakeTrainer, name: str, text: str = "learn this", rate: float = 0.5) -> None:
    """One step that can be seen in every answer."""
    tokens = np.array(FakeTokenizer().encode(text), np.int32)
    ones = np.ones(len(tokens), np.float32)
    sample = Sample(tokens, np.arange(len(tokens)) > 0, -ones, ones, np.zeros(len(tokens), np.int32))
    trainer.forward_backward(Batch((Segment(name, (sample,), Grpo(), float(len(tokens))),)))
    trainer.optim_step(name, AdamW(rate))


def ref(version: int, job: str = "job") -> AdapterRef:
    """A version as the runtime names it: job, run, attempt, start."""
    return AdapterRef(f"{job}.{RUN}.1.1", version)


async def publish(engine: ServerEngine, trainer: FakeTrainer, version: int, job: str = "job") -> AdapterRef:
    """Hand the trainer's weights to the engine."""
    await FileSync(engine, trainer).publish(job, ref(version, job))
    return ref(version, job)


# --- requests ---------------------------------------------------------------------------------------------------------------


def request(
    adapter: AdapterRef | None = None,
    seeds: Sequence[int] = (1, 2, 3),
    *,
    id: str = "r",
    job: str = "job",
    stream: bool = False,
    prompt: Sequence[int] = PROMPT,
    **sampling: Any,
) -> GenerateRequest:
    """A request; seeds are small, because SGLang's have 31 bits."""
    params = SamplingParams(**{"max_tokens": 20, "stop_token_ids": (END,), **sampling})
    return GenerateRequest(id, job, np.array(prompt, np.int32), adapter, params, tuple(seeds), stream)


def long_request(adapter: AdapterRef | None = None, seeds: Sequence[int] = (1, 2), **fields: Any) -> GenerateRequest:
    """A request that ends for its length only."""
    return request(adapter, seeds, **{"max_tokens": 60, "stop_token_ids": (), **fields})


async def collect(
    engine: RolloutEngine, asked: GenerateRequest, told: Callable[[Chunk], object] = lambda chunk: None
) -> list[Whole]:
    """All completions of a request, in the order of its seeds; each chunk is `told` when it comes."""
    found = [Whole([], [], [], "", "") for _ in asked.seeds]
    async for chunk in engine.generate(asked):
        told(chunk)
        before = found[chunk.index]
        assert not before.finish
        found[chunk.index] = Whole(
            before.tokens + chunk.token_ids.tolist(),
            before.logprobs + chunk.logprobs.tolist(),
            before.versions + chunk.versions.tolist(),
            before.text + chunk.text,
            "" if chunk.finish_reason is None else chunk.finish_reason.value,
        )
    return found


async def in_process(asked: GenerateRequest, trainer: FakeTrainer | None = None, job: str = "job") -> list[Whole]:
    """What a `FakeEngine` answers with the trainer's present weights."""
    engine = FakeEngine(capacity=64)
    if asked.adapter is not None:
        assert trainer is not None
        engine.install(asked.adapter, trainer.weights(job))
    return await collect(engine, replace(asked, stream=False))


def asking(engine: ServerEngine, *requests: GenerateRequest) -> asyncio.Future[list[list[Whole]]]:
    """Ask for several at once, in the background."""
    return asyncio.gather(*(collect(engine, one) for one in requests))


async def sampled(server: ProtocolServer, turns: int) -> None:
    """Wait until its engine has sampled so many tokens more, over all completions."""
    before = server.engine.turns
    await until(lambda: server.engine.turns >= before + turns)


async def ticks(seconds: float) -> AsyncIterator[float]:
    """Look again and again for so long."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        yield now
        await asyncio.sleep(0.002)


async def all_up(engine: ServerEngine) -> None:
    await engine.ready()
    await until(lambda: len(engine.fleet.up) == len(engine.fleet.replicas))
