"""Hosts whose rollouts come from servers: each has its own, and whichever had a job, its bytes are the same."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from motet.config import EngineConfig, HostConfig, RolloutConfig
from motet.config.service import Largest
from motet.core.errors import ConfigError
from motet.hosts.hosts import Hosts
from motet.hosts.launch import load
from motet.hosts.messages import StartHost
from motet.hosts.runs import none_can_start
from motet.hosts.servers import build_servers
from motet.hosts.starts import starts_of
from motet.rollout.in_vllm.motet_vllm import PREFIX
from motet.rollout.server import Demand
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.rundir import RunDirectory
from tests.support.base_servers import BaseServer, base_servers, stand_in
from tests.support.processes import ending
from tests.support.ray_nodes import cluster_of
from tests.support.service_run import Json, host_process, serving, tiny
from tests.support.tiny_models import base as tiny_base
from tests.support.waiting import PATIENCE, wait_until

ENGINE = {"threads": 1, "kernels": "torch"}  # the only ones that shards have
STEPS = 4
NAMES = [f"job-{number}" for number in range(4)]
HOSTS = pytest.mark.slow


def job(name: str) -> Json:
    return tiny(name, steps=STEPS, adapter={"rank": 2 + int(name[-1])}, optimizer={"lr": 1e-3}, checkpoint={"every": 1})


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[list[BaseServer]]:
    protocol = getattr(request, "param", "vllm")
    with base_servers(load("small", EngineConfig(threads=1, kernels="torch")), 3, protocol) as found:
        yield found


@pytest.fixture
def fresh(servers: list[BaseServer]) -> list[BaseServer]:
    for server in servers:
        server.loads.clear()
        server.paths.clear()
        server.unloads.clear()
        server.completions = 0
    return servers


def rollout(servers: list[BaseServer], place: Path) -> Json:
    settings = {"patience_seconds": 6.0, "directory": str(place)}
    return {"engine": servers[0].dialect if servers else "vllm", "urls": [one.url for one in servers], **settings}


class Run:
    """`motet run` of all jobs in a directory."""

    def __init__(
        self, place: Path, servers: list[BaseServer], launch: Json | None = None, by: Json | None = None,
        cluster: Json | None = None, **engine: int,
    ) -> None:  # fmt: skip
        """`by`: how versions come to the servers."""
        self.directory = place / "run"
        settings = {**rollout(servers, place / "served"), **(by or {})}
        if launch is not None:
            settings = {**settings, "urls": [], "launch": launch, "patience_seconds": 120.0}
        tree = {"base": "small", "engine": {**ENGINE, **engine}, "cluster": cluster or {}, "rollout": settings}
        place.mkdir(exist_ok=True)
        (place / "jobs.yaml").write_text(yaml.safe_dump({**tree, "jobs": [job(name) for name in NAMES]}))
        command = [sys.executable, "-m", "motet", "run", str(place / "jobs.yaml"), "--run", str(self.directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, PATIENCE, self.process)

    def ended(self) -> dict[str, bytes]:
        """Each job's last adapter."""
        with ending(self.process):
            out, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, out
        versions = (self.directory / name / "versions" / f"v{STEPS}" for name in NAMES)
        return {at.parts[-3]: (at / "adapter_model.safetensors").read_bytes() for at in versions}

    def steps(self, name: str) -> int:
        return max(JobDirectory(self.directory / name).steps(), default=0)


