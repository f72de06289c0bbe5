"""How long a version takes to 1, 4 and 16 servers, by files and as tensors: `python -m bench.publish [MB]`.

The servers speak vLLM's protocol and read or fetch a version's bytes as its worker does, but have no base. All are on this
machine, in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import uvicorn
from safetensors.numpy import save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from motet.config.dialects import DIALECTS
from motet.config.rollout import RolloutConfig
from motet.core.token_ids import TokenIds
from motet.core.types import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, AdapterRef
from motet.rollout.connection import Clocks
from motet.rollout.in_vllm.motet_vllm import PREFIX, fetch
from motet.rollout.replica import Replica
from motet.rollout.server import Demand, ServerEngine, ServerLimits
from motet.rollout.version_files import VersionFiles
from motet.rollout.version_server import VersionServer

SERVERS = (1, 4, 16)
WAYS = ("files", "tensors")
PUBLISHES = 5
CLOCKS = Clocks(connect=60.0, health=60.0)
"""A machine that does nothing but copy answers late."""
MEMORY = Path("/dev/shm")


def server() -> Starlette:
    """A server without a base."""

    async def load(request: Request) -> Response:
        await asyncio.to_thread(_take, (await request.json())["lora_path"])
        return Response()

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "base", "parent": None, "max_model_len": 512}]})

    async def well(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/health", well),
            Route("/v1/models", models),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", well, methods=["POST"]),
        ]
    )


def _take(path: str) -> None:
    if path.startswith(PREFIX):
        fetch(path, None)
    else:
        for file in ADAPTER_FILES:
            (Path(path) / file).read_bytes()


async def _serve(apps: Sequence[Starlette], pipe: Pipe) -> None:
    listening = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in apps]
    pipe.send([f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listening])
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning")) for app in apps]
    await asyncio.gather(*(program.serve([at]) for program, at in zip(servers, listening, strict=True)))


def _serve_all(pipe: Pipe) -> None:
    asyncio.run(_serve([server() for _ in range(max(SERVERS))], pipe))


@contextlib.contextmanager
def process() -> Iterator[list[str]]:
    """A process with servers; their URLs."""
    here, there = multiprocessing.Pipe()
    started = multiprocessing.get_context("spawn").Process(target=_serve_all, args=(there,))
    started.start()
    try:
        yield here.recv()
    finally:
        started.terminate()
        started.join()


async def publish(way: str, urls: Sequence[str], adapter: Path, directory: Path) -> list[float]:
    """Seconds of each publish, from the first byte written until every server has loaded it."""
    files = VersionFiles(directory / "served")
    versions = VersionServer(files.directory, urls, []) if way == "tensors" else None
    replicas = [Replica(url, DIALECTS["vllm"], CLOCKS, versions=versions) for url in urls]
    bounds = ServerLimits(64, TokenIds(512), 512, Demand(1, 2, 16), 0.0, RolloutConfig().patience_seconds)
    engine, seconds = ServerEngine(replicas, {}, files, lambda tokens: "", bounds, "bench"), list[float]()
    await engine.ready()
    while len(engine.fleet.up) < len(urls):
        await engine.fleet.wait()
        await asyncio.sleep(0.05)
    for version in range(PUBLISHES + 1):
        ref, begun = AdapterRef(f"job.{way}.{len(urls)}", version), time.perf_counter()
        await engine.load_adapter(ref, adapter)
        seconds.append(time.perf_counter() - begun)
        assert all(ref.served_name in replica.loaded for replica in replicas)
        await engine.unload_adapter(ref)
    assert not engine.fleet.notes()
    await engine.close()
    return seconds[1:]


def main() -> None:
    """Print a table."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        directory, adapter = Path(memory), Path(memory) / "adapter"
        adapter.mkdir()
        (adapter / ADAPTER_CONFIG).write_text("{}")
        save_file({"weight": np.zeros(megabytes * 10**6, np.uint8)}, adapter / ADAPTER_WEIGHTS)
        servers = " | ".join(f"{count} servers" for count in SERVERS[1:])
        print(f"| {megabytes} MB | 1 server | {servers} | the last against the first |")
        print(f"|---|{'---|' * len(SERVERS)}---|")
        with process() as urls:
            for way in WAYS:
                medians = [statistics.median(asyncio.run(publish(way, urls[:n], adapter, directory))) for n in SERVERS]
                times = " | ".join(f"{1000 * seconds:.0f} ms" for seconds in medians)
                print(f"| {way} | {times} | {medians[-1] / medians[0]:.1f}× |", flush=True)
                shutil.rmtree(directory / "served", ignore_errors=True)


if __name__ == "__main__":
    main()
