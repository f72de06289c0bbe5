"""SGLang's dialect of the protocol server says what SGLang says."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.fake_base import FakePolicy, FakeTokenizer, read_adapter
from tests.support.protocol_client import PROMPT, Client, adapter_directory, events, give_up, in_process, run
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


def test_what_is_answered_is_what_the_engine_samples(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        assert (await load(client, "v1", strong))["loaded_adapters"] == {"v1": strong}
        for name in (None, "v1"):
            answer = (await client.post("/generate", json=body(name, rid="mine"))).json()
            assert answer["meta_info"]["id"] == "mine"
            assert answer["text"] == FakeTokenizer().decode(answer["output_ids"])
            assert [read(answer)] == in_process((7,), strong if name else None)
        greedy = (await client.post("/generate", json=body("v1", temperature=0, top_k=-1))).json()
        assert [read(greedy)] == in_process((7,), strong, temperature=0.0)
        stops = body(stop=["e", "a"], stop_token_ids=[5], ignore_eos=True, max_new_tokens=400)
        stopped = (await client.post("/generate", json=stops)).json()
        assert [read(stopped)] == in_process((7,), stop=("e", "a"), stop_token_ids=(5,), max_tokens=400)
        cause = stopped["meta_info"]["finish_reason"]["matched"]
        assert cause in ("e", "a")
        # ids keep what the text leaves out
        assert FakeTokenizer().decode(stopped["output_ids"]) == stopped["text"] + cause

    strong = adapter_directory(tmp_path, "strong")
    with ProtocolServer("sglang") as server:
        run(server, test)
        assert server.counts.loads == {"v1": 1}
        assert server.entries == ("v1",)


def test_samples_of_one_request_share_its_seed() -> None:
    async def test(client: Client) -> None:
        answers = (await client.post("/generate", json=body(n=3, rid="mine"))).json()
        assert [read(answer) for answer in answers] == in_process((7, 7, 7))
        assert "mine" not in {answer["meta_info"]["id"] for answer in answers}
        unseeded = (await client.post("/generate", json=body(sampling_seed=None))).json()
        assert [read(unseeded)] == in_process((42,))

    with ProtocolServer("sglang") as server:
        run(server, test)


def test_without_deterministic_inference_seeds_are_nothing() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/server_info")).json()["enable_deterministic_inference"] is False
        request = body(max_new_tokens=60, ignore_eos=True)
        first, second = [(await client.post("/generate", json=request)).json()["output_ids"] for _ in range(2)]
        assert first != second

    with ProtocolServer("sglang", Setup(deterministic=False)) as server:
        run(server, test)


def test_logprobs_of_a_prompt(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", directory)
        request = body("v1", max_new_tokens=0, temperature=0.5) | {"logprob_start_len": 0}
        answer = (await client.post("/generate", json=request)).json()
        assert answer["output_ids"] == []
        first, *others = answer["meta_info"]["input_token_logprobs"]
        assert first == [None, PROMPT[0], None]
        right = FakePolicy(read_adapter(Path(directory))).logprobs(PROMPT)[1:].tolist()
        assert others == [[logprob, token, None] for logprob, token in zip(right, PROMPT[1:], strict=True)]
        answer = (await client.post("/generate", json=request | {"logprob_start_len": 2})).json()
        assert answer["meta_info"]["input_token_logprobs"] == [[None, PROMPT[2], None], *others[2:]]
        answer = (await client.post("/generate", json=body("v1"))).json()
        assert answer["meta_info"]["input_token_logprobs"] == [[None, PROMPT[-1], None]]

    directory = adapter_directory(tmp_path, "v1")
    with ProtocolServer("sglang") as server:
        run(server, test)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_repeats_what_it_said_unless_told_not_to(incremental: bool) -> None:
    async def test(client: Client) -> None:
        found = events((await client.post("/generate", json=body(stream=True))).text)
        parts = [
            (one["output_ids"], [logprob for logprob, _, _ in one["meta_info"]["output_token_logprobs"]])
            for one in found
        ]
        if incremental:
            assert parts == [([token], [logprob]) for token, logprob in zip(tokens, logprobs, strict=True)]
        else:
            assert parts == [(tokens[: place + 1], logprobs[: place + 1]) for place in range(len(tokens))]
        reasons = [one["meta_info"]["finish_reason"] for one in found]
        assert reasons[:-1] == [None] * (len(found) - 1)
        assert reasons[-1]["type"] == reason

    ((tokens, logprobs, reason),) = in_process((7,))
    with ProtocolServer("sglang", Setup(incremental=incremental)) as server:
        run(server, test)


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


def test_a_client_that_leaves_frees_its_adapter(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", directory)
        for stream in (False, True):
            request = body("v1", stream=stream, max_new_tokens=4000, ignore_eos=True)
            await give_up(server, client.post("/generate", json=request))
            await until(lambda: not server.counts.open)
        server.faults.lost = {"generate": 1}
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post("/generate", json=body("v1", stream=True))
        assert (await client.post(UNLOAD, json={"lora_name": "v1"})).status_code == 200  # nobody refers to it

    directory = adapter_directory(tmp_path, "v1")
    with ProtocolServer("sglang") as server:
        server.faults.token_seconds = 0.005
        run(server, test)
        assert server.counts.disconnects == 2


def test_the_faults_of_values(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", directory)
        server.faults.logprobs, server.faults.lies = (None,), True
        tokens, logprobs, _ = read((await client.post("/generate", json=body("v1"))).json())
        assert (tokens, logprobs) == (base[0], [None, *base[1][1:]])
        server.faults.logprobs, server.faults.length = (), 1
        answer = (await client.post("/generate", json=body("v1"))).json()
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) + 1
        server.faults.refuses_loads = True
        response = await client.post(LOAD, json={"lora_name": "v2", "lora_path": directory})
        assert (response.status_code, server.entries) == (500, ("v1",))

    directory = adapter_directory(tmp_path, "v1")
    (base,) = in_process((7,))
    with ProtocolServer("sglang") as server:
        run(server, test)
