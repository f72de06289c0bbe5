"""Jobs on several hosts: whichever host has a job, whatever dies, the bytes are those of one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import motet
from motet.config import AdapterConfig
from motet.config.jobfile import validate
from motet.core.errors import EngineError
from motet.core.types import JobState
from motet.hosts.host_link import HostChild, Launch
from motet.hosts.listener import ADDRESS, TOKEN, host_that_connects
from motet.hosts.messages import HostReady, StartHost
from motet.hosts.nodes import NodeFacts, faults
from motet.hosts.reports import EveryStep
from motet.hosts.running import run_config
from motet.hosts.runs import HostedRun, follow
from motet.process.channel import encode
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.directory_checks import open_job
from motet.runtime.interrupt import Interrupt
from motet.runtime.progress import JobChanged, JobEvent, JobProgress, JobStanding, JobStepped
from motet.runtime.rundir import RunDirectory
from tests.support.adapter_files import run_alone, weights_of
from tests.support.fake_trainer import FakeTrainer
from tests.support.ray_nodes import cluster_of
from tests.support.service_run import LASTING, Json, Service, host_process, serving, tiny
from tests.support.waiting import PATIENCE, wait_until

ENGINE = {"samplers": 0, "threads": 1}
NAMES = [f"job-{number}" for number in range(4)]


def job(name: str, steps: int = 6) -> Json:
    """Of some seconds, with a rank of its own."""
    return tiny(name, steps=steps, adapter={"rank": 2 + int(name[-1])}, optimizer={"lr": 1e-3})


MOVED = [job(name, steps=30) for name in ("job-4", "job-6")]
"""Those that are still under way when one of them is moved."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Each job's adapter, trained by one process."""
    return weights_of(run_alone(tmp_path_factory.mktemp("alone"), *map(job, NAMES), *MOVED))


SOON = pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=pytest.mark.soak)], indirect=True)
LATER = pytest.mark.parametrize("cluster", ["local", "ray"], indirect=True)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Json]:
    """Where hosts are: two processes of this machine, or one on each of two nodes of a Ray cluster."""
    with cluster_of(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cluster: Json) -> Iterator[Service]:
    """A service with two hosts."""
    config = tmp_path_factory.mktemp("hosts") / "hosts.yaml"
    config.write_text(yaml.safe_dump({"engine": {**ENGINE, "hosts": 2}, "cluster": cluster}))
    with serving(config.parent / "service", "--config", str(config)) as found:
        yield found


def kill_host(run: Path, number: int, cluster: Json) -> None:
    """As the system does that has no memory left."""
    process = host_process(run, number)
    assert any("raylet" in one.name() for one in process.parents()) == (cluster["launcher"] == "ray")
    process.kill()


def hosts_of(service: Service) -> dict[str, int]:
    """Which host has each job that runs."""
    jobs: list[Any] = [service.job(name) for name in NAMES]
    return {one["name"]: one["progress"]["host"] for one in jobs if one["progress"] is not None}


def metric(service: Service, name: str) -> dict[str, float]:
    """A figure of each host."""
    found = re.findall(rf'^{name}\{{host="(\d+)"\}} (\S+)$', service.get("/metrics").text, re.M)
    return {host: float(value) for host, value in found}


@pytest.mark.cell("single turn", "hosts 2")
def test_a_run_goes_on_after_a_host_was_killed(tmp_path: Path, alone: dict[str, bytes]) -> None:
    ended = threading.Event()

    def kill() -> bool:
        while not all(steps(tmp_path / name) for name in NAMES):
            if ended.wait(0.02):
                return False
        kill_host(tmp_path, 1, {"launcher": "local"})
        if not ended.wait(PATIENCE):
            os.kill(os.getpid(), signal.SIGINT)  # or its jobs would wait for ever
        return True

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        try:
            jobs, engine = [job(name) for name in NAMES], {**ENGINE, "hosts": 2}
            jobs.append({**job("job-5"), "stop_when": {"held_out_above": -1}})
            run = motet.run(jobs, base="small", directory=tmp_path, engine=engine, quiet=True)
        except KeyboardInterrupt:
            pytest.fail("jobs of the host that was killed wait for ever")
        finally:
            ended.set()
    assert killed.result(), "it ended before a host was killed"
    enough = run.jobs.pop("job-5")
    assert (enough.state, len(enough.rewards)) == ("succeeded", 1)
    assert enough.message.startswith("stopped early after step 1: ")
    for name, one in run.jobs.items():
        assert one.state == "succeeded", one.message
        assert (one.adapter / "adapter_model.safetensors").read_bytes() == alone[name]


