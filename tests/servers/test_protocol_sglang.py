"""SGLang's dialect of the protocol server says what SGLang says."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.protocol_client import PROMPT, Client, adapter_directory, in_process, run
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.server_run import sampled
from tests.support.waiting import until

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"


def body(adapter: str | None = None, *, stream: bool = False, rid: str | None = None, **params: Any) -> dict[str, Any]:
    """A generate request."""
    full = {"temperature": 1.0, "max_new_tokens": 20, "sampling_seed": 7, **params}
    found = {"input_ids": PROMPT, "sampling_params": full, "stream": stream, "lora_path": adapter, "rid": rid}
    return {key: value for key, value in {**found, "return_logprob": True}.items() if value is not None}


def read(answer: dict[str, Any]) -> tuple[Any, ...]:
    """A completion, as `in_process` gives it."""
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    return (
        answer["output_ids"],
        [logprob for logprob, _, _ in meta["output_token_logprobs"]],
        meta["finish_reason"]["type"],
    )


async def load(client: Client, name: str, path: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(LOAD, json={"lora_name": name, "lora_path": path, **fields})
    found: dict[str, Any] = response.json()
    assert response.status_code == (200 if found["success"] else 400)
    return found


def test_errors_are_those_of_sglang(tmp_path: Path) -> None:
    async def error(client: Client, value: dict[str, Any], status: int, text: str) -> None:
        response = await client.post("/generate", json=value)
        assert response.status_code == status
        assert text in response.json()["error"]["message"]

    async def test(client: Client) -> None:
        assert (await load(client, "a", directory))["success"]
        await error(client, body("b"), 400, "Got LoRA adapter that has never been loaded: b")
        await error(client, body(max_new_tokens=61), 400, "maximum context length of 64")
        await error(client, body(max_tokens=6), 500, "max_tokens")  # a name that SGLang does not have
        await error(client, body(top_k=0), 400, "top_k must be -1")
        again = await load(client, "a", other)
        assert "already loaded" in again["error_message"]
        assert [read((await client.post("/generate", json=body("a"))).json())] == in_process((7,), directory)
        assert "--max-lora-rank" in (await load(client, "big", big))["error_message"]
        missing = await load(client, "none", "/none")
        assert "Repo id must be" in missing["error_message"]
        assert missing["loaded_adapters"] == {"a": directory}
        response = await client.post(UNLOAD, json={"lora_name": "b"})
        assert response.status_code == 400
        assert "LoRA with name b does not exist" in response.json()["error_message"]

    directory, other = adapter_directory(tmp_path, "a"), adapter_directory(tmp_path, "other", strength=-2.0)
    big = adapter_directory(tmp_path, "big", rank=32)
    with ProtocolServer("sglang", Setup(max_model_len=64)) as server:
        run(server, test)


def test_info_health_and_key() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        info = (await client.get("/server_info")).json()
        assert info == (await client.get("/get_server_info")).json()
        named = ("served_model_name", "context_length", "max_loras_per_batch", "max_loaded_loras", "max_lora_rank")
        assert [info[name] for name in named] == ["fake-base", 4096, 2, 3, 16]
        assert [one["max_model_len"] for one in (await client.get("/v1/models")).json()["data"]] == [4096]

    with ProtocolServer("sglang", Setup(api_key="secret", max_loras=2, max_cpu_loras=3)) as server:
        run(server, test)


def test_unloading_waits_for_requests_and_a_name_that_was_known_comes_back(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", directory)
        server.faults.token_seconds = 0.002
        long = body("v1", rid="long", max_new_tokens=4000, ignore_eos=True)
        asked = asyncio.create_task(client.post("/generate", json=long))
        await until(lambda: server.counts.open["v1"] == 1)
        unloading = asyncio.create_task(client.post(UNLOAD, json={"lora_name": "v1"}))
        await until(lambda: server.entries == ())
        with pytest.raises(httpx2.TimeoutException):  # other loads wait as well
            await client.post(LOAD, json={"lora_name": "v2", "lora_path": directory}, timeout=0.05)
        assert not unloading.done()
        await client.post("/abort_request", json={"rid": "long"})
        assert read((await asked).json())[2] == "abort"
        response = await unloading
        assert (response.status_code, response.json()["loaded_adapters"]) == (200, {})
        server.faults.token_seconds = 0
        again = (await client.post("/generate", json=body("v1", ignore_eos=True))).json()
        assert [read(again)] == expected
        assert server.counts.re_reads == {"v1": 1}

    directory = adapter_directory(tmp_path, "v1")
    expected = in_process((7,), directory, stop_token_ids=())
    with ProtocolServer("sglang") as server:
        run(server, test)
        assert server.counts.unloads == {"v1": 1}


def test_the_least_recently_used_makes_room_and_pinned_ones_do_not(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "a", directories["a"], pinned=True)
        for name in "bc":
            await load(client, name, directories[name])
        answers = [read((await client.post("/generate", json=body(name))).json()) for name in "b"]
        assert set((await load(client, "d", directories["d"]))["loaded_adapters"]) == {"a", "b", "d"}
        answers += [read((await client.post("/generate", json=body(name))).json()) for name in "ca"]
        assert answers == expected
        assert server.counts.re_reads == {"c": 1}  # in the place of b
        await load(client, "e", directories["e"])
        await load(client, "f", directories["f"])
        shutil.rmtree(directories["c"])
        response = await client.post("/generate", json=body("c"))
        assert response.status_code == 400
        assert "Failed to implicitly load LoRA adapter c" in response.json()["error"]["message"]
        assert (server.counts.failed_reads, server.alive) == (1, True)

    directories = {name: adapter_directory(tmp_path, name, strength=1.0 + place) for place, name in enumerate("abcdef")}
    expected = [in_process((7,), directories[name])[0] for name in "bca"]
    with ProtocolServer("sglang", Setup(max_cpu_loras=3)) as server:
        run(server, test)
        assert server.counts.most_entries == 3


def test_abort_goes_by_the_beginning_of_ids() -> None:
    async def test(client: Client) -> None:
        server.faults.token_seconds = 0.002
        long: dict[str, Any] = {"max_new_tokens": 3000, "ignore_eos": True}  # six seconds
        asked = {
            rid: asyncio.create_task(client.post("/generate", json=body(rid=rid, **long))) for rid in ("r1", "r10", "s")
        }
        await until(lambda: server.counts.open["fake-base"] == 3)
        duplicate = await client.post("/generate", json=body(rid="s"))
        assert "Duplicate request ID" in duplicate.json()["error"]["message"]
        await sampled(server, 30)
        assert (await client.post("/abort_request", json={"rid": "r"})).status_code == 200  # no such request
        await sampled(server, 30)
        assert not any(one.done() for one in asked.values())
        assert (await client.post("/abort_request", json={"rid": "r1"})).status_code == 200
        for rid in ("r1", "r10"):
            response = await asked[rid]
            assert response.status_code == 200
            tokens, _, reason = read(response.json())
            assert (reason, tokens) == ("abort", every[: len(tokens)])
            assert len(tokens) > 0
        assert not asked["s"].done()
        await client.post("/abort_request", json={"abort_all": True})
        assert read((await asked["s"]).json())[2] == "abort"

    ((every, _, _),) = in_process((7,), max_tokens=3000, stop_token_ids=())
    with ProtocolServer("sglang") as server:
        run(server, test)
        assert server.counts.aborts == 3
