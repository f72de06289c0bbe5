"""Versions on servers: published, refused, handed over, unloaded in time, and their files no sooner than that."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from motet.core.errors import AdapterError, EngineError, ServerGone, ServerRefused
from motet.core.types import AdapterRef
from motet.rollout.connection import Clocks
from motet.rollout.embedded import SavedFiles
from motet.rollout.file_sync import FileSync
from motet.rollout.server import ServerEngine
from motet.rollout.version_files import VersionFiles
from motet.runtime.disk_gate import is_full
from tests.support.fake_engine import FakeEngine
from tests.support.fake_trainer import FakeTrainer
from tests.support.protocol_client import adapter_directory
from tests.support.protocol_server import FOREVER, ProtocolServer, Setup
from tests.support.server_run import (
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
    ticks,
    trainer_of,
)
from tests.support.waiting import until

both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])


def directories(path: Path) -> set[str]:
    """What lies in the directory of versions."""
    return {one.name for one in (path / "served").glob("*")}


def stays(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of versions that will not go."""
    return [message for message in caplog.messages if "stays loaded" in message]


# --- publishing -------------------------------------------------------------------------------------------------------------


@both
def test_each_version_answers_as_itself(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        expected = []
        for version in range(3):
            learn(trainer, "job")
            await publish(engine, trainer, version)
            expected.append(await in_process(request(ref(version)), trainer))
        assert await asking(engine, *(request(ref(version), id=f"{version}") for version in range(3))) == expected
        assert expected[0] != expected[1] != expected[2]

    trainer = trainer_of("job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


def test_a_version_from_a_directory_that_goes_afterwards(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        source = tmp_path / "source"
        source.mkdir()
        trainer.save_adapter("job", source, optimizer=True)
        await engine.load_adapter(ref(0), source)
        for file in source.iterdir():
            file.unlink()
        server.lose_adapters()
        assert await collect(engine, request(ref(0))) == await in_process(request(ref(0)), trainer)
        with pytest.raises(EngineError, match="adapter_config"):
            await engine.load_adapter(ref(1), source)
        assert directories(tmp_path) == {ref(0).served_name}

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_a_refused_publish_tells_why_and_leaves_nothing(dialect: Any, tmp_path: Path) -> None:
    """One of two servers refuses the rank: the other's copy goes as well."""

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        await until(lambda: len(engine.fleet.up) == 2)
        told = (
            r"LoRA rank 32 is greater than max_lora_rank 16" if dialect == "vllm" else r"rank 32 .* `--max-lora-rank`"
        )
        with pytest.raises(ServerRefused, match=rf"{small.url}/.*load_lora_adapter answers \d+: .*{told}"):
            await publish(engine, trainer, 0)
        await until(lambda: large.counts.unloads.total() == 1)
        assert small.entries == large.entries == ()
        with pytest.raises(EngineError, match=r"version 0 of 'job.run.1.1' is not loaded"):
            await collect(engine, request(ref(0)))

    trainer = trainer_of("job", rank=32)
    with ProtocolServer(dialect) as small, ProtocolServer(dialect, Setup(max_lora_rank=64)) as large:
        drive(engine_on([small, large], tmp_path), test)
    assert not (tmp_path / "served").exists()


def test_a_version_that_cannot_be_written(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        with pytest.raises(AdapterError, match="no adapter 'other'"):
            await publish(engine, trainer, 0, "other")
        assert directories(tmp_path) == set()

    trainer = trainer_of("job")
    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)
        assert not server.counts.loads


class FullTrainer(FakeTrainer):
    """There is no room where it writes adapters."""

    def save_adapter(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
        (directory / "adapter_config.json").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "adapter_model.safetensors"))


def test_a_full_disk_of_versions_is_not_taken_for_that_of_the_run(tmp_path: Path) -> None:
    """A job that waits for room on its own disk would wait for ever."""

    async def test(engine: ServerEngine) -> None:
        for sync, where in (
            (FileSync(engine, trainer), rf"{tmp_path / 'served'} \(rollout\.directory\): .*No space left"),
            (SavedFiles(engine, trainer), rf"{tempfile.gettempdir()}: .*No space left .* TMPDIR"),
        ):
            with pytest.raises(EngineError, match=f"version 0 of .* could not be written to {where}") as told:
                await sync.publish("job", ref(0))
            assert not is_full(told.value)
        assert directories(tmp_path) == set()

    trainer = trainer_of("job", kind=FullTrainer)
    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)


class Spoiling(FakeEngine):
    """Reads a version, and leaves a file where its directory was."""

    async def load_adapter(self, ref: AdapterRef, directory: Path) -> None:
        await super().load_adapter(ref, directory)
        self.spoil(directory)

    def spoil(self, directory: Path) -> None:
        shutil.rmtree(directory)
        directory.touch()
        self.spoilt = directory


def test_a_version_that_is_read_counts_although_its_directory_cannot_be_removed() -> None:
    engine, trainer = Spoiling(), trainer_of("job")
    asyncio.run(SavedFiles(engine, trainer).publish("job", ref(0)))
    engine.spoilt.unlink()


def test_a_publish_that_takes_too_long_fails_alone(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await publish(engine, trainer, 0)
        server.faults.late, server.faults.most_turns = {"load": 600.0}, server.engine.turns + 10
        running = asking(engine, long_request(ref(0)))
        with pytest.raises(ServerGone, match=rf"{server.url}/v1/load_lora_adapter has not answered within 1 s"):
            await publish(engine, trainer, 1)
        assert not running.done()
        server.faults.most_turns = math.inf
        assert await running == [await in_process(long_request(ref(0)), trainer)]
        server.faults.late = {}
        await publish(engine, trainer, 2)
        assert await asking(engine, request(ref(2))) == [await in_process(request(ref(2)), trainer)]

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path, clocks=Clocks(health=5, load=1.0, retry=0.01, look=0.02)), test)
        assert server.entries == (ref(0).served_name, ref(2).served_name)


