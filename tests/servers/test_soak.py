"""The long tests, run by `make soak`: three hundred publishes on a real vLLM leave no entry, no file and no memory behind."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from motet.config import AdapterConfig, EngineConfig, RolloutConfig
from motet.core.types import AdapterRef
from motet.hosts import servers
from motet.hosts.launch import load
from motet.rollout.file_sync import FileSync
from motet.training.torch_trainer import TorchTrainer
from tests.support.vllm_server import WANTED, launch

pytestmark = [pytest.mark.soak, pytest.mark.alone]

PUBLISHES = 300
SETTLED = 100
"""Publishes after which memory has found its level."""


def memory_mb(pid: int) -> float:
    """Of a process and everything below it."""
    root = psutil.Process(pid)
    return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 2**20


def test_three_hundred_publishes_leave_nothing_behind(tmp_path: Path) -> None:
    base = load("small", EngineConfig(dtype="float32", threads=1))
    directory = tmp_path / "served"
    config = RolloutConfig(engine="vllm", launch=launch(), directory=str(directory))
    engine = servers.build_servers(base.info, config, WANTED, "soak0000", tmp_path)
    trainer = TorchTrainer(base, slots=2)
    trainer.add_adapter("job", AdapterConfig(rank=16), 1)
    sync, probe = FileSync(engine, trainer), np.array(base.info.tokenizer.encode("Sort the letters: d a c"), np.int32)
    found = asyncio.run(_publish_often(engine, sync, probe, directory))
    level, end = found["memory"][SETTLED], found["memory"][PUBLISHES - 1]
    seconds = found["seconds"]
    early, late = statistics.median(seconds[SETTLED // 2 : SETTLED]), statistics.median(seconds[-100:])
    worst = sorted(seconds)[-PUBLISHES // 100]
    print(
        f"{PUBLISHES} publishes: median {1000 * statistics.median(seconds):.0f} ms "
        f"({1000 * early:.0f} ms early, {1000 * late:.0f} ms late), 99 % within {1000 * worst:.0f} ms; "
        f"at most {max(found['entries'])} entries and {max(found['files'])} directories; "
        f"server memory {level:.0f} MiB after {SETTLED}, {end:.0f} MiB at the end"
    )
    assert max(found["entries"]) <= 3
    assert max(found["files"]) <= 6
    assert end < 1.05 * level
    assert late < 1.5 * early
    assert not directory.exists() or not list(directory.iterdir())


async def _publish_often(engine: Any, sync: FileSync, probe: Any, directory: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"seconds": [], "entries": [], "files": [], "memory": []}
    (replica,) = engine.fleet.replicas
    try:
        await engine.ready()
        (process,) = engine.fleet.processes.values()
        for version in range(PUBLISHES):
            started = time.perf_counter()
            await sync.publish("job", AdapterRef("job.soak0000.0.1", version))
            found["seconds"].append(time.perf_counter() - started)
            await engine.score(probe, AdapterRef("job.soak0000.0.1", version))
            if version:
                await engine.unload_adapter(AdapterRef("job.soak0000.0.1", version - 1))
            found["entries"].append(len(replica.loaded))
            found["files"].append(len(await asyncio.to_thread(lambda: list(directory.glob("*/*")))))
            found["memory"].append(memory_mb(process.pid))
        await replica.greet()
        assert len(replica.loaded) <= 2, f"the server lists {sorted(replica.loaded)}"
        await engine.unload_adapter(AdapterRef("job.soak0000.0.1", PUBLISHES - 1))
    finally:
        await engine.close()
    return found
