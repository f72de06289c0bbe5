"""Several servers, and servers that go: least tokens first, versions before requests, crashes, hangs, nobody there."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet.core.errors import EngineError, ServerFault, ServerGone
from motet.core.types import Chunk
from motet.rollout.server import ServerEngine
from motet.rollout.version_files import VersionFiles
from tests.support.fake_base import FakeTokenizer
from tests.support.protocol_server import FOREVER, ProtocolServer
from tests.support.server_run import (
    BOUNDS,
    CLOCKS,
    IMPATIENT,
    PROBE,
    PROMPT,
    RUN,
    all_up,
    asking,
    collect,
    drive,
    engine_on,
    greeted,
    in_process,
    learn,
    long_request,
    publish,
    replica_of,
    request,
    set_aside,
    trainer_of,
)
from tests.support.waiting import PATIENCE, until

both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
either_way = pytest.mark.parametrize("stream", [False, True])


# --- several replicas -------------------------------------------------------------------------------------------------------


@both
def test_a_request_goes_whole_to_the_replica_with_the_fewest_tokens(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        assert engine.capacity == 16
        for server in servers:
            server.faults.token_seconds = 0.002
        await engine.ready()
        await until(lambda: len(engine.fleet.up) == 2)
        asked = [
            long_request(id="large", seeds=range(4), max_tokens=80),
            long_request(id="small", seeds=range(4), max_tokens=40),
            long_request(id="next", seeds=range(2), max_tokens=40),
            long_request(id="last", seeds=range(2), max_tokens=40),
        ]
        running = asking(engine, *asked)
        await until(lambda: sum(len(server.counts.asked) for server in servers) == 12)
        loads = [(load.requests, load.tokens) for load in engine.loads()]
        assert loads == [(4, 4 * 84), (8, 8 * 44)]
        assert await running == [await in_process(one) for one in asked]

    with ProtocolServer(dialect) as first, ProtocolServer(dialect) as second:
        servers = (first, second)
        drive(engine_on(servers, tmp_path), test)
        key = "request_id" if dialect == "vllm" else "rid"
        places = [{str(one[key]).split("/")[1] for one in server.counts.asked} for server in servers]
        assert places == [{"large"}, {"small", "next", "last"}]


def test_a_version_is_on_every_replica_before_it_is_announced(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        await until(lambda: len(engine.fleet.up) == 2)
        second.faults.late = {"load": 0.1}
        version = await publish(engine, trainer, 0)
        assert first.entries == second.entries == (version.served_name,)
        assert [load.versions for load in engine.loads()] == [1, 1]
        with pytest.raises(EngineError, match=r"version 0 of adapter.*is loaded already"):
            await publish(engine, trainer, 0)

    trainer = trainer_of("job")
    with ProtocolServer() as first, ProtocolServer("sglang") as second:
        drive(engine_on([first, second], tmp_path), test)


@both
def test_a_replica_that_was_away_gets_the_version_and_the_probe_first(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        version = await publish(engine, trainer, 1)
        right = await engine.score(PROBE, version)
        second.start()
        await until(lambda: len(engine.fleet.up) == 2)
        first.faults.token_seconds = 0.01
        running = asking(engine, long_request(version, id="a"), request(version, id="b"))
        found = await running
        assert found[1] == await in_process(request(version), trainer)
        assert second.entries == (version.served_name,)
        assert second.counts.loads == {version.served_name: 1}
        probe, *asked = second.counts.asked
        field = "prompt" if dialect == "vllm" else "input_ids"
        assert probe[field] == PROBE.tolist()
        assert [one[field] for one in asked] == [list(PROMPT)] * 3
        assert right.tolist() == (await engine.score(PROBE, version)).tolist()

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as first, ProtocolServer(dialect) as second:
        second.stop()
        drive(engine_on([first, second], tmp_path), test)


@both
def test_a_replica_whose_probe_failed_is_probed_again(dialect: Any, tmp_path: Path) -> None:
    """It answers with the base, and the first answer to the probe is an error."""

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        version = await publish(engine, trainer, 1)
        await engine.score(PROBE, version)
        second.start()
        await until(lambda: len(engine.fleet.up) == 2)
        second.faults.lies = True
        second.faults.errors["generate"] = 1
        first.faults.token_seconds = 0.01
        requests = long_request(version, id="a"), request(version, id="b")
        found = await asyncio.gather(*(collect(engine, one) for one in requests), return_exceptions=True)
        assert second.faults.errors["generate"] == 0
        right = await in_process(request(version), trainer)
        assert isinstance(found[1], EngineError) or found[1] == right

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as first, ProtocolServer(dialect) as second:
        second.stop()
        drive(engine_on([first, second], tmp_path), test)


@both
def test_a_server_that_answers_with_the_base_after_a_restart_is_caught(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 1)
        await engine.score(PROBE, version)
        server.lose_adapters()
        server.faults.lies = True
        with pytest.raises(
            EngineError, match=rf"{server.url} answers version 1 of .*job.* differently than when"
        ) as caught:
            await collect(engine, request(version))
        assert isinstance(caught.value.__cause__, ServerFault)
        server.faults.lies = False
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


def test_servers_that_disagree_are_told(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        await until(lambda: len(engine.fleet.up) == 2)
        version = await publish(engine, trainer, 1)
        second.faults.lies = True
        with pytest.raises(ServerFault, match=rf"servers disagree on {version.served_name}: {second.url} differs by"):
            await engine.score(PROBE, version)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer() as first, ProtocolServer() as second:
        drive(engine_on([first, second], tmp_path), test)


@either_way
def test_a_server_that_fails_at_once_does_not_draw_every_request(stream: bool, tmp_path: Path) -> None:
    """It is always idle, and it says that it is well."""

    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        bad.faults.errors = {"generate": FOREVER}
        good.faults.token_seconds = 0.001
        asked = [long_request(id=f"{number}", stream=stream) for number in range(6)]
        assert await asking(engine, *asked) == [await in_process(asked[0])] * 6
        assert bad.counts.requests.total() > 0

    with ProtocolServer() as bad, ProtocolServer() as good:
        drive(engine_on([bad, good], tmp_path), test)


# --- servers that go --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_crash_costs_only_time(dialect: Any, replicas: int, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        version = await publish(engine, trainer, 1)
        await engine.score(PROBE, version)
        asked = [long_request(version, id=f"{number}") for number in range(4)]
        for server in servers:
            server.faults.token_seconds = 0.002
        running = asking(engine, *asked)
        await until(lambda: sum(server.counts.open.total() for server in servers) == 8)
        await asyncio.to_thread(servers[0].stop)
        if replicas == 1:
            await until(lambda: not engine.fleet.up)
            assert engine.loads()[0].note.startswith(f"{servers[0].url} does not answer")
            assert engine.loads()[0].versions == 0
            assert not running.done()
            await asyncio.to_thread(servers[0].start)
        assert await running == [await in_process(asked[0], trainer)] * 4
        if replicas == 1:
            assert servers[0].counts.loads == {version.served_name: 2}

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as first, ProtocolServer(dialect) as second:
        servers = (first, second)[:replicas]
        drive(engine_on(servers, tmp_path), test)


@both
def test_a_crash_while_tokens_come_keeps_them(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        version = await publish(engine, trainer, 4)
        server.faults.most_turns = server.engine.turns + 20
        asked = long_request(version, (5,), stream=True)
        read: list[Chunk] = []
        running = asyncio.create_task(collect(engine, asked, read.append))
        await until(lambda: sum(len(chunk.token_ids) for chunk in read) > 10)
        await asyncio.to_thread(server.stop)
        server.faults.most_turns = math.inf
        await asyncio.to_thread(server.start)
        (found,) = await running
        (whole,) = await in_process(asked, trainer)
        field = "prompt" if dialect == "vllm" else "input_ids"
        kept = len(server.counts.asked[-1][field]) - len(PROMPT)
        assert 10 < kept < 60
        assert found.tokens[:kept] == whole.tokens[:kept]
        assert found.tokens != whole.tokens  # the draws that follow have numbers of their own
        assert (len(found.tokens), found.versions, found.finish) == (60, [4] * 60, "length")

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
@either_way
def test_a_server_that_hangs_is_drained(dialect: Any, stream: bool, tmp_path: Path) -> None:
    """It accepts and never answers: its health says so, and what waits there goes to the other."""

    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        version = await publish(engine, trainer, 1)
        first.faults.hangs = True
        asked = [long_request(version, id=f"{number}", stream=stream) for number in range(4)]
        running = asking(engine, *asked)
        await until(lambda: not engine.fleet.replicas[0].up)
        assert await running == [await in_process(asked[0], trainer)] * 4
        assert not first.counts.asked
        assert "does not answer" in engine.loads()[0].note
        first.faults.hangs = False
        await until(lambda: engine.fleet.replicas[0].up)
        assert await collect(engine, asked[0]) == await in_process(asked[0], trainer)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as first, ProtocolServer(dialect) as second:
        drive(engine_on([first, second], tmp_path, clocks=replace(IMPATIENT, request=2 * PATIENCE)), test)


@either_way
def test_a_stream_that_stands_still_is_given_up(stream: bool, tmp_path: Path) -> None:
    """The server says that it is well, but this request brings nothing."""

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        server.faults.late = {"generate": 600.0}
        running = asking(engine, request(None, (1,), stream=stream))
        await until(lambda: len(server.counts.asked) == 1)
        server.faults.late = {}
        assert await running == [await in_process(request(None, (1,)))]
        assert len(server.counts.asked) == 2

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path, clocks=replace(CLOCKS, request=1.0)), test)


def test_a_publish_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        first.faults.hangs = True
        version = await publish(engine, trainer, 1)
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)
        first.faults.hangs = False
        await until(lambda: engine.fleet.replicas[0].up)
        second.faults.hangs = True
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)
        assert first.entries == (version.served_name,)
        second.faults.hangs = False

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer() as first, ProtocolServer() as second:
        drive(engine_on([first, second], tmp_path, clocks=replace(IMPATIENT, load=60.0, request=60.0)), test)


@both
def test_nobody_there(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await greeted(engine)
        begun = time.monotonic()
        told = (
            rf"within rollout.patience_seconds=0.7: {first.url} does not answer: .*; {second.url} is not healthy: 503"
        )
        with pytest.raises(EngineError, match=told):
            await engine.ready()
        assert time.monotonic() - begun >= 0.7
        for work in (collect(engine, request()), engine.score(PROBE, None), publish(engine, trainer, 0)):
            with pytest.raises(ServerGone, match=r"no server can be used"):
                await work
        first.start()
        assert await collect(engine, request()) == await in_process(request())

    trainer = trainer_of("job")
    with ProtocolServer(dialect) as first, ProtocolServer(dialect) as second:
        first.stop()
        second.faults.ill = True
        drive(engine_on([first, second], tmp_path, wait_seconds=0.7), test)


@pytest.mark.parametrize(
    ("url", "headers", "why"),
    [
        ("http://gpu1:80o0", {}, "InvalidURL: Invalid port: '80o0'"),
        ("http://127.0.0.1:80000", {}, "ExceptionGroup"),
        ("", {"Authorization": "Bearer k\u00e9y"}, "UnicodeEncodeError"),
    ],
)
def test_a_server_that_cannot_be_asked_at_all_is_told_at_once(
    url: str, headers: dict[str, str], why: str, tmp_path: Path
) -> None:
    """Not when the patience is over; and one of several keeps nobody from the others."""

    async def test(engine: ServerEngine) -> None:
        with pytest.raises(EngineError, match=f"{asked} cannot be reached .{why}.*; check rollout.urls"):
            await engine.ready()

    async def beside(engine: ServerEngine) -> None:
        assert await collect(engine, request()) == await in_process(request())

    with ProtocolServer() as server:
        asked = url or server.url
        set_aside()
        replica = replace(replica_of(server), url=asked, headers=headers)
        files, decode = VersionFiles(tmp_path / "served"), FakeTokenizer().decode
        drive(ServerEngine([replica], {}, files, decode, replace(BOUNDS, wait_seconds=2 * PATIENCE), RUN), test)
        set_aside()
        replica = replace(replica_of(server), url=asked, headers=headers)
        bounds = replace(BOUNDS, wait_seconds=2 * PATIENCE)
        drive(ServerEngine([replica, replica_of(server)], {}, files, decode, bounds, RUN), beside)


def test_something_else_answers(tmp_path: Path) -> None:
    """SGLang is there, and vLLM was meant: what it says is told at once."""

    async def test(engine: ServerEngine) -> None:
        await greeted(engine)
        with pytest.raises(EngineError, match=rf"{server.url}/v1/completions answers 404: .*Not Found"):
            await collect(engine, request())
        server.faults.errors = {"models": FOREVER}
        engine.fleet.replicas[0].leave("a test")
        with pytest.raises(EngineError, match=rf"{server.url}/v1/models answers 500"):
            await collect(engine, request())

    with ProtocolServer("sglang") as server:
        server.dialect = "vllm"
        drive(engine_on([server], tmp_path, wait_seconds=1.0), test)
