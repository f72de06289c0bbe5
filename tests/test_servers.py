"""Servers that are started here ask for a key of their own, whatever their kind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest

from motet.config import EngineConfig, LaunchConfig, RolloutConfig
from motet.launch import load
from motet.rollout.server import Demand
from motet.servers import launched


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
