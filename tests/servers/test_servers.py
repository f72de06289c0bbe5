"""Servers that are started here: their keys and their options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

import pytest

from motet.config import EngineConfig, LaunchConfig, RolloutConfig
from motet.hosts.launch import load
from motet.hosts.servers import launched
from motet.rollout.server import Demand
from tests.support import inside


def test_vllm_on_a_cpu_has_a_slot_that_no_version_takes(tmp_path: Path) -> None:
    """Its kernels give rows of the base the adapter of the last slot."""
    info = load("small", EngineConfig(threads=1)).info
    config = RolloutConfig(engine="vllm", launch=LaunchConfig(python=sys.executable))
    (server,) = launched(info, "a model", config, LaunchConfig(python=sys.executable), Demand(3, 9, 12), tmp_path)
    command = inside.command(server)
    assert [command[command.index(name) + 1] for name in ("--max-loras", "--max-cpu-loras")] == ["10", "10"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_options_of_a_launch_come_after_motets(kind: Literal["vllm", "sglang"], tmp_path: Path) -> None:
    """Both programs take the last of several."""
    launch = LaunchConfig(python=sys.executable, args=["--stream-interval", "16"])
    base = load("small", EngineConfig(threads=1))
    config = RolloutConfig(engine=kind, launch=launch)
    (server,) = launched(base.info, "model", config, launch, Demand(1, 2, 8), tmp_path)
    options = argparse.ArgumentParser()
    options.add_argument("--stream-interval")
    assert options.parse_known_args(inside.command(server))[0].stream_interval == "16"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_server_has_a_key_of_its_own(kind: Literal["vllm", "sglang"], tmp_path: Path) -> None:
    launch = LaunchConfig(python=sys.executable, replicas=2)
    config = RolloutConfig(engine=kind, launch=launch)
    base = load("small", EngineConfig(threads=1))
    first, second = launched(base.info, "model", config, launch, Demand(1, 2, 8), tmp_path)
    assert len({first.key, second.key, ""}) == 3
    for server in (first, second):
        command, environment = inside.command(server), server.process._env
        if kind == "vllm":  # where `ps` does not show it
            assert (environment["VLLM_API_KEY"], server.key in command) == (server.key, False)
        else:
            assert command[command.index("--api-key") + 1] == server.key
