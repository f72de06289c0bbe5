"""Scripts of tests/support/tinker_scripts.py in the environment that `make tinker` makes, against a service under test."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.speed.envs import directory, python_of

from tests.support.service_run import Service
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("tinker_scripts.py")
NEWEST = "tinker"
SCRIPTED = (
    "steps", "first_loop", "losses", "soft_targets", "checkpoints", "samples", "chunks", "refusals", "releases",
    "worst",
)  # fmt: skip
"""Those of the newest release, each for itself."""


def tinker_python(env: str = NEWEST) -> str:
    """The interpreter that has the package in a release of its own; skips where there is none."""
    found = python_of(directory(), env)
    if not found.exists():
        pytest.skip(f"{env} is not installed in {found.parents[1]}: run `make tinker` (`make soak` has all releases)")
    return str(found)


class Script:
    """One that runs."""

    def __init__(self, service: Service, name: str, key: str, *options: str, env: str = NEWEST) -> None:
        self._out = service.directory / f"{name}-{os.urandom(4).hex()}.json"
        command = [
            tinker_python(env),
            str(SCRIPTS),
            name,
            f"{service.url}/tinker",
            f"tml-{key}",
            str(self._out),
            *options,
        ]
        settings = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def found(self) -> Any:
        """What it found, once it is done."""
        try:
            told, _ = self._process.communicate(timeout=2 * PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
        assert self._process.returncode == 0, f"status {self._process.returncode}: {told}"
        return json.loads(self._out.read_text())


class Scripts(dict[str, Any]):
    """What scripts found, by name; one that failed turns red whoever asks for it."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        assert "failed" not in found, found["failed"]
        return found


def run_script(service: Service, name: str, key: str = "none", *options: str, env: str = NEWEST) -> Any:
    """What a script finds."""
    return Script(service, name, key, *options, env=env).found()


def job_of(model_id: str) -> str:
    """The name of a model's job."""
    session, _, number = model_id.partition(":train:")
    return f"tinker-{session.removeprefix('session-')}-{number}"