@both
@pytest.mark.parametrize("fault", ["drops", "lost", "errors"])
def test_a_load_that_is_not_answered(dialect: Any, fault: str, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        setattr(server.faults, fault, {"load": 2})
        version = await publish(engine, trainer, 0)
        assert await collect(engine, request(version)) == await in_process(request(version), trainer)
        setattr(server.faults, fault, {"load": FOREVER})
        with pytest.raises(EngineError, match=server.url):
            await publish(engine, trainer, 1)
        setattr(server.faults, fault, {})
        await until(lambda: server.entries == (version.served_name,))  # also where it was loaded and did not say so

    trainer = trainer_of("job")
    learn(trainer, "job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)
        assert len(server.entries) == 1


# --- unloading --------------------------------------------------------------------------------------------------------------


@both
def test_three_hundred_versions_leave_few(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        most = 0
        for version in range(300):
            await publish(engine, trainer, version)
            if version:
                await engine.unload_adapter(ref(version - 1))
            if version % 50 == 0:
                learn(trainer, "job")
            most = max(most, len(directories(tmp_path)))
        await until(lambda: server.entries == (ref(299).served_name,))
        assert most <= 6  # the new one, the one that is unloaded, two that wait, and a little haste
        await until(lambda: len(directories(tmp_path)) == 3)
        assert [load.versions for load in engine.loads()] == [1]

    trainer = trainer_of("job")
    with ProtocolServer(dialect, Setup(max_cpu_loras=4)) as server:
        drive(engine_on([server], tmp_path), test)
        assert server.counts.loads.total() == 300
        assert server.counts.unloads.total() == 299
        assert server.counts.most_entries <= 3
        assert not server.counts.re_reads
        assert not server.counts.failed_reads


@both
def test_an_unload_that_fails_is_logged_and_made_up_for(dialect: Any, tmp_path: Path, caplog: Any) -> None:
    async def test(engine: ServerEngine) -> None:
        for version in range(3):
            await publish(engine, trainer, version)
        server.faults.errors = {"unload": 3}
        with caplog.at_level(logging.WARNING):
            await engine.unload_adapter(ref(0))
            await until(lambda: bool(stays(caplog)))
        assert f"{ref(0).served_name} stays loaded for now: {server.url}" in stays(caplog)[0]
        assert "answers 500" in stays(caplog)[0]
        assert len(server.entries) == 3
        assert await collect(engine, request(ref(2))) == await in_process(request(ref(2)), trainer)
        await engine.unload_adapter(ref(1))
        await until(lambda: server.entries == (ref(2).served_name,))

    trainer = trainer_of("job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)
        assert len(stays(caplog)) == 1


@both
def test_a_version_that_the_server_refuses_to_unload_keeps_no_other_there(
    dialect: Any, tmp_path: Path, caplog: Any
) -> None:
    async def test(engine: ServerEngine) -> None:
        for version in range(3):
            await publish(engine, trainer, version)
        server.faults.errors, server.faults.error_status = {"unload": 6}, 400
        await engine.unload_adapter(ref(0))
        await until(lambda: len(stays(caplog)) == 1)
        await engine.unload_adapter(ref(1))
        await until(lambda: len(stays(caplog)) == 2)
        assert set(server.entries) == {ref(0).served_name, ref(2).served_name}
        await publish(engine, trainer, 3)
        await engine.unload_adapter(ref(2))
        await until(lambda: server.entries == (ref(3).served_name,))

    trainer = trainer_of("job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)


@both
def test_a_version_that_is_gone_from_the_server_is_unloaded(dialect: Any, tmp_path: Path, caplog: Any) -> None:
    async def test(engine: ServerEngine) -> None:
        await publish(engine, trainer, 0)
        server.lose_adapters()
        await engine.unload_adapter(ref(0))
        await until(lambda: [load.versions for load in engine.loads()] == [0])

    trainer = trainer_of("job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)
    assert not stays(caplog)


def test_a_server_that_hangs_at_the_end_leaves_no_files(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        await publish(engine, trainer, 0)
        server.faults.late = {"unload": 15.0}
        await engine.unload_adapter(ref(0))

    trainer = trainer_of("job")
    with ProtocolServer("vllm") as server:
        drive(engine_on([server], tmp_path), test)
        assert not (tmp_path / "served").exists()


@both
def test_files_go_later_than_their_version(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        for version in range(4):
            await publish(engine, trainer, version)
        server.faults.late = {"unload": 0.05}
        for version in range(4):
            await engine.unload_adapter(ref(version))
        async for _ in ticks(0.4):
            assert set(server.entries) <= directories(tmp_path)
        assert server.entries == ()
        assert len(directories(tmp_path)) == 2

    trainer = trainer_of("job")
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path), test)
    assert not (tmp_path / "served").exists()


@both
@pytest.mark.parametrize("fails", [False, True])
def test_what_an_earlier_attempt_left_is_unloaded(dialect: Any, fails: bool, tmp_path: Path, caplog: Any) -> None:
    """Adapters of others are not touched; where it will not go, that is no reason to do without the server."""

    async def load() -> None:
        engine = engine_on([server], tmp_path / "other")
        await engine.fleet.wait()
        for name in (*mine, *others):
            await engine.fleet.replicas[0].load(name, directory)
        await engine.fleet.close()

    async def test(engine: ServerEngine) -> None:
        server.faults.errors = {"unload": FOREVER} if fails else {}
        await engine.ready()
        assert set(server.entries) == ({*mine, *others} if fails else {*others})
        server.faults.errors = {}
        await publish(engine, trainer, 5)
        await engine.unload_adapter(ref(5))
        await until(lambda: set(server.entries) == {*others})

    mine, others = ("job.run.1.1-v4", "else.run.1.2-v0"), ("job.run2.1.1-v4", "chat", "run")
    directory, trainer = adapter_directory(tmp_path, "a"), trainer_of("job")
    with ProtocolServer(dialect) as server:
        asyncio.run(load())
        drive(engine_on([server], tmp_path), test)
    assert len(stays(caplog)) == (1 if fails else 0)


def test_a_publish_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        server.faults.late = {"load": 0.5}
        for version, seconds in enumerate((0.0, 0.001, 0.01, 0.01, 0.01, 0.03, 0.08)):  # written after 0.05
            publishing = asyncio.ensure_future(publish(engine, trainer, version))
            await asyncio.sleep(seconds)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            assert publishing.cancelled()
        await asyncio.sleep(0.6)  # what was asked for is loaded, and unloaded
        server.faults.late = {}
        await publish(engine, trainer, 9)
        assert await collect(engine, request(ref(9))) == await in_process(request(ref(9)), trainer)
        await engine.unload_adapter(ref(9))
        await until(lambda: server.entries == ())

    class Slow(FakeTrainer):
        def save_adapter(self, name: str, directory: Path, *, optimizer: bool, gradient: bool = True) -> None:
            time.sleep(0.05)
            super().save_adapter(name, directory, optimizer=optimizer, gradient=gradient)

    trainer = trainer_of("job", kind=Slow)
    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path), test)
    assert not (tmp_path / "served").exists()


# --- files ------------------------------------------------------------------------------------------------------------------


def stage(files: VersionFiles, version: AdapterRef, text: str = "x") -> Path:
    with files.write_draft(version.served_name) as directory:
        (directory / ("file" if text else ".")).write_text(text)
        assert not files.path(version.served_name).exists()
    return files.path(version.served_name)


def test_a_name_appears_whole_and_once(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path / "served")
    path = stage(files, ref(0))
    assert path == tmp_path / "served" / "job.run.1.1-v0"
    assert (path / "file").read_text() == "x"
    assert path.stat().st_mode & 0o777 == 0o755
    with pytest.raises(EngineError, match=r"-v0 exists already;.*is never used twice"):
        stage(files, ref(0), "y")
    assert (path / "file").read_text() == "x"
    with pytest.raises(IsADirectoryError):
        stage(files, ref(1), "")
    assert [one.name for one in files.directory.iterdir()] == [path.name]


def test_retired_directories_stay_for_two_more(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path / "served")
    paths = [stage(files, ref(version)) for version in range(5)]
    for version in range(4):
        files.retire(ref(version).served_name)
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    files.close()
    assert [path.exists() for path in paths] == [False] * 4 + [True]  # what was not retired is kept
    files.retire(ref(4).served_name)
    files.close()
    assert not files.directory.exists()


def test_what_a_killed_attempt_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "served" / "job.run.1.1-v0").mkdir(parents=True)
    (tmp_path / "served" / ".staged-abc").mkdir()
    files = VersionFiles(tmp_path / "served")
    assert list(files.directory.iterdir()) == []
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"served \(rollout.directory\).*directory"):
        VersionFiles(tmp_path / "file" / "served")
