"""The process of `motet serve` is killed: its engine works on, and the next one takes it over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from motet.config import EngineConfig, HostConfig, RewardConfig
from motet.config.service import ANY_SIZE
from motet.core.errors import DeviceLost, ScorerAway
from motet.core.types import JobState, Wanted
from motet.hosts import line as lines
from motet.hosts import messages as m
from motet.hosts.line import Gone, ServiceLine
from motet.hosts.local_hosts import LocalHosts, code_of
from motet.hosts.process import HostProcess
from motet.hosts.scores import AskedOfService
from motet.kernels.cpu.choice import Choice
from motet.process.alive import Pulse
from motet.process.channel import Alive, ChannelMessage, decode, encode
from motet.runtime.rundir import RunDirectory
from motet.runtime.slots import Rule
from tests.support.adapter_files import run_alone, weights_of
from tests.support.service_run import LASTING, Service, tiny
from tests.support.waiting import PATIENCE, until, wait_until

TOKEN = "service." + "engine.."
START = m.StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE, takeover_seconds=60.0)


# --- the engine's end, message by message -----------------------------------------------------------------------------------


class OneService:
    """A process of a service, as the engine sees it."""

    def __init__(self, address: Path, token: str = TOKEN[:8]) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(address))
        self.socket.sendall(token.encode())
        self.lines = self.socket.makefile("rb")

    def send(self, *messages: ChannelMessage) -> OneService:
        self.socket.sendall(b"".join(map(encode, messages)))
        return self

    def hears(self, count: int) -> list[Any]:
        """The next messages, after the engine's half of the token."""
        return [decode(self.lines.readline(), m.FromHost) for _ in range(count)]

    def welcomed(self) -> OneService:
        assert self.lines.read(8) == TOKEN[8:].encode()
        return self

    def dies(self) -> None:
        self.lines.close()
        self.socket.close()


class Line:
    """A line in this process, what it delivers, and whether it ended its process."""

    def __init__(self, directory: Path) -> None:
        self.address, self.said, self.ended = directory / "line.sock", list[str](), threading.Event()
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(self.address))
        self.listening.listen()
        self.usage = directory / "0-1.usage"
        self.line = ServiceLine(self.listening, TOKEN, self.said.append, self.ended.set, self.usage)

    def close(self) -> None:
        self.listening.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An address of a socket has room for a hundred bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="motet-") as found:
        yield Path(found)


@contextlib.asynccontextmanager
async def begun(
    directory: Path, start: m.StartHost = START
) -> AsyncIterator[tuple[Line, OneService, asyncio.Queue[Any]]]:
    """A line with its first service."""
    with contextlib.closing(Line(directory)) as made:
        first = OneService(made.address).send(start)
        assert await asyncio.to_thread(made.line.first) == start
        yield made, first.welcomed(), made.line.queue()


def step(number: int) -> m.JobStepped:
    return m.JobStepped("job", {"step": number})


def test_what_was_not_written_down_comes_again_and_nothing_else(short_path: Path) -> None:
    async def work() -> None:
        async with begun(short_path) as (made, first, messages):
            for number in range(3):
                made.line.send(step(number))
            assert first.hears(3) == [step(0), step(1), step(2)]
            first.send(m.EventKept(), m.Nudge("a"))
            assert await messages.get() == m.Nudge("a")
            first.dies()
            assert await messages.get() == Gone()
            made.line.send(m.Progress({}, {}))
            made.line.send(m.JobChanged("job", JobState.SUCCEEDED, "", key="a.1"))
            second = OneService(made.address).send(START).welcomed()
            assert await messages.get() == START
            made.line.send(step(3))  # before the engine has resumed: in its turn
            made.line.resume()
            made.line.send(m.Stopped())
            heard = await asyncio.to_thread(second.hears, 5)
            assert heard == [
                step(1),
                step(2),
                m.JobChanged("job", JobState.SUCCEEDED, "", key="a.1"),
                step(3),
                m.Stopped(),
            ]
            second.send(*[m.EventKept()] * 4, m.Nudge("b"))
            assert await messages.get() == m.Nudge("b")
            assert not made.line._kept
            assert not made.line._waiting
            assert not made.ended.is_set()
            second.dies()

    asyncio.run(work())


@pytest.mark.parametrize("token", ["", "engine..", "servic?."])
def test_a_stranger_is_refused_and_holds_nobody_up(short_path: Path, token: str) -> None:
    async def work() -> None:
        async with begun(short_path) as (made, first, messages):
            first.dies()
            assert await messages.get() == Gone()
            stranger = OneService(made.address, token + encode(m.Stop()).decode() * bool(token))
            with contextlib.suppress(OSError):  # it has hung up
                stranger.socket.shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(stranger.lines.read) == b"", "it is answered"
            second = OneService(made.address).send(START).welcomed()
            assert await messages.get() == START
            assert messages.empty(), "a stranger was obeyed"
            assert any("refused" in one for one in made.said)
            stranger.dies()
            second.dies()

    asyncio.run(work())


