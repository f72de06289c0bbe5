"""vLLM's dialect of the protocol server says what vLLM says."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

from motet.config import AdapterConfig
from tests.support.fake_base import END, FakePolicy, FakeTokenizer, read_adapter
from tests.support.fake_trainer import FakeTrainer
from tests.support.protocol_client import (
    GENERATE,
    LOAD,
    PROMPT,
    UNLOAD,
    Client,
    adapter_directory,
    body,
    events,
    give_up,
    in_process,
    load,
    read,
    run,
)
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.waiting import until


def test_what_is_answered_is_what_the_engine_samples(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.add_adapter("job", AdapterConfig(rank=4, alpha=8.0), seed=3)
    (tmp_path / "trained").mkdir()
    trainer.save_adapter("job", tmp_path / "trained", optimizer=False)
    strong = adapter_directory(tmp_path, "strong")

    async def test(client: Client) -> None:
        assert (await load(client, "v0", str(tmp_path / "trained"))).status_code == 200
        assert (await load(client, "v1", strong)).text == "Success: LoRA adapter 'v1' added successfully."
        for name in (None, "fake-base", "v0", "v1"):
            found[name] = read((await client.post(GENERATE, json=body(name, n=3))).json())

    found: dict[str | None, list[tuple[Any, ...]]] = {}
    with ProtocolServer() as server:
        run(server, test)
        assert server.counts.loads == {"v0": 1, "v1": 1}
        assert server.counts.most_entries == len(server.entries) == 2
        assert server.engine.requests[0].seeds == (7, 8, 9)
    assert found["fake-base"] == found[None] == found["v0"] == in_process((7, 8, 9))  # B = 0
    assert found["v1"] == in_process((7, 8, 9), strong) != found["v0"]


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_k": 5}),
        ({"top_p": 0.6, "min_p": 0.01, "top_k": -1}, {"top_p": 0.6, "min_p": 0.01}),
        ({"min_p": 0.3}, {"min_p": 0.3}),
        ({"ignore_eos": True}, {"stop_token_ids": ()}),
        ({"stop": ["e", "a"], "ignore_eos": True}, {"stop": ("e", "a"), "stop_token_ids": ()}),
        (
            {"stop": "q", "ignore_eos": True, "max_tokens": 400},
            {"stop": ("q",), "stop_token_ids": (), "max_tokens": 400},
        ),
        ({"max_tokens": None}, {"max_tokens": 16}),
        ({"stop_token_ids": [40, 50, 60, 70]}, {"stop_token_ids": (END, 40, 50, 60, 70)}),
        ({"max_tokens": 512, "ignore_eos": True}, {"max_tokens": 508, "stop_token_ids": ()}),  # 512 − the prompt
    ],
)
def test_sampling_parameters(sent: dict[str, Any], meant: dict[str, Any]) -> None:
    async def test(client: Client) -> None:
        answer = (await client.post(GENERATE, json=body(**sent))).json()
        assert read(answer) == in_thread
        (choice,) = answer["choices"]
        tokens, text = choice["token_ids"], FakeTokenizer().decode(choice["token_ids"])
        cause = tokens[-1] if tokens[-1] in sent.get("stop_token_ids", ()) else None
        cause = next((stop for stop in meant.get("stop", ()) if stop in text), cause)
        assert choice["text"] == (text if not isinstance(cause, str) else text[: text.index(cause)])
        assert choice["stop_reason"] == (cause if choice["finish_reason"] == "stop" else None)

    in_thread = in_process((7,), **meant)
    with ProtocolServer(setup=Setup(max_model_len=512)) as server:
        run(server, test)


def test_shape_of_an_answer_and_prompt_logprobs(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", strong)
        request = body("v1", prompt_logprobs=0, temperature=0.5, id="mine", ignore_eos=True)
        answer = (await client.post(GENERATE, json=request)).json()
        assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-mine", "text_completion", "v1")
        assert answer["usage"]["total_tokens"] == len(PROMPT) + 20
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == PROMPT
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [list(one) for one in others] == [[str(token)] for token in PROMPT[1:]]
        adapter = FakePolicy(read_adapter(Path(strong)))
        found = [one[str(token)]["logprob"] for one, token in zip(others, PROMPT[1:], strict=True)]
        assert found == adapter.logprobs(PROMPT)[1:].tolist()  # at temperature 1
        assert others[0][str(PROMPT[1])]["decoded_token"] == "b"
        logprobs = choice["logprobs"]
        assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
        assert "".join(logprobs["tokens"]) == choice["text"]
        lengths = [len(text) for text in logprobs["tokens"]]
        assert logprobs["text_offset"] == [sum(lengths[:place]) for place in range(20)]
        right = FakePolicy(read_adapter(Path(strong))).logprobs([PROMPT[-1], *choice["token_ids"]], 0.5)[1:]
        assert logprobs["token_logprobs"] == right.tolist()
        assert logprobs["top_logprobs"][3] == {logprobs["tokens"][3]: logprobs["token_logprobs"][3]}
        silent = (await client.post(GENERATE, json=body(logprobs=None, return_token_ids=None))).json()["choices"][0]
        names = ("logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids")
        assert [silent[name] for name in names] == [None] * 4
        answer = (await client.post(GENERATE, json=body(id="mine"), headers={"X-Request-Id": "header"})).json()
        assert answer["id"] == "cmpl-header"

    strong = adapter_directory(tmp_path, "strong")
    with ProtocolServer() as server:
        run(server, test)


def test_a_stream_brings_the_same_tokens_one_by_one() -> None:
    async def test(client: Client) -> None:
        response = await client.post(GENERATE, json=body(stream=True, n=2, id="s"))
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        tokens: dict[int, list[int]] = {0: [], 1: []}
        logprobs: dict[int, list[float]] = {0: [], 1: []}
        reasons: dict[int, str] = {}
        text = ["", ""]
        for event in events(response.text):
            assert (event["id"], "usage" in event) == ("cmpl-s", False)
            (choice,) = event["choices"]
            index = choice["index"]
            assert index not in reasons
            assert choice["prompt_token_ids"] == (None if tokens[index] else PROMPT)
            tokens[index] += choice["token_ids"]
            logprobs[index] += choice["logprobs"]["token_logprobs"]
            text[index] += choice["text"]
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
        assert [(tokens[index], logprobs[index], reasons[index]) for index in (0, 1)] == expected
        assert text == [FakeTokenizer().decode(one) for one, _, _ in expected]
        request = body(stream=True, stop=[pair], ignore_eos=True)
        found = [one["choices"][0] for one in events((await client.post(GENERATE, json=request)).text)]
        assert (found[-1]["stop_reason"], len(found[-1]["token_ids"])) == (pair, 1)
        assert pair[0] not in "".join(one["text"] for one in found[3:])

    expected = in_process((7, 8))
    pair = FakeTokenizer().decode(in_process((7,), stop_token_ids=())[0][0][3:5])
    assert len(pair) == 2
    with ProtocolServer() as server:
        run(server, test)


def test_errors_are_those_of_vllm(tmp_path: Path) -> None:
    async def error(client: Client, path: str, value: dict[str, Any], status: int, text: str) -> None:
        response = await client.post(path, json=value)
        assert response.status_code == status
        found = response.json()["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["code"] == status
        assert text in found["message"]

    async def test(client: Client) -> None:
        await load(client, "a", directory)
        await error(client, GENERATE, body("b"), 404, "The model `b` does not exist. Valid aliases: fake-base.")
        await error(client, GENERATE, body() | {"prompt": [1] * 64}, 400, "maximum context length is 64 tokens")
        await error(client, GENERATE, body(max_tokens=65), 400, "max_tokens=65 cannot be greater than max_model_len=64")
        await error(client, GENERATE, body() | {"prompt": [1, 97]}, 400, "Token id 97 is out of vocabulary")
        await error(client, GENERATE, body() | {"prompt": []}, 400, "must be provided and non-empty")
        await error(client, GENERATE, body(temperature=2.5), 400, "temperature must be in [0, 2]")
        await error(client, LOAD, {"lora_name": "a", "lora_path": str(other)}, 400, "has already been loaded")
        await error(
            client, LOAD, {"lora_name": "fake-base", "lora_path": directory}, 400, "conflicts with a served base"
        )
        await error(client, LOAD, {"lora_name": "n"}, 400, "lora_path")
        await error(client, LOAD, {"lora_name": "n", "lora_path": "/none"}, 404, "No adapter found for /none")
        await error(
            client, LOAD, {"lora_name": "n", "lora_path": big}, 500, "LoRA rank 32 is greater than max_lora_rank 16"
        )
        await error(client, LOAD, {"lora_name": "n", "lora_path": str(torn)}, 500, "Call to add_lora method failed")
        await error(client, UNLOAD, {"lora_name": "n"}, 404, "The lora adapter 'n' cannot be found.")
        kept.append(read((await client.post(GENERATE, json=body("a"))).json()))

    directory, big = adapter_directory(tmp_path, "a"), adapter_directory(tmp_path, "big", rank=32)
    other, torn = adapter_directory(tmp_path, "other"), Path(adapter_directory(tmp_path, "torn"))
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    kept: list[list[tuple[Any, ...]]] = []
    with ProtocolServer(setup=Setup(max_model_len=64)) as server:
        run(server, test)
    assert kept == [in_process((7,), directory)]  # the old bytes stay under a name that is loaded twice


def test_models_metrics_health_and_key(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/health")).status_code == 200  # open to all, as the metrics are
        response = await client.get("/v1/models")
        assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
        client.headers["Authorization"] = "Bearer secret"
        await load(client, "v1", directory)
        base, adapter = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], base["parent"], base["max_model_len"]) == ("fake-base", None, 4096)
        assert (adapter["id"], adapter["parent"], adapter["root"]) == ("v1", "fake-base", directory)
        assert "vllm:lora_requests_info{" not in (await client.get("/metrics")).text  # no value before a request
        await client.post(GENERATE, json=body("v1"))
        assert 'vllm:lora_requests_info{max_lora="4",running_lora_adapters=""' in (await client.get("/metrics")).text

    directory = adapter_directory(tmp_path, "v1")
    with ProtocolServer(setup=Setup(api_key="secret")) as server:
        run(server, test)
        assert server.counts.requests["/v1/models"] == 2


def test_limits_are_told_in_development_only() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/server_info?config_format=json")).status_code == 404
        server.setup = Setup(development=True, max_loras=3)
        server.stop()
        server.start()
        info = (await client.get("/server_info?config_format=json")).json()
        assert info["vllm_config"]["lora_config"]["max_loras"] == 3

    with ProtocolServer() as server:
        run(server, test)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test(client: Client) -> None:
        for stream in (False, True):
            await give_up(server, client.post(GENERATE, json=body(stream=stream, max_tokens=4000, ignore_eos=True)))
            await until(lambda: not server.counts.open)

    with ProtocolServer() as server:
        server.faults.token_seconds = 0.005
        run(server, test)
        assert server.counts.disconnects == 2


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
