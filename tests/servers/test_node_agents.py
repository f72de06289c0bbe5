"""Versions sent to the nodes of servers that share no file system, and only to where their jobs are at home."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from motet.commands.node_agent import listen
from motet.config.dialects import DIALECTS, HttpRequest
from motet.core.errors import ConfigError, EngineError, ServerFault
from motet.core.types import AdapterRef
from motet.model.fake import FakeTokenizer
from motet.rollout.fake import FakeEngine
from motet.rollout.served_versions import Homes
from motet.rollout.server import ServerEngine
from motet.rollout.shipping import DIGEST, packed
from motet.rollout.version_files import VersionFiles
from tests.conftest import ROOT
from tests.support.commands import NOBODY
from tests.support.node_agents import answering, node_agent
from tests.support.protocol_client import adapter_directory
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.server_run import (
    BOUNDS,
    PROBE,
    RUN,
    all_up,
    asking,
    collect,
    drive,
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

KEY = "the key of all nodes"


@contextlib.contextmanager
def nodes(count: int, directory: Path, dialect: Any = "vllm") -> Iterator[tuple[list[ProtocolServer], list[str]]]:
    """Servers with an agent and a directory each."""
    with contextlib.ExitStack() as stack:
        setup = Setup(api_key=KEY, max_cpu_loras=4)
        servers = [stack.enter_context(ProtocolServer(dialect, setup)) for _ in range(count)]
        paths = [directory / f"node-{number}" for number in range(count)]
        agents = [node_agent(server.url, path, KEY, dialect) for server, path in zip(servers, paths, strict=True)]
        yield servers, [stack.enter_context(agent) for agent in agents]


def engine_of(servers: Sequence[ProtocolServer], agents: Sequence[str], directory: Path, **bounds: Any) -> ServerEngine:
    set_aside()
    headers = {"Authorization": f"Bearer {KEY}"}
    replicas = [
        replace(replica_of(server, headers=headers), agent=agent) for server, agent in zip(servers, agents, strict=True)
    ]
    files = VersionFiles(directory / "served")
    return ServerEngine(replicas, {}, files, FakeTokenizer().decode, replace(BOUNDS, **bounds), RUN)


async def scores(version: AdapterRef, trainer: Any, job: str) -> Any:
    engine = FakeEngine()
    engine.install(version, trainer.weights(job))
    return await engine.score(PROBE, version)


# --- many servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publishes", [15, pytest.param(100, marks=pytest.mark.soak)])
def test_nothing_is_sampled_from_a_wrong_version(publishes: int, tmp_path: Path) -> None:
    """Four nodes: one dies and comes back, one is slow, one answers with the base for a while."""

    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        slow.faults.late = {"load": 0.03}
        alive: dict[str, AdapterRef] = {}
        asked: list[tuple[AdapterRef, Any, Any]] = []
        caught = 0
        for version in range(publishes):
            if version == publishes // 4:
                dying.stop()
            if version == publishes // 2:
                dying.start()
            liar.faults.lies = 2 * publishes // 3 <= version < 2 * publishes // 3 + 3
            for job in ("one", "two"):
                learn(trainer, job, text="one learns" if version % 2 else "and the other")
                published = await publish(engine, trainer, version, job)
                try:
                    gap = np.abs(await engine.score(PROBE, published) - await scores(published, trainer, job)).max()
                except ServerFault:
                    gap = 1.0
                if gap > 1e-5:  # the probe ends the job; here it goes on with the next version
                    caught += 1
                    await engine.unload_adapter(published)
                    continue
                wanted = request(published, id=f"{job}-{version}", job=job, stream=version % 2 == 0)
                expected = await in_process(wanted, trainer, job)
                asked.append((published, expected, asyncio.ensure_future(collect(engine, wanted))))
                if job in alive:  # what was asked of the version before has to have ended
                    await asyncio.gather(*(task for asked_of, _, task in asked if asked_of == alive[job]))
                    await engine.unload_adapter(alive[job])
                alive[job] = published
        for version_, expected, task in asked:
            assert await task == expected, version_
        assert caught
        assert len(asked) >= 2 * publishes - 6
        kept = {version.served_name for version in alive.values()}
        await until(lambda: all(set(server.entries) <= kept for server in servers))
        # two wait to be removed, because a server may be reading one
        await until(lambda: all(len({path.name for path in node.iterdir()} - kept) <= 2 for node in places))

    trainer = trainer_of("one", "two")
    with nodes(4, tmp_path) as (servers, agents):
        dying, slow, liar, _ = servers
        places = [tmp_path / f"node-{number}" for number in range(4)]
        drive(engine_of(servers, agents, tmp_path, wait_seconds=20.0), test)
        assert all(server.counts.loads.total() < 1.6 * publishes for server in servers)  # and not 2: half of them
        assert not any(server.counts.failed_reads for server in servers)


def test_a_version_goes_where_its_job_is_at_home_and_spills_over_when_that_is_full(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        one, two = await publish(engine, trainer, 0, "one"), await publish(engine, trainer, 0, "two")
        await engine.unload_adapter(one)
        # by now there are two jobs: it leaves half of the servers to the other
        one = await publish(engine, trainer, 1, "one")
        assert [server.counts.loads[two.served_name] for server in servers] == [1, 1, 0, 0]
        assert [server.counts.loads[one.served_name] for server in servers] == [0, 0, 1, 1]
        await engine.score(PROBE, one)
        for server in servers:
            server.faults.token_seconds = 0.002
        few = [long_request(one, id=f"{n}", job="one") for n in range(2)]  # two completions each
        assert await asking(engine, *few) == [await in_process(one, trainer, "one") for one in few]
        assert [server.counts.loads[one.served_name] for server in servers] == [0, 0, 1, 1]
        many = [long_request(one, id=f"{n}", job="one") for n in range(4)]
        assert await asking(engine, *many) == [await in_process(one, trainer, "one") for one in many]
        loads = [server.counts.loads[one.served_name] for server in servers]
        assert (sum(loads) > 2, loads[2:]) == (True, [1, 1])

    trainer = trainer_of("one", "two")
    learn(trainer, "one")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ProtocolServer()) for _ in range(4)]
        drive(engine_of(servers, [""] * 4, tmp_path, rows=2), test)


def test_homes_are_even_and_follow_who_is_there() -> None:
    homes, urls = Homes(), [f"{number}" for number in range(4)]
    assert homes.find("a", urls) == {*urls}
    b = homes.find("b", urls)
    a = homes.find("a", urls)
    assert len(a) == len(b) == 2
    assert not a & b
    assert (homes.find("a", urls), homes.find("b", urls)) == (a, b)
    many = [homes.find(f"{number}", urls) for number in range(100)]
    assert max(map(len, many[4:])) == 1
    homes.leave("a")
    homes.leave("b")
    loads = [sum(url in found for found in many[4:]) for url in urls]
    assert max(loads) - min(loads) <= 6, loads
    assert homes.find("c", urls[:1]) == {urls[0]}


# --- what arrives -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_an_agent_writes_what_was_sent_and_nothing_else(dialect: Any, tmp_path: Path) -> None:
    first, second = adapter_directory(tmp_path, "a"), adapter_directory(tmp_path, "b")
    (content, digest), (other, digest_of_other) = packed(first), packed(second)
    assert packed(first) == (content, digest)
    assert digest == hashlib.sha256(content).hexdigest() != digest_of_other
    node = tmp_path / "node-0"

    def put(name: str, body: bytes, said: str) -> httpx2.Response:
        return client.put(f"/versions/{name}", content=body, headers={DIGEST: said})

    with nodes(1, tmp_path, dialect) as ((server,), (agent,)):
        with httpx2.Client(base_url=agent, trust_env=False, timeout=PATIENCE) as stranger:
            assert stranger.put("/versions/a-v0", content=content, headers={DIGEST: digest}).status_code == 401
        with httpx2.Client(
            base_url=agent, trust_env=False, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE
        ) as client:
            refused = put("a-v0", content[:-1] + b"x", digest)
            assert (refused.status_code, "send them again" in refused.text) == (422, True)
            assert put("a-v0", b"no archive", hashlib.sha256(b"no archive").hexdigest()).status_code == 422
            assert put("..", content, digest).status_code in (400, 404)
            assert put(".staged", content, digest).status_code == 400
            assert list(node.iterdir()) == []
            assert not server.entries
            assert put("a-v0", content, digest).status_code == 200
            assert [path.name for path in node.iterdir()] == ["a-v0"]
            for file in (node / "a-v0").iterdir():
                assert file.read_bytes() == (Path(first) / file.name).read_bytes()
            assert set(server.entries) == {"a-v0"}
            again = put("a-v0", content, digest)  # it was not heard the first time: the server's own answer
            assert DIALECTS[dialect].known(again.status_code, again.text)
            assert put("a-v0", other, digest_of_other).status_code == 409
            server.stop()
            assert put("a-v0", content, digest).status_code == 502
            assert client.get("/versions").json() == {"versions": ["a-v0"]}
            server.start()
            assert put("a-v0", content, digest).status_code == 200  # from the file that is there
            assert client.delete("/versions/a-v0").status_code == 200
            assert not server.entries
            assert client.get("/versions").json() == {"versions": []}
    assert list(node.iterdir()) == [], "an agent that stops leaves its directory, and no retired version"


def test_an_agent_that_starts_again_keeps_what_its_server_may_read(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        version = await publish(engine, trainer, 0)
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)
        shutil.copytree(tmp_path / "node-0" / version.served_name, tmp_path / "node-0" / "gone.other.1.1-v7")
        with node_agent(server.url, tmp_path / "node-0", KEY):
            assert {path.name for path in (tmp_path / "node-0").iterdir()} == {version.served_name}

    trainer = trainer_of("job")
    learn(trainer, "job")
    with nodes(1, tmp_path) as ((server,), agents):
        drive(engine_of([server], agents, tmp_path), test)


def test_an_agent_that_starts_before_its_server_deletes_later_what_killed_runs_left(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.start()
        await engine.ready()
        version = await publish(engine, trainer, 0)
        assert {path.name for path in node.iterdir()} == {version.served_name}

    for name in ("gone.other.1.1-v7", ".staged-gone"):
        (node := tmp_path / "node-0").joinpath(name).mkdir(parents=True)
    trainer = trainer_of("job")
    with ProtocolServer("vllm", Setup(api_key=KEY)) as server:
        server.stop()
        with node_agent(server.url, node, KEY) as agent:
            drive(engine_of([server], [agent], tmp_path), test)


def test_a_version_whose_files_are_gone_is_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        with pytest.raises(EngineError, match="cannot be sent version gone-v0"):
            await engine.fleet.replicas[0].load("gone-v0", str(tmp_path / "gone"))
        version = await publish(engine, trainer, 0)
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)

    trainer = trainer_of("job")
    with nodes(1, tmp_path) as (servers, agents):
        drive(engine_of(servers, agents, tmp_path), test)


@pytest.mark.parametrize("models", [{"data": []}, {"data": None}, []])
def test_an_agent_starts_beside_a_server_that_does_not_say_what_it_serves(models: Any, tmp_path: Path) -> None:
    async def said(_: Request) -> Response:
        return JSONResponse(models)

    (tmp_path / "node" / "gone.other.1.1-v7").mkdir(parents=True)
    with (
        answering(Starlette(routes=[Route("/v1/models", said)])) as server,
        node_agent(server, tmp_path / "node") as agent,
    ):
        assert httpx2.get(f"{agent}/versions", trust_env=False).json() == {"versions": ["gone.other.1.1-v7"]}


def test_a_path_that_a_server_does_not_see_yet_is_asked_for_again(tmp_path: Path) -> None:
    """A file system of the network: what is written becomes visible on the server's host later."""

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        publishing = asyncio.ensure_future(publish(engine, trainer, 0))
        await until(lambda: server.counts.requests["/v1/load_lora_adapter"] > 4)
        assert not publishing.done()
        shutil.copytree(tmp_path / "served", tmp_path / "seen")
        version = await publishing
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)
        with pytest.raises(EngineError, match="No adapter found for"):
            await publish(engine, trainer, 1)

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer() as server:
        set_aside()
        replica = replica_of(server)
        late = replace(replica.dialect, load=lambda name, path: HttpRequest(*_elsewhere(tmp_path, name)))
        replica = replace(replica, dialect=late, clocks=replace(replica.clocks, load=0.5))
        files = VersionFiles(tmp_path / "served")
        drive(ServerEngine([replica], {}, files, FakeTokenizer().decode, BOUNDS, RUN), test)