def test_an_engine_of_another_configuration_saves_and_ends(short_path: Path) -> None:
    async def work() -> None:
        async with begun(short_path) as (made, first, messages):
            first.dies()
            assert await messages.get() == Gone()
            made.line.send(used := m.UsageWindow("a", 1, {"job": 7}, "small"))
            second = OneService(made.address).send(replace(START, engine={"slots": 2})).welcomed()
            assert await messages.get() == m.Stop()
            heard, failed = await asyncio.to_thread(second.hears, 2)
            assert heard == used
            assert "differs in engine: it saves its jobs" in failed.reason
            second.send(m.EventKept())
            made.line.send(m.Progress({}, {}))
            made.line.send(m.HostReady([]))  # it would be given jobs
            made.line.send(last := replace(used, window=2))
            made.line.send(m.Stopped())
            assert await asyncio.to_thread(second.hears, 2) == [last, m.Stopped()]
            second.dies()
            assert await messages.get() is None

    asyncio.run(work())


def test_a_host_that_is_not_needed_any_more_tells_what_it_used(short_path: Path) -> None:
    async def work() -> None:
        async with begun(short_path) as (made, first, messages):
            first.dies()
            assert await messages.get() == Gone()
            made.line.send(used := m.UsageWindow("a", 1, {"job": 7}, "small"))
            second = OneService(made.address).send(m.Stop()).welcomed()
            assert await messages.get() == m.Stop()
            made.line.send(m.Stopped())
            assert await asyncio.to_thread(second.hears, 2) == [used, m.Stopped()]
            second.dies()
            assert await messages.get() is None

    asyncio.run(work())


def test_an_engine_goes_on_with_the_kernels_of_its_jobs(short_path: Path) -> None:
    """Jobs whose base is not covered began with torch, whatever the first service chose."""

    async def work() -> None:
        async with begun(short_path, replace(START, own=Choice("native"))) as (made, first, messages):
            first.dies()
            assert await messages.get() == Gone()
            start = replace(START, own=Choice("torch", "jobs began with them", kept=True))
            second = OneService(made.address).send(start).welcomed()
            assert await messages.get() == start
            second.dies()

    asyncio.run(work())


