"""Answers that are late, lost, broken off or wrong: asked again, continued, or refused; never let through."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet.core import seeds
from motet.core.errors import EngineError, ServerFault, ServerGone, ServerRefused
from motet.rollout.server import ServerEngine
from tests.support.cases import few, paired
from tests.support.fake_base import END, FakeTokenizer
from tests.support.protocol_server import FOREVER, ProtocolServer
from tests.support.server_run import (
    CLOCKS,
    PROBE,
    PROMPT,
    collect,
    drive,
    engine_on,
    greeted,
    in_process,
    learn,
    long_request,
    publish,
    request,
    trainer_of,
)
from tests.support.waiting import PATIENCE

both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
either_way = pytest.mark.parametrize("stream", [False, True])
ATTEMPTS = 5


def of_fields(name: str, values: list[str]) -> pytest.MarkDecorator:
    """Each of the values by both dialects and either way."""
    fields = ["vllm", "sglang"], [False, True], values
    return pytest.mark.parametrize(("dialect", "stream", name), few(itertools.product(*fields), *paired(*fields)))


# --- answers that do not come ---------------------------------------------------------------------------------------------


@of_fields("fault", ["late", "drops", "lost", "errors", "cuts"])
def test_what_does_not_come_is_asked_for_again(dialect: Any, stream: bool, fault: str, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 2)
        match fault:
            case "late":
                server.faults.late = {"generate": 0.1}
            case "cuts":
                server.faults.cuts, server.faults.cut_after = 4, 0
            case _:
                setattr(server.faults, fault, {"generate": 4})
        asked = request(version, stream=stream)
        begun = time.monotonic()
        assert await collect(engine, asked) == await in_process(asked, trainer)
        assert time.monotonic() - begun >= (0.1 if fault == "late" else 0.01)
        assert server.counts.requests[path] == 3 + (0 if fault == "late" else 4)

    trainer = trainer_of("job")
    learn(trainer, "job")
    path = "/v1/completions" if dialect == "vllm" else "/generate"
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
@either_way
def test_a_server_that_never_answers_well_is_told(dialect: Any, stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        for fault, told in (("errors", "answers 500: EngineCore encountered"), ("drops", "Server disconnected")):
            setattr(server.faults, fault, {"generate": FOREVER})
            with pytest.raises(ServerGone, match=rf"request r failed {ATTEMPTS} times: {server.url}.*{told}"):
                await collect(engine, request(None, (1,), stream=stream))
            setattr(server.faults, fault, {})
        assert server.counts.requests[path] == 2 * ATTEMPTS
        assert await collect(engine, request()) == await in_process(request())

    path = "/v1/completions" if dialect == "vllm" else "/generate"
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
@either_way
def test_a_refusal_that_passes_is_waited_for_and_one_that_does_not_is_told_at_once(
    dialect: Any, stream: bool, tmp_path: Path
) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.errors, server.faults.error_status = {"generate": 3}, 429
        assert await collect(engine, request(None, (1,), stream=stream)) == await in_process(request(None, (1,)))
        assert len(server.counts.asked) == 4
        server.faults.errors, server.faults.error_status = {"generate": 3}, 400
        with pytest.raises(ServerRefused, match=rf"{server.url}.* answers 400: EngineCore") as caught:
            await collect(engine, request(None, (1,), stream=stream))
        assert caught.value.status == 400
        assert len(server.counts.asked) == 5

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_a_score_that_does_not_come_is_asked_for_again(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 0)
        right = (await engine.score(PROBE, version)).tolist()
        for fault in ("drops", "errors", "lost"):
            setattr(server.faults, fault, {"generate": 3})
            assert (await engine.score(PROBE, version)).tolist() == right
        server.lose_adapters()
        assert (await engine.score(PROBE, version)).tolist() == right
        for value in (-9999.0, None):
            server.faults.logprobs = (value,)
            with pytest.raises(ServerFault, match=server.url):
                await engine.score(PROBE, version)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
@either_way
def test_a_version_that_the_server_does_not_know_is_handed_over_again(
    dialect: Any, stream: bool, tmp_path: Path
) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 2)
        server.lose_adapters()
        asked = request(version, stream=stream)
        assert await collect(engine, asked) == await in_process(asked, trainer)
        assert server.counts.loads == {version.served_name: 2}
        server.faults.unknown = {version.served_name}
        with pytest.raises(
            EngineError, match=rf"request r failed {ATTEMPTS} times: .*(does not exist|never been loaded)"
        ):
            await collect(engine, asked)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


# --- streams that break off -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("cleanly", [False, True])
def test_a_stream_that_breaks_off_goes_on_after_its_tokens(dialect: Any, cleanly: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 7)
        faults = server.faults
        faults.cuts, faults.cut_after, faults.cut_cleanly = 2, 3, cleanly
        (found,) = await collect(engine, long_request(version, (5,), stream=True))
        tokens: list[int] = []
        logprobs: list[float] = []
        for kept in (3, 6, 60):
            seed = seeds.key(5, "continued", len(tokens)) % 2 ** (63 if dialect == "vllm" else 31) if tokens else 5
            asked = long_request(version, (seed,), prompt=(*PROMPT, *tokens), max_tokens=60 - len(tokens))
            (whole,) = await in_process(asked, trainer)
            logprobs = (logprobs + whole.logprobs)[:kept]
            tokens = (tokens + whole.tokens)[:kept]
        assert (found.tokens, found.logprobs) == (tokens, logprobs)
        assert (found.versions, found.text, found.finish) == ([7] * 60, FakeTokenizer().decode(tokens), "length")
        field, limit = ("prompt", "max_tokens") if dialect == "vllm" else ("input_ids", "max_new_tokens")
        sent = [(len(one[field]), {**one, **one.get("sampling_params", {})}[limit]) for one in server.counts.asked]
        assert sent == [(4, 60), (7, 57), (10, 54)]

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


def event(tokens: list[int], finish: str | None = None, logprob: Any = -1.0) -> str:
    """An event of a stream, or a whole answer, as vLLM has them."""
    logprobs = {"token_logprobs": [logprob] * len(tokens)}
    return json.dumps({"choices": [{"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish}]})


@pytest.mark.parametrize(("tokens", "finish"), [([40] * 20, "length"), ([40, END], "stop")])
def test_what_was_whole_when_it_broke_off_is_whole(tokens: list[int], finish: str, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.garbled = [event(tokens)]
        (found,) = await collect(engine, request(None, (1,), stream=True))
        assert (found.tokens, found.finish) == (tokens, finish)
        assert len(server.counts.asked) == 1

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


def test_a_stop_string_across_the_place_where_it_broke_off(tmp_path: Path) -> None:
    """The server that goes on has not seen its beginning: nothing behind it may be let through."""

    async def test(engine: ServerEngine) -> None:
        begun, rest = FakeTokenizer().encode("some st"), FakeTokenizer().encode("op and more")
        asked = request(None, (1,), stream=True, stop=("stop",), stop_token_ids=(), max_tokens=40)
        for piece in (event(rest), event(rest + [40] * 22, "length")):
            server.faults.garbled = [event(begun), piece]
            (found,) = await collect(engine, asked)
            assert (found.tokens, found.text, found.finish) == (begun + rest[:2], "some ", "stop")
            assert len(found.logprobs) == len(found.versions) == 9
        assert len(server.counts.asked) == 4

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_a_server_that_ends_requests_itself_is_asked_again_but_not_for_ever(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        for stream in (False, True):
            server.faults.ends = [(3, "abort")] * 2
            (found,) = await collect(engine, long_request(None, (5,), stream=stream))
            assert (len(found.tokens), found.finish, len(found.logprobs)) == (60, "length", 60)
            server.counts.asked.clear()
            server.faults.ends = [(3, "abort")] * ATTEMPTS
            with pytest.raises(
                EngineError, match=rf"{ATTEMPTS} times: {server.url} broke off a completion after 3 tokens"
            ):
                await collect(engine, long_request(None, (5,), stream=stream))
            assert len(server.counts.asked) == ATTEMPTS
            server.counts.asked.clear()

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


# --- answers that cannot be right -------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a token too many": ({"length": 1}, r"gave \d+ tokens with \d+ logprobs"),
    "a token too few": ({"length": -1}, r"gave \d+ tokens with \d+ logprobs"),
    "-9999": ({"logprobs": (-9999.0,)}, "gave a token the logprob -9999"),
    "null": ({"logprobs": (None,)}, "gave a token the logprob None"),
    "positive": ({"logprobs": (0.5,)}, "gave a token the logprob 0.5"),
    "too early": ({"ends": [(3, "length")] * ATTEMPTS}, "ended a completion for its length after 3 of 20 tokens"),
    "no reason": ({"ends": [(2, "stop")] * ATTEMPTS}, r"stopped at token \d+, which ends nothing"),
}


@of_fields("wrong", [*WRONG])
def test_wrong_answers_are_never_let_through(dialect: Any, stream: bool, wrong: str, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        faults, told = WRONG[wrong]
        for name, value in faults.items():
            setattr(server.faults, name, list(value) if name == "ends" else value)
        with pytest.raises(EngineError, match=told) as caught:
            await collect(engine, request(None, (5,), stop_token_ids=(), stream=stream))
        assert server.url in str(caught.value)
        assert "request r" in str(caught.value) or "/r/0/" in str(caught.value)
        told_before = stream and wrong not in ("-9999", "null", "positive")  # it went wrong behind good tokens
        assert len(server.counts.asked) == (1 if told_before else ATTEMPTS)
        server.faults.length, server.faults.logprobs, server.faults.ends = 0, (), []
        assert await collect(engine, request()) == await in_process(request())

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
@either_way
def test_one_wrong_answer_costs_an_attempt(dialect: Any, stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.garbled = ["{", event([40] * 20, "length", 0.5)]
        asked = request(None, (5,), stop_token_ids=(), stream=stream)
        assert await collect(engine, asked) == await in_process(asked)
        assert len(server.counts.asked) == 3

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


GARBAGE = [
    "{",
    "[]",
    "7",
    "null",
    "{}",
    '{"choices": []}',
    '{"choices": [7]}',
    '{"choices": [{"token_ids": 7}], "output_ids": 7}',
    event([]),
    event([], "length"),
    event(["a"] * 20, "length"),  # type: ignore[list-item]
    event([97] * 20, "length"),
    event([-1] * 20, "length"),
    event([40] * 20, "length", "-1"),
    event([40] * 20, "length", float("nan")),
    event([40] * 21, "length"),
    event([40] * 20, "error"),
    event([40] * 3, "stop"),
]


@both
@either_way
def test_garbage(dialect: Any, stream: bool, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        for number, text in enumerate(GARBAGE):
            server.faults.garbled = [text] * ATTEMPTS
            with pytest.raises(EngineError, match=server.url):
                await collect(engine, request(None, (5,), id=f"{number}", stream=stream))
            server.faults.garbled = []
        server.faults.garbled = ['{"error": {"message": "all is lost"}}'] * ATTEMPTS
        with pytest.raises(EngineError, match="broke off with an error: all is lost"):
            await collect(engine, request(None, (5,), stream=stream))
        assert await collect(engine, request()) == await in_process(request())

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path, clocks=replace(CLOCKS, retry=0.001)), test)


def test_a_completion_of_nothing(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.garbled = [event([], "stop")] * ATTEMPTS
        with pytest.raises(EngineError, match="gave a completion without a token"):
            await collect(engine, request(None, (5,), stop=("no such",)))

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


def test_garbage_for_facts_and_scores(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        for text in ("{", "[]", "{}", '{"choices": [{"prompt_logprobs": [null, {}]}]}'):
            server.faults.garbled = [text]
            with pytest.raises(ServerFault, match=f"{server.url} returned an invalid score"):
                await engine.score(PROBE, None)

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


def test_a_compressed_answer_that_cannot_be_read(tmp_path: Path) -> None:
    """Something between may claim an encoding: that is no answer, and no reason to hang."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # who gives up closes without having asked
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
            )
            await writer.drain()
        writer.close()

    async def test(engine: ServerEngine) -> None:
        await greeted(engine)
        listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with listener:
            replica = engine.fleet.replicas[0]
            replica.server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            await replica.close()
            for stream in (False, True):
                with pytest.raises(EngineError, match=r"does not answer|broke off"):
                    await collect(engine, request(None, (1,), stream=stream))

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path, wait_seconds=0.2), test)


def test_a_mistake_of_our_own_is_no_wait(tmp_path: Path) -> None:
    """An exception that nobody foresaw reaches whoever asked."""

    class Broken:
        def __call__(self, tokens: list[int]) -> str:
            raise ZeroDivisionError("a mistake")

    async def test(engine: ServerEngine) -> None:
        engine._decode = Broken()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(collect(engine, request(stream=True)), PATIENCE)

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)
