"""Every door of training on every engine: one run has a job for each.

Each learns on the embedded engine. Elsewhere a few steps show that versions are honest and that the trainer finds the
logprobs of what sampled, from which the same learning follows.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from motet.config import EngineConfig, RolloutConfig
from motet.config.rollout import check_effect
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.observe.results import RunResult
from tests.support.base_servers import BaseServer, base_servers
from tests.support.doors_run import FLOAT32_GAP, Json, doors, figures, run_of, teacher
from tests.support.fake_run import records
from tests.support.processes import ending
from tests.support.ray_nodes import cluster_of
from tests.support.service_run import FINAL, host_process, serving
from tests.support.tinker_run import run_script
from tests.support.vllm_server import vllm_python

GAIN = 0.02
"""The least by which the held-out reward of the best version is above that of the start."""
STEPS = 4
"""Of jobs that are not here to learn."""
GROUPS = (4, 2)
"""Their completions of a problem, and problems of a step."""
PROCESSES = {
    "two hosts": {"samplers": 0, "hosts": 2},
    "two Ray nodes": {"samplers": 0, "hosts": 2},
    "two shards": {"samplers": 0, "shard": 2},
}
"""Settings of a service's engine that samples by itself."""
FAKES: dict[str, Any] = {"fake SGLangs": "sglang"}
"""Protocols of servers in the tests' process."""


@pytest.fixture(scope="module")
def small() -> Any:
    return load("small", EngineConfig(dtype="float32", threads=1))


def served(servers: list[BaseServer], place: Path, **fields: Any) -> Json:
    settings = {"patience_seconds": 60.0, "directory": str(place / "served")}
    return {"engine": "vllm", "urls": [server.url for server in servers], **settings, **fields}


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, small: Any) -> Iterator[tuple[str, list[BaseServer]]]:
    with base_servers(small, 2, request.param) as found:
        yield request.param, found


@pytest.mark.parametrize(
    "servers",
    ["vllm", pytest.param("sglang", marks=[
        pytest.mark.soak,
        pytest.mark.cell("single turn, retry, environment, agent local, critic, distillation, preferences", "SGLang (fake)"),
        pytest.mark.cell("structured output, publish by files", "SGLang (fake)"),
    ])],
    indirect=True,
)  # fmt: skip
def test_every_door_trains_on_servers_that_speak_either_protocol(
    servers: tuple[str, list[BaseServer]], small: Any, tmp_path: Path
) -> None:
    """Two short steps of each; jobs are spread over both servers, each version is loaded once, and none stays."""
    engine, both = servers
    config = run_of(tmp_path, "base", 2, served(both, tmp_path, engine=engine), (2, 2), holdout=2)
    figures(run_config(config, base=small), tmp_path / "run")
    for server in both:
        assert server.completions
        assert len(set(server.loads)) == len(server.loads)
        assert server.loaded == []


