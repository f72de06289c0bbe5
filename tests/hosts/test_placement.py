"""Which host a job goes to, and which job moves: laws of the policy."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import motet
from motet.config import ClusterConfig, EngineConfig, HostConfig, LaunchConfig, RolloutConfig, budgets
from motet.config.service import ANY_SIZE
from motet.core.errors import ConfigError
from motet.core.types import Problem
from motet.hosts.messages import StartHost
from motet.hosts.placement import HostLoad, moved, placed, speeds
from motet.hosts.ray_hosts import cores_and_gpus
from motet.hosts.starts import devices_of_servers, engine_of_host, launcher, starts_of, unlike_one_process
from motet.kernels.cpu.choice import Choice
from motet.rollout.server_process import free_port
from motet.runtime.slots import Claim, Rule
from motet.training.sharded.messages import Join
from tests.support.waiting import PATIENCE

TENANTS = ("", "ann", "ben")
Drawn = tuple[int, list[list[str]]]
hosts_with_jobs = st.tuples(
    st.integers(1, 4), st.lists(st.lists(st.sampled_from(TENANTS), max_size=9), min_size=1, max_size=5)
)  # fmt: skip


def loads(drawn: Drawn) -> list[HostLoad]:
    """Hosts with jobs of these tenants, which run as far as there are slots."""
    slots, tenants = drawn
    hosts = []
    for host, jobs in enumerate(tenants):
        claims = tuple(Claim(f"{host}-{number}", tenant) for number, tenant in enumerate(jobs))
        hosts.append(HostLoad(host, slots, claims[:slots], claims[slots:]))
    return hosts


@given(hosts_with_jobs, st.sampled_from(TENANTS))
def test_a_job_goes_to_the_emptiest_host_and_there_to_the_fewest_of_its_tenant(drawn: Drawn, tenant: str) -> None:
    hosts = loads(drawn)
    number = placed(Claim("new", tenant), hosts, {})
    assert number is not None
    chosen = hosts[number]
    assert all(chosen.fullness <= host.fullness for host in hosts)
    as_empty = [host for host in hosts if host.fullness == chosen.fullness]
    assert all(chosen.tenants[tenant] <= host.tenants[tenant] for host in as_empty)


@given(hosts_with_jobs, st.integers(1, 6))
def test_a_tenant_has_no_more_jobs_out_than_may_run(drawn: Drawn, limit: int) -> None:
    hosts, rules = loads(drawn), {"ann": Rule(running=limit)}
    out = sum(host.tenants["ann"] for host in hosts)
    assert (placed(Claim("new", "ann"), hosts, rules) is None) == (out >= limit)
    assert placed(Claim("new", "ben"), hosts, rules) is not None


def test_free_slots_come_first_and_then_the_fastest_for_its_jobs() -> None:
    jobs = [Claim(f"{number}") for number in range(8)]
    fast, slow = HostLoad(0, 4, tuple(jobs[:2]), speed=1.0), HostLoad(1, 4, tuple(jobs[2:4]), speed=0.5)
    assert placed(Claim("new"), [slow, fast], {}) == 0
    assert placed(Claim("new"), [slow, replace(fast, running=tuple(jobs[:4]))], {}) == 1  # though it is as full
    critics = replace(fast, running=(Claim("critic", slots=3),))  # three adapters, so one slot is free
    assert placed(Claim("new", slots=2), [slow, critics], {}) == 1
    assert moved([HostLoad(0, 4, tuple(jobs[:4])), HostLoad(1, 4, speed=0.5)]) == ("3", 0, 1)
    assert moved([HostLoad(0, 4, tuple(jobs[:3])), HostLoad(1, 4, tuple(jobs[3:4]), speed=0.5)]) is None
    # no slot there
    assert moved([HostLoad(0, 4, tuple(jobs[:4]), speed=0.25), HostLoad(1, 2, tuple(jobs[4:6]))]) is None


@given(st.lists(st.floats(100, 10_000), min_size=1, max_size=6))
def test_speeds_that_are_near_each_other_count_as_alike(measured: list[float]) -> None:
    relative = speeds({number: (f"device {number}", one) for number, one in enumerate(measured)})
    assert max(relative.values()) == 1.0
    for number, one in enumerate(measured):
        assert relative[number] / 1.5 < one / max(measured) < relative[number] * 1.5
    assert speeds({0: ("cpu", 0.0), 1: ("card", 500.0)}) == {0: 1.0, 1: 1.0}
    assert speeds({0: ("card", 500.0), 1: ("card", 100.0), 2: ("cpu", 100.0)}) == {0: 1.0, 1: 1.0, 2: 0.25}
    assert speeds({}) == {}


def test_no_host_takes_no_job() -> None:
    assert placed(Claim("new"), [], {}) is None


def test_hosts_share_the_cores_and_the_memory_unless_each_has_a_device() -> None:
    whole = EngineConfig(hosts=2, kv_memory_fraction=0.4, device="cpu")
    first, second = engine_of_host(whole, 0), engine_of_host(whole, 1)
    assert first == second
    assert (first.hosts, first.threads, first.kv_memory_fraction) == (1, max(1, budgets.cores() // 2), 0.2)
    assert engine_of_host(whole.model_copy(update={"threads": 3}), 0).threads == 3
    assert engine_of_host(whole.model_copy(update={"shard": 64}), 0).threads == 1
    apart = whole.model_copy(update={"devices": ["cuda:0", "cuda:1"]})
    assert [engine_of_host(apart, host).device for host in range(2)] == ["cuda:0", "cuda:1"]
    assert engine_of_host(apart, 1).kv_memory_fraction == 0.4
    assert {engine_of_host(one, 1).host_kv_memory_fraction for one in (whole, apart)} == {0.05}, (
        "the machine's is shared"
    )


launches = st.builds(
    lambda devices, replicas: LaunchConfig(devices=devices, replicas=replicas),
    st.lists(st.sampled_from("01234"), min_size=1, max_size=5, unique=True),
    st.integers(1, 7),
)


@given(st.lists(launches, min_size=1, max_size=5))
def test_servers_take_the_devices_that_have_the_fewest(hosts: list[LaunchConfig]) -> None:
    servers: Counter[str] = Counter()
    made = zip(hosts, devices_of_servers(hosts), strict=True)
    for launch, own in sorted(made, key=lambda one: len(one[0].devices)):
        assert len(own) == launch.replicas
        for device in own:
            assert device in launch.devices
            assert servers[device] == min(servers[other] for other in launch.devices)
            servers[device] += 1

    def laid(*lists: list[str], replicas: int = 1) -> list[list[str]]:
        return devices_of_servers([LaunchConfig(devices=devices, replicas=replicas) for devices in lists])

    assert laid(["0", "1"], ["0", "1", "2"], ["1", "2"]) == [["0"], ["2"], ["1"]]
    assert laid(["0", "1", "2"], ["0", "1"], ["0"]) == [["2"], ["1"], ["0"]], "who has the least choice chooses first"
    assert laid(["0,1", "2,3"], ["1", "4"], ["0, 1", "2, 3"]) == [["0,1"], ["4"], ["2, 3"]]
    assert laid(["0", "1"], ["0", "1"], ["2"], ["0,1", "2,3"]) == [["0"], ["1"], ["2"], ["2,3"]]
    assert devices_of_servers([None, LaunchConfig(replicas=3), LaunchConfig(devices=["0"])]) == [[], [], ["0"]]
    for listed in (["0", "1", "2"], ["0", "0", "1"], ["0,1", "1,2", "0"]):
        in_turn = [place for own in laid(*[listed] * 5, replicas=2) for place in own]
        assert in_turn == [listed[number % 3] for number in range(10)], "equal lists are gone through in turn"


def test_hosts_that_cannot_work_are_refused() -> None:
    start = StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)
    rollout = RolloutConfig(engine="vllm", urls=["http://127.0.0.1:1"])
    one_server = HostConfig(base="small", engine=EngineConfig(hosts=2), rollout=rollout)
    with pytest.raises(ConfigError, match=r"each host needs its.*or set hosts to 1"):
        starts_of((start, one_server))
    with pytest.raises(ConfigError, match=r"set engine\.threads"):
        launcher(ClusterConfig(launcher="ray"), HostConfig(base="small"))
    (with_ranks,) = starts_of((start, HostConfig(base="small", engine=EngineConfig(threads=2, shard=3))))
    assert cores_and_gpus(with_ranks) == (6, 0)


def test_what_hosts_do_otherwise_than_one_process_is_told() -> None:
    local, ray = ClusterConfig(), ClusterConfig(launcher="ray")

    def told(cluster: ClusterConfig, *engines: EngineConfig, gpus: int = 0) -> list[str]:
        return unlike_one_process(cluster, engines, cores=8, gpus=gpus)

    (threads,) = told(local, EngineConfig(hosts=4))
    assert threads.startswith("each of 4 hosts computes with 2 of 8 threads: a job's bytes may differ")
    assert not told(local, EngineConfig(hosts=4, threads=2))
    assert not told(local, EngineConfig())
    assert not told(local, EngineConfig(hosts=4), gpus=4), "these do not compute on the processor"
    assert not told(local, EngineConfig(hosts=4, shard=2), gpus=8)
    assert not told(ray, EngineConfig(hosts=2, threads=2))


def test_gpus_that_are_left_idle_are_told() -> None:
    def told(gpus: int, device: str = "cpu", **engine: Any) -> list[str]:
        config = HostConfig(base="small", engine=EngineConfig(**engine), rollout=servers)
        return budgets.idle_gpus(config, device, gpus)

    servers = RolloutConfig()
    (cpus,) = told(2, ranks=2)
    assert cpus.startswith("the CPU trains, because torch sees no GPU, and this machine has 2 GPUs: install torch with")
    assert not told(2, device="cuda")
    assert not told(0)
    servers = RolloutConfig(engine="vllm", launch=LaunchConfig())
    config = HostConfig(base="small", engine=EngineConfig(device="cpu"), rollout=servers)
    (served,) = budgets.idle_gpus(config, "cpu", 1)
    assert served.startswith("servers start with settings for a CPU, and this machine has 1 GPU: name some in rollout.")


def test_ray_gives_gpus_to_hosts_whose_device_is_auto(caplog: pytest.LogCaptureFixture) -> None:
    start = StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)

    def asked(gpus: list[int], **engine: Any) -> int:
        (one,) = starts_of((start, HostConfig(base="small", engine=EngineConfig(threads=1, **engine))))
        return cores_and_gpus(one, gpus)[1]

    assert (asked([]), asked([0, 0]), asked([0, 1])) == (0, 0, 1)
    assert (asked([1, 4], ranks=4, shard=2), asked([8], device="cpu"), asked([], device="cuda", shard=2)) == (4, 0, 2)
    assert not caplog.records
    assert asked([1, 2], ranks=4) == 0
    assert "CPUs train host 0: engine.device is auto, each host has 4 ranks, and no GPUs are left for it" in caplog.text
    several = starts_of((start, HostConfig(base="small", engine=EngineConfig(threads=1, hosts=3, ranks=2))))
    assert [cores_and_gpus(one, [2, 3])[1] for one in several] == [2, 2, 0], "the third would wait for ever"


def test_no_host_of_several_changes_its_kernels_alone() -> None:
    start = StartHost("small", "", {}, {}, {}, [], 1.0, ANY_SIZE, own=Choice("native"))
    for hosts, kept in ((1, False), (2, True)):
        made = starts_of((start, HostConfig(base="small", engine=EngineConfig(threads=1, hosts=hosts))))
        assert [one.own for one in made] == [Choice("native", kept=kept)] * hosts
    assert Join.of("small", EngineConfig(ranks=2), Choice("native")).own == Choice("native", kept=True)


def test_ranks_share_the_cores_and_commits_say_so() -> None:
    assert Join.of("small", EngineConfig(ranks=2)).config.threads == budgets.threads_of(EngineConfig(ranks=2))
    assert budgets.threads_of(EngineConfig(ranks=2)) == max(1, budgets.cores() // 2)
    assert budgets.threads_of(EngineConfig(ranks=2, threads=3)) == 3


def reward(problem: Problem, completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"reward": reward}, "its reward is a function of this process, .* name a file"),
        ({"data": [{"prompt": "1 + 1 =", "answer": "2"}]}, "its rows are of this process, .* name a file"),
    ],
)
def test_what_only_this_process_has_is_refused_with_hosts(own: dict[str, Any], words: str, tmp_path: Path) -> None:
    job = {"name": "own", "data": "toy:add", "reward": "exact", **own}
    with pytest.raises(ConfigError, match=f"job own: {words}.*, or set engine.hosts to 1"):
        motet.run([job], base="small", directory=tmp_path, engine={"hosts": 2, "threads": 1}, quiet=True)


@given(hosts_with_jobs)
def test_moves_end_with_hosts_as_even_as_they_can_be(drawn: Drawn) -> None:
    hosts, most = loads(drawn), sum(map(len, drawn[1])) + 1
    for _ in range(most):
        move = moved(hosts)
        if move is None:
            break
        name = move.job
        source = next(host for host in hosts if any(claim.job == name for claim in host.jobs))
        waits = {claim.job for claim in source.waiting}
        assert name in waits or not waits, "one that waits costs nothing"
        claim = next(claim for claim in source.jobs if claim.job == name)
        fullest = max(host.fullness for host in hosts)
        assert source.fullness == fullest
        kept = [
            replace(
                host,
                running=tuple(one for one in host.running if one != claim),
                waiting=tuple(one for one in host.waiting if one != claim),
            )
            for host in hosts
        ]
        to = placed(claim, kept, {})
        assert to not in (None, source.host), "it would come back"
        assert source.host == move.source
        assert hosts[move.to].fullness == min(host.fullness for host in hosts)
        hosts = [replace(host, waiting=(*host.waiting, claim)) if host.host == to else host for host in kept]
        assert max(host.fullness for host in hosts) <= fullest
    else:
        raise AssertionError("jobs move for ever")
    counts = [len(host.jobs) for host in hosts]
    assert max(counts) - min(counts) <= 1


def test_moves_that_are_under_way_count_where_they_go() -> None:
    """Several jobs may be asked to move at once: none too many, and none that is on its way is asked again."""
    jobs = tuple(Claim(f"{number}") for number in range(6))
    assert moved([HostLoad(0, 4, jobs), HostLoad(1, 4)]) == ("5", 0, 1)
    assert moved([HostLoad(0, 4, jobs[:4]), HostLoad(1, 4, coming=jobs[4:])]) == ("3", 0, 1)
    assert moved([HostLoad(0, 4, jobs[:3]), HostLoad(1, 4, coming=jobs[3:])]) is None
    assert moved([HostLoad(0, 4), HostLoad(1, 4, coming=jobs)]) is None
    assert placed(Claim("new"), [HostLoad(0, 4, jobs[:3]), HostLoad(1, 4, coming=jobs[3:5])], {}) == 1


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_is_told_in_these_words(tmp_path: Path) -> None:
    """Ray itself names the token only in its log, and in the cause of its error."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:  # a path of Ray's sockets is short
        own = {**os.environ, "HOME": place}
        asks = {**own, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
        address, ray = f"127.0.0.1:{(port := free_port())}", Path(sys.executable).with_name("ray")
        options = ["--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={place}/r"]
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", f"--port={port}", *options], env=asks, stdout=subprocess.DEVNULL
        )
        try:
            asked = [sys.executable, "-m", "motet", "doctor", "--ray", address, "--directory", str(tmp_path)]
            answer = subprocess.run(asked, env=own, capture_output=True, text=True, timeout=PATIENCE, check=False)
            told = " ".join((answer.stdout + answer.stderr).split())
            assert "the cluster asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to that of the" in told
        finally:
            head.terminate()
            head.wait(PATIENCE)
