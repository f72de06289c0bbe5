"""Servers that are started here: their keys, their options, and the base that they read."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Literal

import pytest

from motet.config import EngineConfig, LaunchConfig, RolloutConfig
from motet.core.errors import ConfigError
from motet.hosting.launch import load
from motet.hosting.servers import build_servers, launched
from motet.rollout.server import Demand


def test_a_base_is_copied_to_memory_and_goes_with_the_engine(tmp_path: Path, small_base_dir: Path) -> None:
    """The server reads the copy, one for all replicas; a place that cannot be written is told before any is started."""
    memory = tmp_path / "memory"
    memory.mkdir()
    launch = LaunchConfig(python=sys.executable, replicas=2, preload=str(memory))
    config = RolloutConfig(engine="vllm", launch=launch, directory=str(tmp_path / "served"))
    info = load("small", EngineConfig(threads=1)).info
    engine = build_servers(info, config, Demand(1, 2, 8), "run", tmp_path)
    (copy,) = memory.iterdir()
    for process in engine.fleet.processes.values():
        assert process._command[process._command.index("--model") + 1] == str(copy)
    files = {path.relative_to(small_base_dir) for path in small_base_dir.rglob("*") if path.is_file()}
    assert {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()} == files
    asyncio.run(engine.close())
    assert list(memory.iterdir()) == []
    (tmp_path / "file").write_text("")
    nowhere = config.model_copy(update={"launch": launch.model_copy(update={"preload": str(tmp_path / "file")})})
    with pytest.raises(ConfigError, match=r"cannot be copied to rollout\.launch\.preload="):
        build_servers(info, nowhere, Demand(1, 2, 8), "run", tmp_path)


def test_vllm_on_a_cpu_has_a_slot_that_no_version_takes(tmp_path: Path) -> None:
    """Its kernels give rows of the base the adapter of the last slot."""
    info = load("small", EngineConfig(threads=1)).info
    config = RolloutConfig(engine="vllm", launch=LaunchConfig(python=sys.executable))
    (server,) = launched(info, "a model", config, LaunchConfig(python=sys.executable), Demand(3, 9, 12), tmp_path)
    command = server.process._command
    assert [command[command.index(name) + 1] for name in ("--max-loras", "--max-cpu-loras")] == ["10", "10"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_server_has_a_key_of_its_own(kind: Literal["vllm", "sglang"], tmp_path: Path) -> None:
    launch = LaunchConfig(python=sys.executable, replicas=2)
    config = RolloutConfig(engine=kind, launch=launch)
    base = load("small", EngineConfig(threads=1))
    first, second = launched(base.info, "model", config, launch, Demand(1, 2, 8), tmp_path)
    assert len({first.key, second.key, ""}) == 3
    for server in (first, second):
        command, environment = server.process._command, server.process._env
        if kind == "vllm":  # where `ps` does not show it
            assert (environment["VLLM_API_KEY"], server.key in command) == (server.key, False)
        else:
            assert command[command.index("--api-key") + 1] == server.key