@pytest.mark.soak
def test_every_door_learns_here(small: Any, tmp_path: Path) -> None:
    """The teacher knows its rows."""
    taught = teacher(tmp_path / "taught", 16)
    result = run_config(run_of(tmp_path, taught, 8, {"engine": "embedded"}, samplers=0), base=small)
    found = figures(result, tmp_path / "run")
    print("\n".join(f"{name}: {before:.2f} to {after:.2f}" for name, (before, after) in found.items()))
    for name, (before, after) in found.items():
        assert after > before + GAIN, f"{name} went from {before} to {after}"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "launcher"),
    [
        pytest.param({"hosts": 2}, "local", id="hosts", marks=pytest.mark.cell(
            "retry, environment, agent local, structured output, critic, distillation, preferences", "hosts 2"
        )),
        pytest.param({"shard": 2}, "local", id="shards", marks=pytest.mark.cell(
            "single turn, retry, environment, agent local, structured output, distillation, preferences", "shards 2"
        )),
        pytest.param({"hosts": 2}, "ray", id="ray", marks=pytest.mark.cell(
            "retry, environment, agent local, structured output, critic, distillation, preferences", "Ray"
        )),
    ],
)  # fmt: skip
def test_every_door_trains_on_several_processes(engine: Json, launcher: str, tmp_path: Path) -> None:
    leave = "critic" if "shard" in engine else ""
    with cluster_of(launcher) as cluster:
        trained(tmp_path, {"engine": "embedded"}, leave=leave, cluster=cluster, samplers=0, **engine)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "publish_by"),
    [
        pytest.param(1, "files", id="one", marks=[
            pytest.mark.cell("retry, environment, agent local, structured output", "vLLM"),
            pytest.mark.cell("critic, distillation, preferences", "vLLM"),
        ]),
        pytest.param(2, "tensors", id="two", marks=[
            pytest.mark.cell("single turn, retry, environment, agent local, structured output", "two vLLMs"),
            pytest.mark.cell("critic, distillation, preferences, publish by tensors", "two vLLMs"),
        ]),
    ],
)  # fmt: skip
def test_every_door_trains_on_a_vllm_that_is_killed(replicas: int, publish_by: str, small: Any, tmp_path: Path) -> None:
    """With two, one is killed: its jobs continue on the other, and it is started again."""
    launch = {
        "python": vllm_python(),
        "replicas": replicas,
        "args": ["--max-model-len", "512"],
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    rollout = {"engine": "vllm", "launch": launch, "publish_by": publish_by, "directory": str(tmp_path / "served")}
    result = trained(tmp_path, rollout, Kill(), base=small)
    assert not any("from files" in note for note in result.notes)


def kill_server(parent: Any = None) -> int:
    """The first server below a process, under its guard."""
    below = psutil.Process(None if parent is None else parent.pid).children(recursive=True)
    guards = [one for one in below if any("process/guard" in word for word in one.cmdline())]
    (server,) = guards[0].children()
    server.kill()
    return int(server.pid)


class Kill:
    """Of a server, once a job is under way."""

    def __init__(self) -> None:
        self.killed = 0

    def __call__(self, jobs: Any) -> None:
        if not self.killed and any(job.name == "agent-local" and job.step >= 1 for job in jobs):
            self.killed = kill_server()


def trained(place: Path, rollout: Json, kill: Kill | None = None, base: Any = None, **fields: Any) -> RunResult:
    """A run of all doors, whose figures are checked."""
    config = run_of(place, "base", STEPS, rollout, GROUPS, holdout=4, **fields)
    result = run_config(config, base=base, observe=kill)
    figures(result, place / "run")
    assert kill is None or kill.killed, "no server was killed"
    return result


@pytest.mark.cell("kept turns", "vLLM", refused="a server keeps prefixes by itself, so engine.kept_kv has no effect")
@pytest.mark.cell("kept turns", "two vLLMs", refused="as with one vLLM")
@pytest.mark.cell("kept turns", "SGLang (fake)", refused="as with vLLM")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_turns_are_kept_by_servers_themselves(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"engine\.kept_kv has no effect here"):
        check_effect(EngineConfig(kept_kv=0.25), RolloutConfig(engine=kind, urls=["http://one:1"]))


# --- a service -------------------------------------------------------------------------------------------------------------


def service_file(place: Path, where: str, twin: Path, fakes: list[BaseServer], cluster: Json) -> Path:
    """What `motet serve --config` reads: a base with one server and another with two, or one with two, or processes."""
    rollout: Json = {"engine": "embedded"}
    if where in FAKES:
        rollout = served(fakes, place, engine=FAKES[where])
    elif where not in PROCESSES:
        launch = {
            "python": vllm_python(),
            "replicas": 2,
            "args": ["--max-model-len", "512"],
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        }
        rollout = {"engine": "vllm", "launch": launch, "directory": str(place / "served")}
    engine = {"dtype": "float32", "threads": 1, **PROCESSES.get(where, {})}
    tree: Json = {"engine": engine, "cluster": cluster, "lease_seconds": 60}
    if where == "two bases":
        one = {**rollout, "launch": {**rollout["launch"], "replicas": 1}}
        tree["bases"] = {"small": {"base": "small", "rollout": one}, "twin": {"base": str(twin), "rollout": rollout}}
    else:
        tree |= {"rollout": rollout}
    (place / "serve.yaml").write_text(yaml.safe_dump(tree))
    return place / "serve.yaml"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("fake SGLangs", marks=pytest.mark.cell(
            "agent worker, agent gateway, Tinker client", "SGLang (fake)"
        )),
        pytest.param("two bases", marks=[
            pytest.mark.cell("agent worker, agent gateway, Tinker client, several bases", "vLLM"),
            pytest.mark.cell("several bases", "two vLLMs"),
        ]),
        pytest.param("two servers", marks=pytest.mark.cell(
            "agent worker, agent gateway, Tinker client", "two vLLMs"
        )),
        pytest.param("two hosts", marks=pytest.mark.cell("agent worker, agent gateway", "hosts 2")),
        pytest.param("two Ray nodes", marks=pytest.mark.cell(
            "agent worker, agent gateway, Tinker client", "Ray"
        )),
        pytest.param("two shards", marks=pytest.mark.cell("agent worker, agent gateway, Tinker client", "shards 2")),
    ],
)  # fmt: skip
def test_the_doors_of_a_service_train_and_what_samples_is_killed_once(
    where: str, small: Any, twin: Path, tmp_path: Path
) -> None:
    job = {
        name: one
        for name, one in doors(tmp_path, STEPS, "base", GROUPS, 4).items()
        if name in ("agent local", "single turn")
    }
    worked = {**job["agent local"], "name": "worked"}
    environment = {"name": "agent", "max_turns": 4}
    by_hand = {**job["agent local"], "name": "by-hand", "environment": environment, "optimizer": {"lr": 3e-3}}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"base": "small", "jobs": [worked]}))
    with contextlib.ExitStack() as stack:
        fakes = stack.enter_context(base_servers(small, 2, FAKES[where])) if where in FAKES else []
        cluster = stack.enter_context(cluster_of("ray" if where == "two Ray nodes" else "local"))
        config = service_file(tmp_path, where, twin, fakes, cluster)
        bases = where == "two bases"
        base = None if bases else "small"
        service = stack.enter_context(serving(tmp_path / "service", "--config", str(config), base=base))
        worker = stack.enter_context(ending(service.motet("agent", tmp_path / "jobs.yaml", cwd=tmp_path)))
        service.submit(by_hand)
        if bases:
            service.submit({**job["single turn"], "name": "twins", "base": "twin"})
        killed = False
        while service.job("by-hand")["state"] not in FINAL:
            episodes = service.ask("POST", "/v1/jobs/by-hand/work/episodes/lease", json={"worker": "me", "most": 16})[
                "units"
            ]
            with ThreadPoolExecutor(16) as pool:
                results = [one for one in pool.map(lambda one: played(service.url, one), episodes) if one]
            if results:
                service.ask("POST", "/v1/jobs/by-hand/work/episodes/results", json={"results": results})
            if not killed and service.job("by-hand")["step"] >= 1:
                killed = True
                if where in PROCESSES:
                    host_process(service.directory / "run", 1).kill()
                else:
                    fakes[0].go() if fakes else kill_server(service.process)
        out, _ = worker.communicate(timeout=600)
        assert worker.returncode == 0, out
        assert killed
        for name in ("worked", "by-hand", *(["twins"] if bases else [])):
            assert service.ended(name) == "succeeded", service.job(name)["message"]
            lines = records(service.directory / "run", service.job(name)["id"])
            steps = [line for line in lines if "logprob_gap" in line]
            assert [line["version"] for line in steps] == list(range(STEPS))
            assert max(line["logprob_gap"] for line in steps if line["tokens"]) < FLOAT32_GAP
        looped = run_script(service, "first_loop")
        print(f"Tinker: loss {looped['losses'][0]:.2f} to {looped['losses'][-1]:.2f}")
        assert looped["losses"][-1] < looped["losses"][0]
        for (tokens, logprobs, _), trained in zip(looped["sampled"], looped["trained"], strict=True):
            assert logprobs == pytest.approx(trained[-len(tokens) :], abs=FLOAT32_GAP)


def played(url: str, episode: Json) -> Json | None:
    """An episode by hand: one answer, which is right or not. None if it has ended with its host."""
    client = openai.OpenAI(base_url=f"{url}{episode['path']}", api_key=episode["key"], timeout=600)
    with client:
        try:
            said = client.chat.completions.create(model="any", messages=episode["problem"]["messages"])
        except openai.NotFoundError:
            return None
    right = episode["problem"]["answer"] in re.findall(r"\d+", said.choices[0].message.content or "")
    return {"id": episode["id"], "reward": float(right)}


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cell("hosts", "two vLLMs")
def test_hosts_have_a_vllm_each_and_one_that_is_killed_costs_only_time(tmp_path: Path) -> None:
    launch = {"python": vllm_python(), "args": ["--max-model-len", "512"], "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    rollout = {"engine": "vllm", "launch": launch, "directory": str(tmp_path / "served")}
    trained(tmp_path, rollout, Kill(), leave="retry structured-output critic distillation preferences", hosts=2)
    assert {path.name for path in (tmp_path / "run").glob("*server*")} == {"host-0-server-0.log", "host-1-server-0.log"}
