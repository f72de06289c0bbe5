"""Servers that speak vLLM's or SGLang's protocol in front of a real base, for whole runs in other processes.

with base_servers(load("small", EngineConfig(threads=1)), 2) as servers:
    ...  # requests to servers[0].url
    servers[1].go()
    assert servers[0].loads

What a completion gets depends on its seed and its adapter alone, so whichever server had a job, its bytes are the same.
`protocol_server` goes wrong in more ways, over a fake base. As a program it takes the `--port` of vLLM's command line: what
`stand_in` writes is an interpreter for `rollout.launch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from motet.config import EngineConfig
from motet.config.budgets import Need
from motet.core.types import AdapterRef, GenerateRequest, SamplingParams
from motet.hosts.launch import build, load
from motet.hosts.workshop import Workshop
from motet.model.lora_model import LoraModel
from motet.rollout.in_vllm.motet_vllm import PREFIX, fetch
from motet.rollout.server_process import free_port
from tests.conftest import ROOT
from tests.support.waiting import PATIENCE

_serial = itertools.count()


class BaseServer:
    """One of them; they share an engine, not their adapters."""

    def __init__(self, workshop: Workshop, base: LoraModel, port: int = 0, dialect: str = "vllm") -> None:
        self.port, self.dialect = port or free_port(), dialect
        self._home = asyncio.Event()
        self._closed = False
        self.loads: list[str] = []
        """Names, in order."""
        self.paths: list[str] = []
        """Where each was."""
        self.unloads: list[str] = []
        self.completions = 0
        self._asleep = False
        self._engine, self._info = workshop.engine, base.info
        self._adapters: dict[str, AdapterRef] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def loaded(self) -> list[str]:
        return sorted(self._adapters)

    async def serve(self) -> None:
        paths = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake,
        }
        if self.dialect == "sglang":
            paths = {
                ("GET", "/health"): self._health,
                ("GET", "/v1/models"): self._models,
                ("GET", "/server_info"): self._info_of_server,
                ("POST", "/load_lora_adapter"): self._load,
                ("POST", "/unload_lora_adapter"): self._unload,
                ("POST", "/generate"): self._generate,
                ("POST", "/release_memory_occupation"): self._sleep,
                ("POST", "/resume_memory_occupation"): self._wake,
            }

        async def answer(request: Request) -> Response:
            sent = await request.body()
            answered = paths[request.method, request.url.path]
            if self._asleep and request.method == "POST" and answered != self._wake:
                print(f"asleep, and asked for {request.url.path}", flush=True)
                return _refused(500, "the server sleeps")
            return await answered(json.loads(sent) if sent else {})

        routes = [Route(path, answer, methods=[method]) for method, path in paths]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, lifespan="off", log_config=None)
        config.load()
        self._loop = asyncio.get_running_loop()
        while not self._closed:
            self._server = uvicorn.Server(config)
            await self._server.serve()
            await self._home.wait()

    def go(self) -> None:
        """Listen no more, and drop every connection, as a server that is killed; `come_back` starts it again."""
        self._home.clear()
        self._server.force_exit = self._server.should_exit = True
        for connection in list(self._server.server_state.connections):
            self._loop.call_soon_threadsafe(connection.transport.abort)

    def come_back(self) -> None:
        """Without any adapter."""
        self._adapters.clear()
        self._loop.call_soon_threadsafe(self._home.set)

    def close(self) -> None:
        """For good."""
        self._closed = True
        self.go()
        self._loop.call_soon_threadsafe(self._home.set)

    async def _health(self, body: Any) -> Response:
        return Response()

    async def _models(self, body: Any) -> Response:
        cards = [{"id": "base", "parent": None, "max_model_len": self._info.max_positions}]
        return JSONResponse({"data": [*cards, *({"id": name, "parent": "base"} for name in self._adapters)]})

    async def _load(self, body: Any) -> Response:
        name = body["lora_name"]
        self.loads.append(name)
        self.paths.append(path := body["lora_path"])
        ref = AdapterRef(f"{self.port}.{name}", next(_serial))
        with tempfile.TemporaryDirectory() as fetched:
            if path.startswith(PREFIX):
                content = await asyncio.to_thread(fetch, path, None)
                with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                    archive.extractall(path := fetched, filter="data")
            await self._engine.load_adapter(ref, Path(path))
        self._adapters[name] = ref
        return Response()

    async def _unload(self, body: Any) -> Response:
        name = body["lora_name"]
        if name not in self._adapters and self.dialect == "sglang":
            return _refused(400, f"LoRA with name {name} does not exist.")
        if name not in self._adapters:
            return _refused(404, f"The lora adapter '{name}' cannot be found.")
        self.unloads.append(name)
        await self._engine.unload_adapter(self._adapters.pop(name))
        return Response()

    async def _sleep(self, body: Any) -> Response:
        self._asleep = True
        print("sleeps", flush=True)
        return JSONResponse({})

    async def _wake(self, body: Any) -> Response:
        self._asleep = False
        return JSONResponse({})

    async def _sampled(
        self, prompt: Any, adapter: AdapterRef | None, fields: Any, schema: str | None
    ) -> tuple[list[int], list[float], str]:
        """Tokens, logprobs and reason of a completion; `fields` are those that both protocols call the same."""
        sampling = SamplingParams(
            temperature=fields["temperature"],
            max_tokens=fields["max_tokens"],
            stop=tuple(fields["stop"]),
            stop_token_ids=tuple(fields["stop_token_ids"]),
            grammar="" if schema is None else f"start: %json {schema}",
        )
        self.completions += 1
        request = GenerateRequest(f"{next(_serial)}", "job", prompt, adapter, sampling, (fields["seed"],))
        tokens, logprobs, finish = list[int](), list[float](), ""
        async for chunk in self._engine.generate(request):
            tokens += chunk.token_ids.tolist()
            logprobs += chunk.logprobs.tolist()
            finish = chunk.finish_reason.value if chunk.finish_reason else finish
        return tokens, logprobs, finish

    async def _complete(self, body: Any) -> Response:
        if body["model"] not in ("base", *self._adapters):
            return _refused(404, f"The model `{body['model']}` does not exist.")
        adapter, prompt = self._adapters.get(body["model"]), np.array(body["prompt"], np.int32)
        schema = (body.get("structured_outputs") or {}).get("json")
        tokens, logprobs, finish = await self._sampled(prompt, adapter, body, schema)
        choice: dict[str, Any] = {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": finish,
            "prompt_token_ids": body["prompt"],
        }
        if "prompt_logprobs" in body:
            scored = (await self._engine.score(prompt, adapter)).tolist()
            pairs = zip(body["prompt"][1:], scored[1:], strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": one}} for token, one in pairs)]
        return _answered({"choices": [choice]}, body)

    async def _info_of_server(self, body: Any) -> Response:
        return JSONResponse({"context_length": self._info.max_positions})

    async def _generate(self, body: Any) -> Response:
        name, prompt = body["lora_path"], np.array(body["input_ids"], np.int32)
        if name is not None and name not in self._adapters:
            return _refused(400, f"The following requested LoRA adapters are not loaded: {name}")
        adapter, fields = self._adapters.get(name), body["sampling_params"]
        fields = {**fields, "max_tokens": fields["max_new_tokens"], "seed": fields["sampling_seed"]}
        tokens, logprobs, finish = await self._sampled(prompt, adapter, fields, fields.get("json_schema"))
        told = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
        meta: dict[str, Any] = {"output_token_logprobs": told, "finish_reason": {"type": finish}}
        if body["logprob_start_len"] == 0:
            scored = zip(
                [None, *(await self._engine.score(prompt, adapter)).tolist()[1:]], prompt.tolist(), strict=True
            )
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in scored]
        return _answered({"output_ids": tokens, "meta_info": meta}, body)


def _answered(said: Any, body: Any) -> Response:
    """As one event where a stream was asked for."""
    if not body.get("stream"):
        return JSONResponse(said)
    return Response(f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")


def _refused(status: int, message: str) -> Response:
    error = {"message": message, "type": "NotFoundError", "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def stand_in(path: Path, kernels: str = "auto") -> Path:
    """A program that takes the place of the Python that has vLLM, and computes by these kernels."""
    program = f'env PYTHONPATH={ROOT} BASE_KERNELS={kernels} {sys.executable} -m tests.support.base_servers "$@"'
    path.write_text(f"#!/bin/sh\nexec {program}\n")
    path.chmod(0o755)
    return path


def main() -> None:
    """Serve `small` until the process is ended."""
    base = load("small", EngineConfig.model_validate({"threads": 1, "kernels": os.environ["BASE_KERNELS"]}))
    workshop = build(base, EngineConfig(samplers=0, threads=1), [Need(512, 64)])
    asyncio.run(BaseServer(workshop, base, int(sys.argv[sys.argv.index("--port") + 1])).serve())


@contextlib.contextmanager
def base_servers(base: LoraModel, n: int, dialect: str = "vllm") -> Iterator[list[BaseServer]]:
    """So many, while the block runs."""
    workshop = build(base, EngineConfig(samplers=0, threads=1), [Need(512, 64)])
    servers = [BaseServer(workshop, base, dialect=dialect) for _ in range(n)]

    async def serve() -> None:
        await asyncio.gather(*(server.serve() for server in servers))

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
        thread.join(PATIENCE)
        workshop.close()


if __name__ == "__main__":
    main()
