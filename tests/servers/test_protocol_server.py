"""The protocol server says what a real vLLM says (`test_vllm.py` asks that the same), and evicts adapters as it does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from tests.support.protocol_client import (
    GENERATE,
    PROMPT,
    UNLOAD,
    Client,
    adapter_directory,
    body,
    in_process,
    load,
    read,
    run,
)
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.vllm_contract import CLAUSES, Served
from tests.support.waiting import PATIENCE, until


@pytest.mark.parametrize("clause", CLAUSES)
def test_protocol_server_answers_as_vllm(clause: Callable[[Served], None], tmp_path: Path) -> None:
    adapter, other = (adapter_directory(tmp_path, name) for name in ("a", "other"))
    large = adapter_directory(tmp_path, "large", rank=32)
    with (
        ProtocolServer(setup=Setup(max_model_len=512, api_key="secret")) as server,
        httpx2.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        clause(Served(client, "secret", "fake-base", adapter, other, large, PROMPT, 97, 512))


def test_unloading_drops_the_entry_and_not_what_runs(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", directory)
        server.faults.token_seconds = 0.01
        asked = asyncio.create_task(client.post(GENERATE, json=body("v1", ignore_eos=True)))
        await until(lambda: server.counts.open["v1"] == 1)
        assert (await client.post(UNLOAD, json={"lora_name": "v1"})).status_code == 200
        assert server.entries == ()
        assert read((await asked).json()) == expected
        assert (await client.post(GENERATE, json=body("v1"))).status_code == 404

    directory = adapter_directory(tmp_path, "v1")
    expected = in_process((7,), directory, stop_token_ids=())
    with ProtocolServer() as server:
        run(server, test)
        assert server.counts.unloads == {"v1": 1}


@pytest.mark.parametrize("dies", [False, True])
def test_an_evicted_adapter_is_read_again_and_must_be_there(tmp_path: Path, dies: bool) -> None:
    async def test(client: Client) -> None:
        answers = []
        for loaded, asked in (("a", ""), ("b", "a"), ("c", "ab")):  # memory has room for two; c takes the room of b
            await load(client, loaded, directories[loaded])
            answers += [read((await client.post(GENERATE, json=body(name))).json()) for name in asked]
        assert answers == expected
        assert server.counts.re_reads == {"b": 1}
        shutil.rmtree(directories["c"])
        response = await client.post(GENERATE, json=body("c"))
        assert (response.status_code, response.json()["error"]["code"]) == (500, 500)
        if dies:
            await until(lambda: not server.alive)
            with pytest.raises(httpx2.ConnectError):
                await client.get("/health")
        else:
            assert (await client.get("/health")).status_code == 200

    directories = {name: adapter_directory(tmp_path, name, strength=1.0 + place) for place, name in enumerate("abc")}
    expected = [in_process((7,), directories[name]) for name in "aab"]
    with ProtocolServer(setup=Setup(max_loras=2, max_cpu_loras=2, dies=dies)) as server:
        run(server, test)
        assert server.counts.failed_reads == 1


def test_requests_for_a_further_adapter_wait(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        for name in "ab":
            await load(client, name, adapter_directory(tmp_path, name))
        server.faults.token_seconds = 0.002
        long = body("a", max_tokens=4000, ignore_eos=True, id="long")
        first = asyncio.create_task(client.post(GENERATE, json=long))
        await until(lambda: server.counts.open["a"] == 1)
        second = asyncio.create_task(client.post(GENERATE, json=body("b", id="short")))
        third = asyncio.create_task(client.post(GENERATE, json=body("b", id="leaves")))
        await until(lambda: server.counts.open["b"] == 2)
        base = await client.post(GENERATE, json=body())  # needs no turn
        assert base.status_code == 200
        assert 'running_lora_adapters="a",waiting_lora_adapters="b"' in (await client.get("/metrics")).text
        assert not second.done()
        third.cancel()
        await until(lambda: server.counts.open["b"] == 1)
        first.cancel()
        assert (await second).json()["choices"][0]["finish_reason"] in ("stop", "length")

    with ProtocolServer(setup=Setup(max_loras=1)) as server:
        run(server, test)