@pytest.mark.parametrize("why", ["late", "full"])
def test_an_engine_that_nobody_takes_over_saves_and_ends(
    short_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        seconds = 0.05 if why == "late" else 60.0
        async with begun(short_path, replace(START, takeover_seconds=seconds)) as (made, first, messages):
            first.dies()
            assert await messages.get() == Gone()
            if why == "full":
                for number in range(4):
                    made.line.send(m.JobStepped("job", {"step": number, "text": "x" * (lines.MOST_KEPT // 3)}))
            async with asyncio.timeout(PATIENCE):
                assert await messages.get() == m.Stop()
            with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as late:
                late.connect(str(made.address))
            made.line.send(used := m.UsageWindow("a", 2, {"job": 7}, "small"))
            made.line.send(m.Stopped())
            assert await messages.get() is None
            found = list[m.UsageWindow]()
            for _ in range(2):
                await LocalHosts(short_path).end_from(0, found.append)
            assert found == [used], "the next service stores it once"
            made.usage.write_bytes(b"torn")
            await LocalHosts(short_path).end_from(0, found.append)
            assert not made.usage.exists()
            (told,) = [one.getMessage() for one in caplog.records if one.name == "motet.hosts.local_hosts"]
            assert told.startswith(f"{made.usage} cannot be read, and is deleted: ")

    asyncio.run(work())


def test_a_process_that_was_started_in_vain_ends(short_path: Path) -> None:
    with contextlib.closing(Line(short_path)) as made:
        OneService(made.address).welcomed().dies()
        assert made.ended.wait(PATIENCE)


def test_a_host_whose_device_breaks_down_ends(short_path: Path) -> None:
    """Its owner starts it again; it would fail every job."""

    def tick() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    async def work() -> None:
        config = HostConfig(base="small", engine=EngineConfig(threads=1))
        async with begun(short_path) as (made, first, _):
            host = HostProcess(config, RunDirectory(short_path / "run"), START, made.line)
            with contextlib.closing(host):
                serving = asyncio.create_task(host.serve(Pulse(lambda still: None)))
                (ready,) = await asyncio.to_thread(first.hears, 1)
                assert isinstance(ready, m.HostReady)
                host.workshop.device.add_tick(tick)
                host.workshop.device.wake()
                with pytest.raises(DeviceLost, match="illegal memory access"):
                    await asyncio.wait_for(serving, PATIENCE)
            first.dies()

    asyncio.run(work())


def test_a_later_job_whose_rows_cannot_be_trained_fails_before_it_begins(short_path: Path) -> None:
    """In the memory of a small card; its neighbour is taken."""

    async def work() -> None:
        config = HostConfig(base="small", engine=EngineConfig(threads=1))
        async with begun(short_path) as (made, first, _):
            host = HostProcess(config, RunDirectory(short_path / "run"), START, made.line)
            assert host.workshop.samples is not None
            host.workshop.samples = dataclasses.replace(host.workshop.samples, longest=30, recomputed=100)
            with contextlib.closing(host):
                serving = asyncio.create_task(host.serve(Pulse(lambda still: None)))
                for name, words in (("short", "add 1 and 2"), ("long", "add " * 34)):
                    rows = short_path / f"{name}.jsonl"
                    rows.write_text(json.dumps({"prompt": words, "answer": "3"}) + "\n")
                    job = tiny(name, data={"source": str(rows), "holdout": 0}, steps=1)
                    host.handle(m.AddJob(job, Wanted.RUN, 0, "", Rule()))
                changed = list[m.JobChanged]()
                while {one.job for one in changed if one.state.final} != {"short", "long"}:
                    (heard,) = await asyncio.to_thread(first.hears, 1)
                    changed += [heard] if isinstance(heard, m.JobChanged) else []
                ends = {one.job: one for one in changed if one.state.final}
                assert ends["short"].state is JobState.SUCCEEDED
                assert ends["long"].state is JobState.FAILED
                assert "a sample of at least 78 tokens" in ends["long"].message
                assert "set engine.recompute to true, with which 100 fit" in ends["long"].message
                assert [one.job for one in changed if one.state is JobState.RUNNING] == ["short"]
                serving.cancel()
                await asyncio.wait([serving])
            first.dies()

    asyncio.run(work())


def test_scores_are_asked_again_and_at_the_end_nobody_waits_for_them() -> None:
    sent: list[Any] = []

    async def work() -> None:
        scores, reward = AskedOfService(sent.append), RewardConfig(name="judge")
        first, second = (asyncio.create_task(scores("job", reward, {"id": n}, ["a"])) for n in range(2))
        await until(lambda: len(sent) == 2)
        scores.hear(m.ScoresAnswered(sent[0].key, [0.5]))
        assert await first == [0.5]
        scores.ask_again()
        assert sent[2:] == [sent[1]]
        scores.send_away()
        for waiting in (second, scores("job", reward, {"id": 3}, ["a"])):
            with pytest.raises(ScorerAway):
                await waiting

    asyncio.run(work())


# --- the service's end ------------------------------------------------------------------------------------------------------


def test_what_listens_in_an_engines_place_is_left_alone_and_replaced(tmp_path: Path) -> None:
    """A directory's name may be longer than an address can be, and nobody else can look into it."""
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    hosts = LocalHosts(directory)

    async def work() -> None:
        (directory / "0.token").write_text(TOKEN)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(f"/proc/self/fd/{os.open(directory, os.O_PATH)}/0.sock")
            stranger.listen()
            asking = asyncio.create_task(hosts.host(0, tmp_path / "engine.log"))
            connection, _ = await asyncio.to_thread(stranger.accept)
            with connection:
                connection.sendall(b"nonsense" * 8)
            engine = await asking
        try:
            assert {path.name: path.stat().st_mode & 0o777 for path in (directory, *directory.iterdir())} == {
                directory.name: 0o700, "0.sock": 0o600, "0.token": 0o600,
            }  # fmt: skip
        finally:
            await engine.kill()
        assert not list(directory.iterdir()), "a file of a process that is gone is left"

    asyncio.run(work())


def test_where_no_socket_can_be_an_engine_ends_with_its_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0.sock").mkdir()

    async def work() -> None:
        engine = await LocalHosts(tmp_path).host(0, tmp_path / "engine.log")
        engine.close_input()
        async with asyncio.timeout(PATIENCE):
            assert [one async for one in engine.messages() if not isinstance(one, Alive)] == []
        await engine.kill()

    asyncio.run(work())
    assert "the engine ends with this process" in caplog.text


def test_another_base_or_environment_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_text("a")
    before = code_of(str(tmp_path))
    assert code_of(str(tmp_path)) == before
    (tmp_path / "weights").write_text("bc")
    after = code_of(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert len({before, after, code_of(str(tmp_path))}) == 3


# --- both -------------------------------------------------------------------------------------------------------------------

LONG = 8
JOBS = [
    tiny("first", LONG),
    tiny("second", LONG, algorithm={"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 1}),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes]]:
    """The adapters and metrics of the jobs when nothing happens to them."""
    directory = tmp_path_factory.mktemp("alone")
    weights = weights_of(run_alone(directory, *JOBS))
    return {name: (weights[name], (directory / name / "metrics.jsonl").read_bytes()) for name in weights}


def lines_of(service: Service, job: dict[str, Any]) -> int:
    metrics = service.directory / "run" / str(job["id"]) / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def assert_as_alone(service: Service, alone: dict[str, tuple[bytes, bytes]], *names: str) -> None:
    for name in names:
        assert service.ended(name) == "succeeded", service.job(name)["message"]
        assert service.steps(name) == list(range(LONG + 1)), "a step is told once, and none is missing"
        metrics = service.directory / "run" / str(service.job(name)["id"]) / "metrics.jsonl"
        assert (service.weights(name), metrics.read_bytes()) == alone[name]


def ask_in_database(service: Service, name: str, wanted: str) -> None:
    """As if the process had been killed after it wrote down what somebody asked, and before it passed it on."""
    with contextlib.closing(sqlite3.connect(service.directory / "motet.db")) as database:
        database.execute("UPDATE jobs SET wanted = ? WHERE name = ?", (wanted, name))
        database.commit()


@pytest.mark.slow
def test_jobs_go_on_while_no_service_is_there(tmp_path: Path, alone: dict[str, tuple[bytes, bytes]]) -> None:
    with contextlib.closing(Service(tmp_path / "served")) as service:
        service.start()
        first, _ = (service.submit(job) for job in JOBS)
        for name in ("regretted", "resting", "gone"):
            service.submit(tiny(name, LASTING))
            service.reaches(name, 1)
        service.steer("gone", "pause")
        service.becomes("gone", "paused")
        engine = service.engine()
        asked = {"model": "small", "prompt": "a", "max_tokens": 400, "stream": True}
        with httpx2.stream(
            "POST", f"{service.url}/v1/completions", json=asked, timeout=PATIENCE, trust_env=False
        ) as stream:
            next(stream.iter_lines())
            service.kill()
        ask_in_database(service, "regretted", "cancel")
        ask_in_database(service, "resting", "pause")
        ask_in_database(service, "gone", "run")
        before = lines_of(service, first)
        wait_until(lambda: lines_of(service, first) >= min(before + 2, LONG), 240)
        began = time.monotonic()
        service.start()
        print(f"ready after {time.monotonic() - began:.1f} s")
        assert service.engine() == engine, "the engine was started again"
        assert service.becomes("regretted", "cancelled")
        assert service.becomes("resting", "paused")
        service.until(lambda: service.states("gone")[-1] == "running")
        service.steer("gone", "cancel")
        assert_as_alone(service, alone, "first", "second")
        assert service.states("first") == ["queued", "running", "succeeded"]
        assert service.states("regretted") == ["queued", "running", "cancelled"]
        assert service.get("/metrics").is_success
        service.terminate()
        assert not service.engines()
        assert not list((service.directory / "engine").iterdir()), "a file of a process that is gone is left"


@pytest.mark.soak
def test_an_engine_of_another_configuration_is_started_again(
    tmp_path: Path, alone: dict[str, tuple[bytes, bytes]]
) -> None:
    """And one that nobody takes over in time saves and ends."""
    with contextlib.closing(Service(tmp_path / "served")) as service:
        config, given = service.directory / "engine.yaml", "engine: {samplers: 0, threads: 1%s}\ntakeover_seconds: %s\n"
        config.write_text(given % ("", 600))
        service.start()
        for job in JOBS:
            service.submit(job)
        service.reaches("first", 2)
        service.kill()
        (before,) = service.engines()
        config.write_text(given % (", slots: 3", 0.2))
        service.start()
        assert service.engine() != before
        assert "differs in engine, takeover_seconds" in (service.directory / "engine.log").read_text()
        assert not before.is_running()
        service.reaches("first", 4)
        service.kill()
        wait_until(lambda: not service.engines(), 240)
        assert "saves its jobs and ends" in (service.directory / "engine.log").read_text()
        service.start()
        assert_as_alone(service, alone, "first", "second")


@pytest.mark.soak
def test_each_of_several_hosts_keeps_its_jobs(tmp_path: Path, alone: dict[str, tuple[bytes, bytes]]) -> None:
    with contextlib.closing(Service(tmp_path / "served", "--hosts", "2")) as service:
        service.start()
        for job in JOBS:
            service.submit(job)
        for name in ("first", "second"):
            service.reaches(name, 2)
        service.until(lambda: service.get("/metrics").text.count("engine_ready") > 0)
        before = service.engines()
        assert len(before) == 2
        service.kill()
        service.start()
        assert_as_alone(service, alone, "first", "second")
        assert service.engines() == before
        assert service.process is not None
        for _ in range(2):  # the second Ctrl-C skips what the first one waits for
            service.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        service.process.wait(PATIENCE)
        assert not service.engines()