@pytest.mark.soak
def test_hosts_that_share_the_threads_say_so_and_have_the_bytes_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has two threads, each of two hosts one: on the small base they make the same bytes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    jobs, found, said = [job(name) for name in NAMES[:2]], [], list[str]()
    for n_hosts in (1, 2):
        tree = {"base": "small", "run": str(tmp_path / str(n_hosts)), "engine": {"hosts": n_hosts}, "jobs": jobs}
        result = run_config(validate(tree, "the test"), notify=said.append)
        assert result.ok
        found.append(weights_of(result))
    assert found[0] == found[1]
    assert [line for line in said if "each of 2 hosts computes with 1 of 2 threads" in line]


@pytest.mark.cell("single turn, hosts", "Ray")
@pytest.mark.soak
@LATER
def test_a_run_goes_on_after_a_host_and_then_the_run_itself_was_killed(
    tmp_path: Path, cluster: Json, alone: dict[str, bytes]
) -> None:
    """It comes before the tests of a service, which has the cores of the Ray cluster to its end."""
    (tmp_path / "jobs.yaml").write_text(
        yaml.safe_dump(
            {
                "base": "small",
                "engine": {**ENGINE, "hosts": 2},
                "cluster": cluster,
                "jobs": [job(name) for name in NAMES],
            }
        )
    )
    command = [sys.executable, "-m", "motet", "run", str(tmp_path / "jobs.yaml"), "--run", str(tmp_path / "run")]
    with (tmp_path / "out").open("ab") as out:
        first = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_until(lambda: all(steps(tmp_path / "run" / name) for name in NAMES), PATIENCE, first)
        kill_host(tmp_path / "run", 1, cluster)
        wait_until(lambda: max(max(steps(tmp_path / "run" / name)) for name in NAMES) >= 3, PATIENCE, first)
    finally:
        first.kill()
        first.wait()
    assert subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE).returncode == 0
    for name in NAMES:
        assert (tmp_path / "run" / name / "versions" / "v6" / "adapter_model.safetensors").read_bytes() == alone[name]


@pytest.mark.soak
@LATER
def test_a_host_that_dies_loses_nothing_and_the_others_do_not_notice(
    service: Service, cluster: Json, alone: dict[str, bytes]
) -> None:
    for name in NAMES:
        service.submit(job(name))
    service.until(lambda: len(hosts_of(service)) == len(NAMES))
    where = hosts_of(service)
    assert sorted(where.values()) == [0, 0, 1, 1]
    service.reaches(next(name for name in NAMES if where[name] == 1), 1)
    kill_host(service.directory / "run", 1, cluster)
    for name in NAMES:
        assert service.ended(name) == "succeeded", service.job(name)["message"]
        assert service.weights(name) == alone[name]
        assert service.steps(name) == [0, 1, 2, 3, 4, 5, 6][: len(service.steps(name))]
    for name in NAMES:
        if where[name] == 0:
            assert service.states(name).count("running") == 1
    service.until(lambda: metric(service, "motet_engine_starts") == {"0": 1.0, "1": 2.0})
    service.until(lambda: metric(service, "motet_engine_ready") == {"0": 1.0, "1": 1.0})
    assert metric(service, "motet_device_train_seconds").keys() == {"0", "1"}
    for name in NAMES:
        service.ask("DELETE", f"/v1/jobs/{name}")


@SOON
def test_jobs_wait_for_their_tenants_limit_and_move_to_where_there_is_room(
    service: Service, alone: dict[str, bytes]
) -> None:
    service.ask("PUT", "/v1/tenants/local/limits", json={"running_jobs": 3})
    for name in ("one", "two", "three", "four"):
        service.submit(tiny(name, LASTING))
    for name in ("one", "two", "three"):
        service.becomes(name, "running")
    assert service.job("four")["state"] == "queued", "its tenant has three out, over both hosts"
    service.steer("one", "pause")
    service.becomes("four", "running")
    service.steer("one", "resume")
    time.sleep(0.7)
    assert service.job("one")["state"] == "paused", "others have its tenant's places"
    service.steer("four", "cancel")
    service.becomes("one", "running")
    for name in ("one", "two", "three"):
        service.steer(name, "cancel")
        service.becomes(name, "cancelled")

    stays, moves = MOVED
    for one in (stays, tiny("long", LASTING), moves):
        service.submit(one)
        service.becomes(one["name"], "running")
    service.steer("long", "cancel")  # one host has nothing to do now, and the other one two jobs
    for one in MOVED:
        assert service.ended(one["name"]) == "succeeded"
        assert service.weights(one["name"]) == alone[one["name"]]
        assert service.steps(one["name"]) == list(range(31))
    assert [service.states(one["name"]).count("running") for one in MOVED] == [1, 2]
    assert "paused" not in service.states(moves["name"])


