"""Motet trains many LoRA adapters at once by reinforcement learning, each for its own job, over one frozen base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from motet.mkl import add_in_one_order

__version__ = "0.1.0"

add_in_one_order()

if TYPE_CHECKING:
    from motet.batch import AdamW
    from motet.client import AsyncClient, Client
    from motet.commands.check import check
    from motet.config import EngineConfig, JobConfig, RunConfig
    from motet.errors import MotetError
    from motet.jobfile import load_jobs
    from motet.running import JobResult, RunResult, run
    from motet.types import Message, Problem, Rollout
    from motet.verbs import Verbs

_HOMES = {
    "AdamW": "motet.batch",
    "AsyncClient": "motet.client",
    "Client": "motet.client",
    "EngineConfig": "motet.config",
    "JobConfig": "motet.config",
    "JobResult": "motet.running",
    "Message": "motet.types",
    "MotetError": "motet.errors",
    "Problem": "motet.types",
    "Rollout": "motet.types",
    "RunConfig": "motet.config",
    "RunResult": "motet.running",
    "Verbs": "motet.verbs",
    "check": "motet.commands.check",
    "load_jobs": "motet.jobfile",
    "run": "motet.running",
}

__all__ = [
    "AdamW",
    "AsyncClient",
    "Client",
    "EngineConfig",
    "JobConfig",
    "JobResult",
    "Message",
    "MotetError",
    "Problem",
    "Rollout",
    "RunConfig",
    "RunResult",
    "Verbs",
    "__version__",
    "check",
    "load_jobs",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import motet` is quick."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'motet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
