"""Rollouts on servers: the answers of the engine in process, versions that come and go, aborts, limits and keys."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.chat.structure import grammar_of
from motet.core.errors import EngineError, ServerFault
from motet.core.types import SamplingParams
from motet.rollout.server import Demand, ServerEngine
from tests.support.fake_base import FakePolicy
from tests.support.fake_engine import FakeEngine
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.server_run import (
    PROBE,
    PROMPT,
    asking,
    collect,
    drive,
    engine_on,
    in_process,
    learn,
    long_request,
    publish,
    ref,
    request,
    sampled,
    trainer_of,
)
from tests.support.waiting import PATIENCE, until

both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
either_way = pytest.mark.parametrize("stream", [False, True])
LASTS = 3000
"""Tokens of a completion that ends when it is aborted: six seconds at the pace of these tests."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.01},
    {"stop_token_ids": (40, 50, 60, 70), "max_tokens": 300},
    {"stop": ("e", "xy"), "stop_token_ids": (), "max_tokens": 300},
    {"stop": ("no such",), "stop_token_ids": (), "max_tokens": 30},
)


# --- answers ----------------------------------------------------------------------------------------------------------------


@both
@either_way
def test_what_is_sampled_is_what_the_engine_in_process_samples(dialect: Any, stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 3)
        asked = [
            request(adapter, range(1, 6), id=f"{number}{adapter}", stream=stream, **sampling)
            for number, sampling in enumerate(VARIANTS)
            for adapter in (None, version)
        ]
        found = await asking(engine, *asked)
        for one, whole in zip(asked, found, strict=True):
            assert whole == await in_process(one, trainer)
            assert {version for every in whole for version in every.versions} == {3 if one.adapter else -1}
        assert {every.finish for whole in found for every in whole} == {"stop", "length"}
        assert found[0] != found[1]
        assert any("e" not in every.text and every.finish == "stop" for every in found[8])

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_scores_are_those_of_the_weights(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 1)
        for adapter, policy in ((None, FakePolicy(None)), (version, FakePolicy(trainer.weights("job")))):
            found = await engine.score(PROBE, adapter)
            assert found.dtype == np.float32
            assert found.tolist() == policy.logprobs(PROBE).tolist()

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_likeliest_tokens_of_a_prompt_are_those_of_the_weights(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 1)
        here = FakeEngine(capacity=4)
        here.install(version, trainer.weights("job"))
        for adapter in (None, version):
            ids, logprobs = await engine.top_logprobs(PROBE, adapter, 5)
            wanted_ids, wanted = await here.top_logprobs(PROBE, adapter, 5)
            assert ids.dtype == np.int32
            assert logprobs.dtype == np.float32
            assert ids.tolist() == wanted_ids.tolist()
            assert logprobs == pytest.approx(wanted, abs=1e-6)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


def _same_id(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with another id, which is the run's, somebody's, the request's, and says which completion and attempt."""
    (key,) = {"request_id", "rid"} & set(body)
    assert re.fullmatch(r"run\.[0-9a-f]{8}/r/0/0", body[key])
    return {**body, key: "id"}


@either_way
def test_every_sampling_field_is_sent(stream: bool, tmp_path: Path) -> None:
    """A server fills in from files of the model what is left out."""

    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 0)
        fields: dict[str, Any] = {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "stop": ("!",),
            "stop_token_ids": (3,),
        }
        for one in (request(version, (2**63 + 5,), stream=stream, **fields), request(None, (7,), stream=stream)):
            await collect(engine, one)

    trainer = trainer_of("job")
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    common = {**neutral, "n": 1, "ignore_eos": True, "skip_special_tokens": True}
    full = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["!"], "stop_token_ids": [3], **common}
    bare = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": [], "stop_token_ids": [0], **common}
    prompt = list(PROMPT)
    with ProtocolServer("vllm") as server:
        drive(engine_on([server], tmp_path), test)
        way = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "stream": stream}
        named = {"request_id": "id", "max_tokens": 20, **way}
        assert [_same_id(one) for one in server.counts.asked] == [
            {**full, **named, "model": "job.run.1.1-v0", "seed": 5},
            {**bare, **named, "model": "fake-base", "seed": 7},
        ]
    with ProtocolServer("sglang") as server:
        drive(engine_on([server], tmp_path), test)
        own = {"max_new_tokens": 20, "no_stop_trim": True}
        way = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0}
        way |= {"rid": "id", "stream": stream}
        assert [_same_id(one) for one in server.counts.asked] == [
            {**way, "lora_path": "job.run.1.1-v0", "sampling_params": {**full, **own, "sampling_seed": 5}},
            {**way, "lora_path": None, "sampling_params": {**bare, **own, "top_k": -1, "sampling_seed": 7}},
        ]