def steps(directory: Path) -> list[int]:
    """The steps that a job has committed."""
    return JobDirectory(directory).steps()


class Cable:
    """Between a host and whoever started it: what goes through waits while it is cut."""

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self.whole.set()

    async def lay(self, address: str) -> str:
        """Lead to an address of this machine; gives that of the other end, which one process can use."""
        host, _, port = address.rpartition(":")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.close()
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            try:
                with contextlib.suppress(ConnectionError):
                    await asyncio.gather(self._flow(reader, far_writer), self._flow(far_reader, writer))
                await self.whole.wait()  # before that nobody hears that the other end was closed
            finally:
                for end in (writer, far_writer):
                    end.transport.abort()

        server = await asyncio.start_server(carry, host, 0)
        return f"{host}:{server.sockets[0].getsockname()[1]}"

    async def _flow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(2**16):
            await self.whole.wait()
            writer.write(part)
        await self.whole.wait()
        writer.close()


def run_all(
    path: Path, launch: Launch, observe: Callable[[Sequence[JobProgress]], None], alone: dict[str, bytes]
) -> None:
    """All jobs on two hosts, with the bytes that each has alone."""
    engine = {**ENGINE, "hosts": 2}
    tree = {"base": "small", "run": str(path), "engine": engine, "jobs": [job(name) for name in NAMES]}
    config = validate(tree, "the test")
    with contextlib.closing(RunDirectory(path, "run")) as directory:
        run, interrupt = HostedRun(config, directory, None, launch=launch), Interrupt()
        interrupt.run(lambda: follow(run, interrupt, observe))
    for one in run.progress():
        assert one.state is JobState.SUCCEEDED, one.message
        assert one.next_line == 7
        assert (path / one.name / "versions/v6/adapter_model.safetensors").read_bytes() == alone[one.name]


@pytest.mark.soak
def test_a_network_that_is_away_for_half_a_minute_changes_nothing(tmp_path: Path, alone: dict[str, bytes]) -> None:
    cable, cut, starts = Cable(), asyncio.Event(), list[Path]()

    async def launch(start: StartHost, log: Path) -> HostChild:
        async def begin(address: str, token: str) -> Awaitable[int]:
            settings = {**os.environ, ADDRESS: await cable.lay(address), TOKEN: token}
            started.append(await asyncio.create_subprocess_exec(sys.executable, "-m", "motet.hosts", env=settings))
            return started[0].wait()

        async def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                started[0].kill()
            await started[0].wait()

        started: list[asyncio.subprocess.Process] = []
        starts.append(log)
        return await host_that_connects("127.0.0.1", begin, end)

    def observe(jobs: Sequence[JobProgress]) -> None:
        if any(one.step for one in jobs) and not cut.is_set():
            cut.set()
            cable.whole.clear()
            asyncio.get_running_loop().call_later(30.0, cable.whole.set)

    run_all(tmp_path, launch, observe, alone)
    assert cut.is_set()
    assert sorted(path.name for path in starts) == ["engine-1.log", "engine.log"], "nothing was started again"


