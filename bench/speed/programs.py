"""How each worker is started: which file, in which environment, with which base and settings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.speed.envs import python_of
from bench.speed.link import Program
from bench.speed.rows import RANK

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
PEERS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "vllm": ("vllm", "vllm_side", {"adapters": 0}),
    "vllm-lora": ("vllm", "vllm_side", {"adapters": 4}),
    "peft": ("trl", "peft_side", {"autocast": True}),
    "peft-bf16": ("trl", "peft_side", {"autocast": False}),
    "trl": ("trl", "trl_side", {"autocast": False}),
}
"""Peers by name: the environment, the worker's file, its settings."""


def threads() -> int:
    """Cores that the bench may use; `OMP_NUM_THREADS` says fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(int(os.environ.get("OMP_NUM_THREADS") or cores), cores)


def program(name: str, base: str, directory: Path, envs: Path, *, quick: bool, device: str = "cpu") -> Program:
    """A worker: a peer, `motet`, `service` or `machine`; what follows a colon tells workers on different bases apart.

    `base` is what Motet calls the base, `directory` is where it lies, for peers. With `quick`, start-up counts, so vLLM is
    not compiled.
    """
    kind = name.partition(":")[0]
    count = threads()
    settings: dict[str, Any] = {"threads": count, "device": device, "model": str(directory), "rank": RANK}
    environment = {**OFFLINE, "OMP_NUM_THREADS": str(count), "PYTHONUNBUFFERED": "1"}
    if kind in PEERS:
        env, file, own = PEERS[kind]
        command = _command(python_of(envs, env), file, {**settings, "eager": quick, **own})
        return Program(name, command, environment, _missing(envs, env))
    if kind == "service":
        settings |= {"model": base, "tinker": str(python_of(envs, "tinker"))}
        command = _command(Path(sys.executable), "service_side", settings)
        return Program(name, command, environment, _missing(envs, "tinker"))
    if kind != "machine":
        settings |= {"model": base}
    file = "machine_side" if kind == "machine" else "motet_side"
    return Program(name, _command(Path(sys.executable), file, settings), environment)


def _command(python: Path, file: str, settings: dict[str, Any]) -> list[str]:
    return [str(python), "-m", f"bench.speed.workers.{file}", json.dumps(settings)]


def _missing(envs: Path, env: str) -> str:
    """Why an environment is not there, or could not be made; empty where it is."""
    if (note := envs / f"{env}.failed").is_file():
        return note.read_text().strip()
    return "" if python_of(envs, env).is_file() else f"there is no environment {envs / env}: `make bench` makes it"