@either_way
def test_sglang_may_be_started_with_incremental_streams(stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        for sampling in VARIANTS:
            asked = request(stream=stream, **sampling)
            assert await collect(engine, asked) == await in_process(asked)

    with ProtocolServer("sglang", Setup(incremental=True)) as server:
        drive(engine_on([server], tmp_path), test)


@either_way
def test_a_server_that_reads_another_prompt_is_not_believed(stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.misreads = True
        with pytest.raises(
            EngineError, match=rf"request r failed .* {server.url} read another prompt than it was sent"
        ):
            await collect(engine, request(stream=stream))
        server.faults.misreads = False
        assert await collect(engine, request(stream=stream)) == await in_process(request())

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


# --- limits and keys --------------------------------------------------------------------------------------------------------

LIMITS = [
    (
        "sglang",
        Setup(max_loras=3),
        Demand(3, 3, 4),
        "room for 2 adapters in one batch.* need 3: raise its --max-loras-per-",
    ),
    ("sglang", Setup(max_cpu_loras=5), Demand(1, 6, 4), "5 versions of adapters in memory.* --max-loaded-loras"),
    ("sglang", Setup(max_lora_rank=8), Demand(1, 2, 16), "8 as the largest rank.* need 16: raise its --max-lora-rank"),
    ("vllm", Setup(max_loras=2, development=True), Demand(3, 3, 4), "room for 2 adapters in one batch.* --max-loras"),
]


@pytest.mark.parametrize(("dialect", "setup", "wanted", "told"), LIMITS)
def test_a_server_without_room_is_refused_at_once(
    dialect: Any, setup: Setup, wanted: Demand, told: str, tmp_path: Path
) -> None:
    async def test(engine: ServerEngine) -> None:
        with pytest.raises(EngineError, match=rf"no server can be used: .*{server.url} has .*{told}"):
            await engine.ready()

    with ProtocolServer(dialect, setup) as server:
        drive(engine_on([server], tmp_path, wanted=wanted, wait_seconds=2 * PATIENCE), test)


@both
def test_prompts_that_are_too_long_for_the_server(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        with pytest.raises(
            EngineError,
            match=r"job 'job':.*length is 64.*requested 65",
        ):
            await collect(engine, request(max_tokens=61))
        assert not server.counts.asked
        assert await collect(engine, long_request()) == await in_process(long_request())

    with ProtocolServer(dialect, Setup(max_model_len=64)) as server:
        drive(engine_on([server], tmp_path), test)


def test_requests_that_cannot_be(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        for asked, told in (
            (request(ref(7)), "version 7 of 'job.run.1.1' is not loaded"),
            (request(prompt=()), "empty prompt or no seeds"),
            (request(seeds=()), "empty prompt or no seeds"),
            (request(prompt=(1, 97)), "has the token id 97; those of this base go from 0 to 96"),
            (
                replace(request(), sampling=SamplingParams(grammar="start: thought answer\nanswer: %json {}")),
                "remove the tools or response_format, or sample on the embedded engine",
            ),
        ):
            with pytest.raises(EngineError, match=told):
                await collect(engine, asked)

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)
        assert not server.counts.asked


@both
def test_an_answer_that_does_not_keep_to_its_schema_is_an_error(dialect: Any, tmp_path: Path) -> None:
    """This server does not look at schemas."""
    grammar = grammar_of({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}})

    async def test(engine: ServerEngine) -> None:
        asked = replace(request(), seeds=tuple(range(20)))
        assert "stop" in {whole.finish for whole in await in_process(asked)}
        with pytest.raises(ServerFault, match=r"does not keep to the.*start vLLM with"):
            await asking(engine, replace(asked, sampling=replace(asked.sampling, grammar=grammar)))

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_a_schema_is_sent_and_an_answer_that_breaks_off_begins_anew(dialect: Any, tmp_path: Path) -> None:
    """What a server has said already is in the prompt of the next attempt, where its grammar does not look."""
    schema = {"enum": ["yes", "no"]}
    grammar = grammar_of({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})

    async def test(engine: ServerEngine) -> None:
        server.faults.most_turns = 20
        asked = long_request(None, (5,), stream=True)
        asked = replace(asked, sampling=replace(asked.sampling, grammar=grammar))
        running = asking(engine, asked)
        await until(lambda: server.engine.turns > 20)
        await asyncio.to_thread(server.stop)
        server.faults.most_turns = math.inf
        await asyncio.to_thread(server.start)
        ((found,),) = await running
        assert found == (await in_process(replace(asked, sampling=replace(asked.sampling, grammar=""))))[0]
        first, *_, last = server.counts.asked
        told = last["structured_outputs"]["json"] if dialect == "vllm" else last["sampling_params"]["json_schema"]
        assert json.loads(told).items() >= schema.items()
        field = "prompt" if dialect == "vllm" else "input_ids"
        assert first[field] == last[field] == list(PROMPT)

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
@pytest.mark.parametrize("key", ["secret", "wrong", ""])
def test_keys(dialect: Any, key: str, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        if key == "secret":
            assert await collect(engine, request()) == await in_process(request())
            return
        with pytest.raises(EngineError, match=r"answers 401: Unauthorized;.*the variable"):
            await engine.ready()

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with ProtocolServer(dialect, Setup(api_key="secret")) as server:
        drive(engine_on([server], tmp_path, headers=headers, wait_seconds=2 * PATIENCE), test)


# --- aborts -----------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["mine", "job"])
def test_an_abort_ends_its_own_and_keeps_their_tokens(dialect: Any, name: str, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.token_seconds = 0.002
        mine = long_request(None, id="mine", stream=True, max_tokens=LASTS)
        kin = long_request(None, id="mine2", stream=True, max_tokens=LASTS if name == "job" else 60)
        other = long_request(None, id="other", job="job2", stream=True)
        running = [asyncio.ensure_future(collect(engine, one)) for one in (mine, kin, other)]
        await until(lambda: len(server.counts.asked) == 6)
        await sampled(server, 60)
        await engine.abort(name)
        ended = await running[0]
        for found, whole in zip(ended, await in_process(mine), strict=True):
            assert found.finish == "abort"
            assert 0 < len(found.tokens) < LASTS
            assert found.tokens == whole.tokens[: len(found.tokens)]
            assert found.logprobs == whole.logprobs[: len(found.tokens)]
        kins = await running[1]
        assert {found.finish for found in kins} == ({"abort"} if name == "job" else {"length"})
        if name == "mine":
            assert kins == await in_process(kin)
        assert await running[2] == await in_process(other)
        await until(lambda: not server.counts.open)

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)
        assert server.counts.disconnects == (4 if name == "job" else 2)


@both
def test_what_an_abort_ends_is_known_without_a_stream_if_it_is_to_be_charged(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.token_seconds = 0.002
        request = replace(long_request(None, max_tokens=LASTS), keep_aborted=True)
        running = asyncio.ensure_future(collect(engine, request))
        await until(lambda: len(server.counts.asked) == 2)
        await sampled(server, 20)
        await engine.abort(request.id)
        for found, whole in zip(await running, await in_process(request), strict=True):
            assert found.finish == "abort"
            assert 0 < len(found.tokens) < LASTS
            assert found.tokens == whole.tokens[: len(found.tokens)]

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@either_way
def test_an_abort_before_anything_was_asked(stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        running = asyncio.ensure_future(collect(engine, long_request(stream=stream)))
        aborting = asyncio.ensure_future(engine.abort("r"))
        found = await asyncio.wait_for(running, PATIENCE)
        await aborting
        assert [(one.tokens, one.finish) for one in found] == [([], "abort")] * 2

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


@both
@either_way
def test_whoever_stops_reading_ends_the_request(dialect: Any, stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.token_seconds = 0.005
        if stream:
            async for _ in (chunks := engine.generate(long_request(stream=True, max_tokens=4000))):
                await until(lambda: server.counts.open.total() == 2)
                break
            await chunks.aclose()  # type: ignore[attr-defined]
        else:
            running = asyncio.ensure_future(collect(engine, long_request(max_tokens=4000)))
            await until(lambda: server.counts.open.total() == 2)
            running.cancel()
        await until(lambda: not server.counts.open)

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)
        assert server.counts.disconnects == 2