def process_of_host(settings: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", "motet.hosts"], env=settings, stderr=out)


@pytest.mark.soak
def test_a_host_that_is_cut_off_for_good_writes_nothing_more(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """It trains on, unseen, while the other host has its jobs."""
    started, cut = list[subprocess.Popen[bytes]](), asyncio.Event()

    async def launch(start: StartHost, log: Path) -> HostChild:
        async def begin(address: str, token: str) -> Awaitable[object]:
            cable = Cable()
            settings = {**os.environ, ADDRESS: await cable.lay(address), TOKEN: token}
            started.append(process_of_host(settings, log))
            return asyncio.ensure_future(lost(cable, first=len(started) == 1))

        async def lost(cable: Cable, *, first: bool) -> None:
            """What is noticed: not that a process ends, but that the cable of the second one is cut."""
            await (asyncio.Event() if first else cut).wait()
            cable.whole.clear()

        async def end() -> None:
            """Nobody reaches it."""

        if len(started) > 1:
            raise EngineError("there is no other node")
        return await host_that_connects("127.0.0.1", begin, end)

    def observe(jobs: Sequence[JobProgress]) -> None:
        if all(one.step for one in jobs):
            cut.set()

    try:
        run_all(tmp_path, launch, observe, alone)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert cut.is_set()
    for name in NAMES:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 7, "the one that was cut off wrote none of its own"


def test_a_step_that_another_host_committed_late_comes_before_the_next(tmp_path: Path) -> None:
    """A host that is cut off may commit once more after the next one has looked at what there is to send."""
    directory, trainer = JobDirectory(tmp_path / "a"), FakeTrainer()
    open_job(directory, {})
    trainer.add_adapter("a", AdapterConfig(rank=2), seed=0)

    def step(number: int) -> Json:
        directory.append(directory.metrics, {"step": number})
        directory.append(directory.timings, {"step": number, "tokens_sampled": 1, "tokens_trained": 1})
        directory.commit(Committed(step=number + 1), lambda path: trainer.save_adapter("a", path, optimizer=True))
        return {"step": number, "seconds": 1}

    heard = list[int | str]()

    def observe(event: JobEvent) -> None:
        heard.append(event.line["step"] if isinstance(event, JobStepped) else type(event).__name__)

    step(0)
    step(1)
    every = EveryStep(directory, 1, observe)
    assert heard == [1]
    step(2)
    every(JobChanged("a", JobState.RUNNING, ""))
    every(JobStepped("a", step(3)))
    every(JobStepped("a", step(4)))
    assert heard == [1, "JobChanged", 2, 3, 4]


@pytest.mark.soak
@pytest.mark.parametrize("cluster", ["ray"], indirect=True)
def test_the_doctor_looks_at_all_nodes(tmp_path: Path, cluster: Json) -> None:
    command = [sys.executable, "-m", "motet", "doctor", "--ray", cluster["address"], "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"GiB free .* \d+ ms", done.stdout)) == 2, done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_nodes_is_told_with_what_to_do() -> None:
    node = NodeFacts("10.0.0.1", ("1", "2", "3"), "10.0.0.1", 8, 2**30, sees=True, free_disk=2**30, gloo=0.01)
    assert faults([node, replace(node, address="10.0.0.2", project=False)], Path("/shared")) == []
    other = replace(
        node, address="10.0.0.2", versions=("1", "2", "4"), name_means="127.0.1.1", sees=False, gloo="timed out"
    )
    versions, shared, gloo = faults([node, other], Path("/shared"))
    lacks = replace(node, address="10.0.0.2", gpus=2, project=False)
    mounts = replace(lacks, address="10.0.0.3", gpus=0, same=frozenset({"/p/data"}))
    bare, idle = faults([node, lacks, mounts], Path("/shared"), {frozenset(): "/p is large"})
    assert bare == "10.0.0.2 does not see where hosts look for own code and data: /p is large"
    assert idle.startswith("10.0.0.2 has GPUs that Ray does not give out: set --num-gpus")
    assert "install the same everywhere" in versions
    assert shared.startswith("10.0.0.2 does not see /shared: mount")
    assert gloo.startswith(
        "10.0.0.2 does not reach the others by gloo (the name of 10.0.0.2 means itself alone or nothing: set GLOO_"
    )


def test_a_stranger_who_connects_is_no_host() -> None:
    async def connect() -> list[HostReady]:
        async def begin(address: str, token: str) -> Awaitable[object]:
            host, _, port = address.rpartition(":")
            for first, note in (("0" * len(token), "stranger"), (token, "host")):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{first}\n".encode() + encode(HostReady([note])))
                await asyncio.sleep(0.1)
                writers.append(writer)
            return ended.wait()

        async def end() -> None:
            ended.set()

        writers, ended = list[asyncio.StreamWriter](), asyncio.Event()
        engine = await host_that_connects("127.0.0.1", begin, end)
        message = await anext(engine.messages())
        await engine.kill()
        for writer in writers:
            writer.close()
        assert isinstance(message, HostReady)
        return [message]

    assert [one.notes for one in asyncio.run(connect())] == [["host"]]


def test_a_step_that_is_told_again_counts_once() -> None:
    one = JobProgress("job-0", 6)
    for step in (0, 1, 1, 0, 2):
        one.hear(JobStepped("job-0", {"step": step, "loss": 0.1, "reward": step / 4}))
    assert (one.rewards, one.step) == ([0.0, 0.25, 0.5], 3)
    for told, counted in (((5, 9), 9), ((2,), 11)):
        one.hear(JobChanged("job-0", JobState.RUNNING, ""))  # the second time on another host, which begins anew
        for tokens in told:
            one.see(JobStanding("sampling", 0, 0, 1, tokens, 0.0, None))
        assert one.tokens == counted
