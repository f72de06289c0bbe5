"""A client's side of `protocol_server`: requests, what they should bring, and adapters to load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from motet.core.types import AdapterRef, GenerateRequest, SamplingParams
from tests.support.fake_base import END, FakeAdapter, FakeTokenizer, write_adapter
from tests.support.fake_engine import FakeEngine
from tests.support.protocol_server import ProtocolServer
from tests.support.waiting import PATIENCE

PROMPT = FakeTokenizer().encode("ab? ")
GENERATE, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Client = httpx2.AsyncClient
Test = Callable[[Client], Awaitable[None]]


def adapter_directory(path: Path, name: str, *, rank: int = 4, strength: float = 1.5) -> str:
    """An adapter that is far from the base, in a directory of its own."""
    fresh = FakeAdapter.fresh(rank, 8.0, sum(map(ord, name)))
    shift = np.where(np.arange(len(fresh.b)) % 7 == len(name) % 7, strength, 0.0)
    (path / name).mkdir()
    write_adapter(path / name, FakeAdapter(rank, 8.0, fresh.a, shift))
    return str(path / name)


def run(server: ProtocolServer, test: Test, **options: Any) -> None:
    """Run a test with a client in a loop of its own."""

    async def go() -> None:
        async with Client(base_url=server.url, timeout=PATIENCE, **options) as client, asyncio.timeout(PATIENCE):
            await test(client)

    asyncio.run(go())


def in_process(seeds: tuple[int, ...], directory: str | None = None, **sampling: Any) -> list[tuple[Any, ...]]:
    """What a `FakeEngine` in this process answers: tokens, logprobs and the reason, by completion."""

    async def go() -> list[tuple[Any, ...]]:
        engine, ref = FakeEngine(), None
        if directory is not None:
            ref = AdapterRef("a", 1)
            await engine.load_adapter(ref, Path(directory))
        params = SamplingParams(**{"max_tokens": 20, "stop_token_ids": (END,), **sampling})
        request = GenerateRequest("r", "j", np.array(PROMPT, np.int32), ref, params, seeds)
        found = [chunk async for chunk in engine.generate(request)]
        ordered = sorted(found, key=lambda chunk: chunk.index)
        return [(one.token_ids.tolist(), one.logprobs.tolist(), one.finish_reason) for one in ordered]

    with ThreadPoolExecutor(1) as thread:  # so that tests may ask inside a loop
        return thread.submit(asyncio.run, go()).result()


def body(model: str | None = None, *, stream: bool = False, id: str | None = None, **params: Any) -> dict[str, Any]:
    """A request for completions."""
    full = {"temperature": 1.0, "max_tokens": 20, "seed": 7, "logprobs": 0, "return_token_ids": True, **params}
    found = {"prompt": PROMPT, **full, "stream": stream, "model": model, "request_id": id}
    return {key: value for key, value in found.items() if value is not None}


def read(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The completions of an answer, as `in_process` gives them."""
    return [
        (choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        for choice in answer["choices"]
    ]


async def load(client: Client, name: str, path: str) -> httpx2.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": path})