def _elsewhere(directory: Path, name: str) -> tuple[str, dict[str, str]]:
    return "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory / "seen" / name)}


@pytest.mark.parametrize("answer", ["other", "number", "names"])
def test_what_is_no_agent_is_told(answer: str, tmp_path: Path) -> None:
    """Another program answers there, such as the server itself."""

    async def other(request: Request) -> Response:
        return JSONResponse({"other": [1], "number": 5, "names": {"versions": [1]}}[answer])

    async def test(engine: ServerEngine) -> None:
        await greeted(engine)
        with pytest.raises(EngineError, match=f"{agent} does not answer like `motet node-agent`; check rollout.ag"):
            await engine.ready()

    app = Starlette(routes=[Route("/versions", other), Route("/health", lambda _: Response())])
    with ProtocolServer("vllm", Setup(api_key=KEY)) as server, answering(app) as agent:
        drive(engine_of([server], [agent], tmp_path, wait_seconds=0.001), test)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give --key-env"):
        listen("http://127.0.0.1:1", "vllm", host="0.0.0.0", port=0, directory=tmp_path, key_env=None)
    for url in ("http://x:80a", "http://[::1:8000", "http://", "127.0.0.1:8000"):
        with pytest.raises(ConfigError, match=re.escape(repr(url))):
            listen(url, "vllm", host="127.0.0.1", port=0, directory=tmp_path, key_env=None)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    NOBODY.touch()
    for place in (tmp_path / "file/node", NOBODY / "node"):
        with pytest.raises(ConfigError, match=f"{place} cannot be written: Not a directory; give another --directory"):
            listen("http://127.0.0.1:1", "vllm", host="127.0.0.1", port=0, directory=place, key_env=None)

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        version = await publish(engine, trainer, 0)
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)
        assert (tmp_path / "node" / version.served_name).is_dir()

    trainer = trainer_of("job")
    learn(trainer, "job")
    command, env = [sys.executable, "-m", "motet", "node-agent"], {**os.environ, "NODE_KEY": KEY}
    options = ["--port", "0", "--key-env", "NODE_KEY", "--directory", str(tmp_path / "node")]
    with ProtocolServer("vllm", Setup(api_key=KEY)) as server:
        process = subprocess.Popen(
            [*command, server.url, *options], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split("sent to ")[1].split()[0]
            drive(engine_of([server], [url], tmp_path), test)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE)