@pytest.fixture(scope="module")
def alone(servers: list[BaseServer], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Each job's adapter, trained by one process with one server."""
    return Run(tmp_path_factory.mktemp("alone") / "one", servers[:1]).ended()


def jobs_of(server: BaseServer) -> set[str]:
    return {name.partition(".")[0] for name in server.loads}


@pytest.mark.soak
@HOSTS
@pytest.mark.parametrize(
    ("servers", "way", "launcher"),
    [
        pytest.param("vllm", "tensors", "local", marks=pytest.mark.cell("publish by tensors", "hosts 2")),
        pytest.param("sglang", "files", "local", marks=pytest.mark.cell("hosts", "SGLang (fake)")),
        pytest.param("vllm", "files", "ray", marks=pytest.mark.cell("publish by files", "Ray")),
        pytest.param("vllm", "tensors", "ray", marks=pytest.mark.cell("publish by tensors", "Ray")),
    ],
    indirect=["servers"],
)  # fmt: skip
def test_each_host_has_servers_of_its_own(
    way: str, launcher: str, alone: dict[str, bytes], fresh: list[BaseServer], tmp_path: Path
) -> None:
    """Three servers for two hosts: a version comes to those of its host, whichever way, and nobody else unloads it."""
    place = f"{tmp_path / 'served'}/"
    by: Json = {}
    if way == "tensors":
        by, place = {"publish_by": way}, PREFIX
    with cluster_of(launcher) as cluster:
        assert Run(tmp_path, fresh, by=by, cluster=cluster, hosts=2, shard=1).ended() == alone
    first, second, third = map(jobs_of, fresh)
    assert first | third | second == set(NAMES)
    assert all(server.completions for server in fresh)
    assert (first | third) - second  # a job may move to the host that is ready first
    assert second - (first | third)
    for server in fresh:
        assert all(path.startswith(place) for path in server.paths), server.paths
        assert len(set(server.loads)) == len(server.loads), "a name was used twice"
        assert sorted(server.unloads) == sorted(server.loads), "each version is unloaded once"
        assert server.loaded == []
    assert not [*tmp_path.glob("served/*")], "files stayed"


@HOSTS
@pytest.mark.soak
@pytest.mark.cell("publish by files", "hosts 2")
def test_a_host_that_dies_or_whose_server_goes_loses_nothing(
    alone: dict[str, bytes], fresh: list[BaseServer], tmp_path: Path
) -> None:
    """Its jobs go on at the other one's server, from their last commits."""
    run = Run(tmp_path, fresh[:2], hosts=2)
    try:
        run.until(lambda: all(run.steps(name) >= 1 for name in NAMES))
        host_process(run.directory, 1).kill()
        run.until(lambda: max(run.steps(name) for name in NAMES) >= 2)
        fresh[0].go()
        assert run.ended() == alone
    finally:
        fresh[0].come_back()
        run.process.kill()
        run.process.wait()
    assert "no server of this host answers" in (run.directory / "engine.log").read_text()


@pytest.mark.soak
@HOSTS
def test_each_host_starts_servers_of_its_own(alone: dict[str, bytes], tmp_path: Path) -> None:
    """And they end with it."""
    run = Run(tmp_path, [], {"python": str(stand_in(tmp_path / "python", "torch"))}, hosts=2)
    run.until(lambda: all(run.steps(name) >= 1 for name in NAMES))
    below = psutil.Process(run.process.pid).children(recursive=True)
    started = [one for one in below if "tests.support.base_servers" in one.cmdline() and "-m" in one.cmdline()]
    dying = host_process(run.directory, 1)
    its = [one for one in dying.children(recursive=True) if one in started]
    dying.kill()
    assert len({tuple(one.cmdline()) for one in started}) == 2
    _, alive = psutil.wait_procs(its, timeout=PATIENCE)
    assert its
    assert alive == []
    assert run.ended() == alone
    assert {path.name for path in run.directory.glob("*server*")} == {"host-0-server-0.log", "host-1-server-0.log"}
    _, alive = psutil.wait_procs(started, timeout=PATIENCE)
    assert alive == []


def test_servers_are_shared_out() -> None:
    """To each host its URLs, and devices for what it starts."""
    start = StartHost("small", "", {}, {}, {}, [], 1.0, Largest())
    engine = EngineConfig(hosts=2, threads=1)

    def made(**servers: Any) -> list[StartHost]:
        rollout = RolloutConfig(engine="vllm", **servers)
        return starts_of((start, HostConfig(base="small", engine=engine, rollout=rollout)))

    urls = [f"http://s{n}" for n in range(3)]
    found = made(urls=urls)
    assert [one.rollout["urls"] for one in found] == [["http://s0", "http://s2"], ["http://s1"]]
    assert [one.host for one in found] == [0, 1]
    assert {one.engine["kv_memory_fraction"] for one in found} == {EngineConfig().kv_memory_fraction}
    launch = {"replicas": 2, "devices": ["0", "1", "2", "3"]}
    found = made(launch=launch)
    assert [one.rollout["launch"]["devices"][:2] for one in found] == [["0", "1"], ["2", "3"]]
    with pytest.raises(ConfigError, match=r"each host needs its.*or set hosts to 1"):
        made(urls=urls[:1])


def test_hosts_of_one_machine_write_versions_apart(tmp_path: Path) -> None:
    """Each removes what an attempt of its own has left, and nothing of another's."""
    config = RolloutConfig(engine="vllm", urls=["http://127.0.0.1:9"], directory=str(tmp_path))
    files = []
    for part in ("host-0", "host-1", ""):
        with contextlib.closing(RunDirectory(tmp_path / "run" / part, part)) as run:
            build_servers(tiny_base("llama").info, config, Demand(1, 2, 8), "run", run.path, run.part)
        files.append(sorted(path.name for path in tmp_path.glob("motet-*")))
        for path in tmp_path.glob("motet-*"):
            (path / "version").mkdir(exist_ok=True)
    assert files[-1] == ["motet-run", "motet-run-host-0", "motet-run-host-1"]
    build_servers(tiny_base("llama").info, config, Demand(1, 2, 8), "run", tmp_path, "host-1")
    assert sorted(path.parent.name for path in tmp_path.glob("*/version")) == ["motet-run", "motet-run-host-0"]


def test_a_key_with_odd_letters_is_refused_before_servers_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD_KEY", "k\u00e9y")
    config = RolloutConfig(engine="vllm", urls=["http://127.0.0.1:9"], directory=str(tmp_path), api_key_env="ODD_KEY")
    with pytest.raises(ConfigError, match="ODD_KEY, which holds no key"):
        build_servers(tiny_base("llama").info, config, Demand(1, 2, 8), "run", tmp_path)


def test_a_run_ends_only_when_no_host_can_start(tmp_path: Path) -> None:
    """One that failed is tried again while another is on its way."""
    start = StartHost("small", "", {}, {}, {}, [], 1.0, Largest())
    client = Hosts([start, start], tmp_path)
    client.hosts[0].hopeless = True
    assert not none_can_start(client.hosts)
    client.hosts[1].hopeless = True
    assert none_can_start(client.hosts)


@HOSTS
@pytest.mark.soak
def test_a_service_with_hosts_in_shards_answers_from_their_servers(
    alone: dict[str, bytes], fresh: list[BaseServer], tmp_path: Path
) -> None:
    """No process has the whole base, and people talk to what was trained."""
    tree = {"engine": {**ENGINE, "hosts": 2, "shard": 2}, "rollout": rollout(fresh[:2], tmp_path / "served")}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(tree))
    with serving(tmp_path / "service", "--config", str(tmp_path / "hosts.yaml")) as service:
        for name in NAMES[:2]:
            service.submit(job(name))
        for name in NAMES[:2]:
            assert service.ended(name) == "succeeded", service.job(name)["message"]
            assert service.weights(name) == alone[name]
        assert all(server.loads for server in fresh[:2])
        asked = [server.completions for server in fresh[:2]]
        said = {"prompt": "Sort the letters: cab\n", "max_tokens": 8, "temperature": 0, "logprobs": 0}
        for model in ("small", "job-1"):
            answer = service.ask("POST", "/v1/completions", json={**said, "model": model})
            assert answer["choices"][0]["logprobs"]["token_logprobs"]
        assert sum(server.completions for server in fresh[:2]) == sum(asked) + 2
        service.terminate()
    for server in fresh:
        assert [name for name in server.loaded if not name.startswith("stored.")] == []
