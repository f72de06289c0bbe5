"""Versions among several servers: each goes to those where its job is at home, and elsewhere when these are full."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.config.dialects import HttpRequest
from motet.core.errors import EngineError, ServerFault
from motet.core.types import AdapterRef
from motet.rollout.served_versions import Homes
from motet.rollout.server import ServerEngine
from motet.rollout.version_files import VersionFiles
from tests.support.fake_base import FakeTokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.server_run import (
    BOUNDS,
    PROBE,
    RUN,
    all_up,
    asking,
    collect,
    drive,
    engine_on,
    in_process,
    learn,
    long_request,
    publish,
    replica_of,
    request,
    set_aside,
    trainer_of,
)
from tests.support.waiting import until


async def scores(version: AdapterRef, trainer: Any, job: str) -> Any:
    engine = FakeEngine()
    engine.install(version, trainer.weights(job))
    return await engine.score(PROBE, version)


@pytest.mark.parametrize("publishes", [15, pytest.param(100, marks=pytest.mark.soak)])
def test_nothing_is_sampled_from_a_wrong_version(publishes: int, tmp_path: Path) -> None:
    """Four servers: one dies and comes back, one is slow, one answers with the base for a while."""

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
        await until(lambda: len({path.name for path in (tmp_path / "served").iterdir()} - kept) <= 2)

    trainer = trainer_of("one", "two")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ProtocolServer("vllm", Setup(max_cpu_loras=4))) for _ in range(4)]
        dying, slow, liar, _ = servers
        drive(engine_on(servers, tmp_path, wait_seconds=20.0), test)
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
        drive(engine_on(servers, tmp_path, rows=2), test)


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
