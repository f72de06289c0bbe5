"""Every door of training on every engine: one run has a job for each, and each learns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from motet.config import EngineConfig, RolloutConfig
from motet.config.rollout import check_effect
from motet.launch import load
from motet.results import RunResult
from motet.running import run_config
from tests.base_servers import BaseServer, base_servers
from tests.doors_run import Json, figures, run_of, teacher
from tests.vllm_server import vllm_python

GAIN = 0.02
"""The least that a held-out reward rises by."""


@pytest.fixture(scope="module")
def small() -> Any:
    return load("small", EngineConfig(dtype="float32", threads=1))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that knows its rows."""
    return teacher(tmp_path_factory.mktemp("taught"), 16)


def served(servers: list[BaseServer], place: Path, **fields: Any) -> Json:
    settings = {"health_seconds": 0.5, "patience_seconds": 60.0, "directory": str(place / "served")}
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
def test_every_door_learns_here(small: Any, taught: Path, tmp_path: Path) -> None:
    """What servers have to come up to."""
    learned(run_config(run_of(tmp_path, taught, 8, {"engine": "embedded"}, samplers=0), base=small), tmp_path)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"hosts": 2}, id="hosts", marks=pytest.mark.cell(
            "single turn, retry, environment, agent local, structured output, critic, distillation, preferences", "hosts 2"
        )),
        pytest.param({"shard": 2}, id="shards", marks=pytest.mark.cell(
            "single turn, retry, environment, agent local, structured output, distillation, preferences", "shards 2"
        )),
    ],
)  # fmt: skip
def test_every_door_learns_on_several_processes(engine: Json, taught: Path, tmp_path: Path) -> None:
    leave = "critic" if "shard" in engine else ""
    learned(
        run_config(run_of(tmp_path, taught, 8, {"engine": "embedded"}, leave=leave, samplers=0, **engine)), tmp_path
    )


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "publish_by"),
    [
        pytest.param(1, "files", id="one", marks=[
            pytest.mark.cell("retry, environment, agent local, structured output, critic, distillation, preferences", "vLLM"),
        ]),
        pytest.param(2, "tensors", id="two", marks=[
            pytest.mark.cell("single turn, retry, environment, agent local, structured output", "two vLLMs"),
            pytest.mark.cell("critic, distillation, preferences, publish by tensors", "two vLLMs"),
        ]),
    ],
)  # fmt: skip
def test_every_door_learns_on_a_vllm_that_is_killed(
    replicas: int, publish_by: str, small: Any, taught: Path, tmp_path: Path
) -> None:
    """With two, one is killed: its jobs continue on the other, and it is started again."""
    launch = {
        "python": vllm_python(),
        "replicas": replicas,
        "max_positions": 512,
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    rollout = {"engine": "vllm", "launch": launch, "publish_by": publish_by, "directory": str(tmp_path / "served")}
    killed = list[int]()

    def kill_one(jobs: Any) -> None:
        if not killed and all(job.step >= 2 for job in jobs):
            killed.append(kill_server())

    result = run_config(run_of(tmp_path, taught, 8, rollout), base=small, observe=kill_one)
    assert killed, "no server was killed"
    learned(result, tmp_path)
    assert not any("from files" in note for note in result.notes)


def kill_server() -> int:
    """The first server of this process, under its guard."""
    guards = [
        one
        for one in psutil.Process().children(recursive=True)
        if any("server_guard" in word for word in one.cmdline())
    ]
    (server,) = guards[0].children()
    server.kill()
    return int(server.pid)


def learned(result: RunResult, place: Path) -> None:
    found = figures(result, place / "run")
    print("\n".join(f"{name}: {before:.2f} to {after:.2f}" for name, (before, after) in found.items()))
    for name, (before, after) in found.items():
        assert after > before + GAIN, f"{name} went from {before} to {after}"


@pytest.mark.cell("kept turns", "vLLM", refused="a server keeps prefixes by itself, so engine.kept_kv has no effect")
@pytest.mark.cell("kept turns", "two vLLMs", refused="as with one vLLM")
@pytest.mark.cell("kept turns", "SGLang (fake)", refused="as with vLLM")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_turns_are_kept_by_servers_themselves(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"engine\.kept_kv has no effect here"):
        check_effect(EngineConfig(kept_kv=0.25), RolloutConfig(engine=kind, urls=["http://one:1"]))
