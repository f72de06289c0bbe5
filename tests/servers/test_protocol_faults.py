"""Every fault of the protocol server does what it says, in both dialects where they differ; crashes and restarts."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.protocol_client import (
    GENERATE,
    LOAD,
    PROMPT,
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
from tests.support.protocol_server import FOREVER, ProtocolServer
from tests.support.waiting import PATIENCE, until


def test_late_answers() -> None:
    async def seconds(request: Any) -> float:
        begun = time.monotonic()
        assert (await request).status_code == 200
        return time.monotonic() - begun

    async def test(client: Client) -> None:
        server.faults.late = {"generate": 1.0}
        assert await seconds(client.post(GENERATE, json=body())) >= 1.0
        server.faults.late = {"generate": 600.0}
        await asyncio.wait_for(client.get("/health"), PATIENCE)
        server.faults.late = {"all": 0.3}
        assert await seconds(client.get("/health")) >= 0.3

    with ProtocolServer() as server:
        run(server, test)


def test_dropped_connections_and_lost_answers(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        server.faults.drops = {"generate": 2}
        for _ in range(2):
            with pytest.raises(httpx2.RemoteProtocolError):
                await client.post(GENERATE, json=body())
        assert not server.engine.requests
        assert read((await client.post(GENERATE, json=body())).json()) == expected
        server.faults.drops = {"health": FOREVER}
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/health")
        server.faults.lost = {"load": 1}
        with pytest.raises(httpx2.RemoteProtocolError):
            await load(client, "v1", directory)
        assert server.entries == ("v1",)
        again = await load(client, "v1", directory)  # whoever tries again hears that it is there
        assert again.status_code == 400

    directory, expected = adapter_directory(tmp_path, "v1"), in_process((7,))
    with ProtocolServer() as server:
        run(server, test)
        assert server.counts.requests[GENERATE] == 3
        assert server.counts.disconnects == 0


def test_errors_and_refused_loads(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        server.faults.errors = {"generate": 2}
        statuses = [(await client.post(GENERATE, json=body())).status_code for _ in range(3)]
        assert statuses == [500, 500, 200]
        server.faults.refuses_loads = True
        response = await load(client, "v1", directory)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalServerError")
        assert server.entries == ()
        server.faults.refuses_loads = False
        assert (await load(client, "v1", directory)).status_code == 200

    directory = adapter_directory(tmp_path, "v1")
    with ProtocolServer() as server:
        run(server, test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [-1, 1])
def test_token_ids_and_logprobs_of_unequal_length(stream: bool, length: int) -> None:
    async def test(client: Client) -> None:
        server.faults.length = length
        response = await client.post(GENERATE, json=body(stream=stream, n=2))
        answers = events(response.text) if stream else [response.json()]
        for index, (every, right, _) in enumerate(expected):
            parts = [one for answer in answers for one in answer["choices"] if one["index"] == index]
            tokens = [token for part in parts for token in part["token_ids"]]
            logprobs = [one for part in parts for one in part["logprobs"]["token_logprobs"]]
            assert logprobs == right
            assert len(tokens) == len(every) + length

    expected = in_process((7, 8))
    with ProtocolServer() as server:
        run(server, test)


@pytest.mark.parametrize("value", [-9999.0, None, 0.5])
def test_logprobs_that_are_none(value: float | None) -> None:
    async def test(client: Client) -> None:
        server.faults.logprobs = (value,)
        answer = (await client.post(GENERATE, json=body(n=2, prompt_logprobs=0))).json()
        for (tokens, logprobs, _), (every, right, _) in zip(read(answer), expected, strict=True):
            assert tokens == every
            assert logprobs == [value, *right[1:]]
        prompt = answer["choices"][1]["prompt_logprobs"]
        (last,) = prompt[-1].values()
        assert last["logprob"] == value
        (other,) = prompt[1].values()
        assert other["logprob"] not in (value, None)

    expected = in_process((7, 8))
    with ProtocolServer() as server:
        run(server, test)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_that_end_as_none_should(stream: bool) -> None:
    async def test(client: Client) -> None:
        server.faults.ends = [(2, "length"), (1, "stop"), (3, "abort")]
        for n_tokens, reason in ((2, "length"), (1, "stop"), (3, "abort"), (len(tokens), usual)):
            response = await client.post(GENERATE, json=body(stream=stream, ignore_eos=True))
            choices = [one["choices"][0] for one in (events(response.text) if stream else [response.json()])]
            assert [token for choice in choices for token in choice["token_ids"]] == tokens[:n_tokens]
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]

    ((tokens, _, usual),) = in_process((7,), stop_token_ids=())
    with ProtocolServer() as server:
        run(server, test)
        assert not server.counts.open


def test_answers_that_are_something_else() -> None:
    async def test(client: Client) -> None:
        server.faults.garbled, server.faults.misreads = ["{", "[]"], True
        assert (await client.post(GENERATE, json=body())).text == "{"
        assert (await client.post(GENERATE, json=body(stream=True))).text == "data: []\n\ndata: [DONE]\n\n"
        answer = (await client.post(GENERATE, json=body())).json()
        assert read(answer) == in_process((7,))
        told = answer["choices"][0]["prompt_token_ids"]
        assert told != PROMPT
        assert sorted(told) == sorted(PROMPT)

    with ProtocolServer() as server:
        run(server, test)
        assert [one["prompt"] for one in server.counts.asked] == [PROMPT] * 3


def test_a_share_of_all_requests_is_dropped() -> None:
    async def test(client: Client) -> None:
        for _ in range(200):
            try:
                await client.get("/health")
            except httpx2.RemoteProtocolError:
                lost.append(1)

    lost: list[int] = []
    with ProtocolServer() as server:
        server.faults.drop_share = 0.1
        run(server, test)
    assert 8 < len(lost) < 40


def test_names_that_are_not_found_and_a_base_that_answers_for_them(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        for name in ("v1", "v2"):
            await load(client, name, directory)
        server.faults.unknown = {"v1"}
        assert (await client.post(GENERATE, json=body("v1"))).status_code == 404
        assert read((await client.post(GENERATE, json=body("v2"))).json()) == honest
        server.faults.lies = True
        answer = (await client.post(GENERATE, json=body("v2", prompt_logprobs=0))).json()
        assert answer["model"] == "v2"
        assert read(answer) == base
        other = (await client.post(GENERATE, json=body(prompt_logprobs=0))).json()
        assert answer["choices"][0]["prompt_logprobs"] == other["choices"][0]["prompt_logprobs"]

    directory = adapter_directory(tmp_path, "v1")
    honest, base = in_process((7,), directory), in_process((7,))
    assert honest != base
    with ProtocolServer() as server:
        run(server, test)


@pytest.mark.parametrize(("dialect", "path"), [("vllm", LOAD), ("sglang", "/load_lora_adapter")])
def test_adapters_are_lost_while_the_process_stays(tmp_path: Path, dialect: Any, path: str) -> None:
    async def test(client: Client) -> None:
        adapter = {"lora_name": "v1", "lora_path": directory}
        assert (await client.post(path, json=adapter)).status_code == 200
        server.lose_adapters()
        assert server.entries == ()
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake-base"]
        if dialect == "vllm":
            assert (await client.post(GENERATE, json=body("v1"))).status_code == 404
        else:
            asked = {"input_ids": [5], "lora_path": "v1", "sampling_params": {"max_new_tokens": 1}}
            assert "has never been loaded" in (await client.post("/generate", json=asked)).text
        assert (await client.post(path, json=adapter)).status_code == 200
        assert server.counts.loads == {"v1": 2}

    directory = adapter_directory(tmp_path, "v1")
    with ProtocolServer(dialect) as server:
        run(server, test)


def test_a_server_that_hangs_and_goes_on() -> None:
    async def test(client: Client) -> None:
        server.faults.hangs = True
        asked = [asyncio.create_task(client.get(path)) for path in ("/health", "/v1/models")]
        await until(lambda: server.counts.requests.total() == 2)
        with pytest.raises(httpx2.TimeoutException):
            await client.get("/health", timeout=0.1)
        assert not any(one.done() for one in asked)
        server.faults.hangs = False
        assert [(await one).status_code for one in asked] == [200, 200]

    with ProtocolServer() as server:
        run(server, test)


@pytest.mark.parametrize("cleanly", [False, True])
def test_a_stream_that_is_cut(cleanly: bool) -> None:
    async def test(client: Client) -> None:
        server.faults.cuts, server.faults.cut_after, server.faults.cut_cleanly = 1, 2, cleanly
        text = ""
        try:
            async with client.stream("POST", GENERATE, json=body(stream=True)) as response:
                async for part in response.aiter_text():
                    text += part
            whole = True
        except httpx2.RemoteProtocolError:
            whole = False
        assert whole == cleanly
        parts = [json.loads(one.removeprefix("data: ")) for one in text.split("\n\n") if one]
        assert [one["choices"][0]["token_ids"] for one in parts] == [[tokens[0]], [tokens[1]]]
        await until(lambda: not server.counts.open)  # the rest is not sampled
        assert events((await client.post(GENERATE, json=body(stream=True))).text)

    ((tokens, _, _),) = in_process((7,))
    with ProtocolServer() as server:
        run(server, test)


def test_a_body_that_is_cut() -> None:
    async def test(client: Client) -> None:
        server.faults.cuts = 1
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(GENERATE, json=body())
        assert (await client.post(GENERATE, json=body())).status_code == 200

    with ProtocolServer() as server:
        run(server, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_and_a_new_server_at_the_same_port(tmp_path: Path, stream: bool) -> None:
    async def test(client: Client) -> None:
        await load(client, "v1", directory)
        server.faults.token_seconds = 1.0
        asked = [
            asyncio.create_task(client.post(GENERATE, json=body("v1", stream=stream, max_tokens=4000, ignore_eos=True)))
            for _ in range(3)
        ]
        await until(lambda: server.counts.open["v1"] == 3)
        begun = time.monotonic()
        server.stop()
        for one in asked:
            with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                await one
        assert time.monotonic() - begun < PATIENCE  # their tokens would take an hour
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")
        server.faults.token_seconds = 0
        port = server.port
        server.start()
        assert server.port == port
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(GENERATE, json=body("v1"))).status_code == 404
        assert (await load(client, "v1", directory)).status_code == 200

    directory = adapter_directory(tmp_path, "v1")
    with ProtocolServer() as server:
        run(server, test)
        assert not server.counts.open


def test_nothing_is_left_behind() -> None:
    async def test(client: Client) -> None:
        for fault in ("drops", "lost"):
            setattr(server.faults, fault, {"generate": 1})
            with pytest.raises(httpx2.RemoteProtocolError):
                await client.post(GENERATE, json=body())
        server.faults.token_seconds = 0.01
        await give_up(server, client.post(GENERATE, json=body(max_tokens=999, ignore_eos=True)))

    before = set(threading.enumerate())
    gc.freeze()  # what was there before is not looked through
    with ProtocolServer() as server:
        run(server, test)
    gc.collect()  # a socket or a task that was not closed warns here, and warnings are errors
    gc.unfreeze()
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile
    assert not server.alive


def test_a_mistake_in_the_server_is_no_answer() -> None:
    async def test(client: Client) -> None:
        await client.post(GENERATE, json=body(n="many"))

    with pytest.raises(ValueError, match="many"), ProtocolServer() as server:
        run(server, test)
